"""Bundles of KV blocks as bodies: wrong contents, wrong callers, truncated bodies and slow senders."""

from __future__ import annotations

import json
import random
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from quire.instruments.http.plain import Answer, ask
from quire.instruments.http.sockets import head, read_answer, send_raw
from quire.instruments.torture.bodies import watched
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import CaseFailedError, require
from quire.instruments.torture.hosts import THIRD_KEY
from quire.instruments.torture.refusals import Probe, refuse_all
from quire.instruments.torture.stage import KEY, OTHER_KEY, ServerSpec, Stage, TortureServer, wait_until

IMPORT, EXPORT, WARM = "/cache/import", "/cache/export", "/cache/warm"
BUNDLE: Final = {"Content-Type": "application/octet-stream"}
PROMPT: Final = [5 + index % 50 for index in range(100)]
NUM_BLOCKS: Final = 6  # full blocks of the prompt
BODY_S: Final = 2
NUM_CUTS = 24
TERABYTE: Final = 1 << 40


def bundles_that_lie(stage: Stage) -> str:
    """I44: bundles with wrong bytes, lengths, counts and callers: none may reach the engine or leave a file."""
    with stage.serving(_spec(stage)) as server:
        bundle = _exported(server)
        remark = refuse_all(server, [*_lies(bundle, random.Random(stage.seed)), *_callers(bundle), *_prompts()])
        require(not _spools(stage), "a refused bundle has left a file")
        taken = _import(server, bundle)
        require(taken.status == 200 and taken.json()["known"] == NUM_BLOCKS, f"the true bundle got {taken.body[:99]!r}")
    return remark


def cut_and_slow_bundles(stage: Stage) -> str:
    """I45: senders disconnect, stop, trickle and never end: others are served, and the next bundle gets its turn."""
    bundles: list[bytes] = []

    def act(server: TortureServer) -> str:
        bundle = bundles[0] if bundles else _exported(server)
        bundles[:] = [bundle]
        for cut in range(0, len(bundle), len(bundle) // NUM_CUTS):
            _sending(server, bundle[:cut], len(bundle)).close()
        wait_until(lambda: not _spools(stage), "rid of the truncated bodies")
        with _sending(server, bundle[: len(bundle) // 2], TERABYTE) as announced:
            require(read_answer(announced, time.perf_counter()).status == 413, "an announced terabyte was not refused")
        seconds = 0.0
        for trickles in (False, True):
            wait_until(lambda: _import(server, b"").status == 400, "free for the next bundle")
            with _sending(server, bundle[: len(bundle) // 2], len(bundle)) as slow:
                wait_until(lambda: bool(_spools(stage)), "at the slow body")
                require(_import(server, bundle).status == 429, "a second bundle was accepted at the same time")
                seconds = max(seconds, _until_refused(slow, trickles=trickles))
        answer = send_raw(server.address, _endless(bundle, server))
        require(answer.status == 400, f"a body without an end got {answer.status}")
        wait_until(lambda: _import(server, bundle).status == 200, "ready for a true bundle")
        require(not _spools(stage), "a body has left a file")
        return f"{NUM_CUTS} truncated, the slow ones refused after {seconds:.1f} s"

    return watched(stage, act, _spec(stage))


# ---- requests -------------------------------------------------------------------------------------------------------


def _lies(bundle: bytes, rng: random.Random) -> list[Probe]:
    """Return bundles that differ from the exported one."""
    bad = {"nothing": b"", "JSON": b"{}" * 500, "zeros": bytes(len(bundle)), "twice": bundle * 2}
    bad |= {f"cut at {at}": bundle[:at] for at in (1, 8, 19, 20, 300, len(bundle) // 2, len(bundle) - 1)}
    bad |= {"one byte more": bundle + b"x", "from the middle": bundle[len(bundle) // 2 :]}
    for at in sorted(rng.sample(range(len(bundle)), 20)):
        changed = bytearray(bundle)
        changed[at] ^= 1 << rng.randrange(8)
        bad[f"a flipped bit at {at}"] = bytes(changed)
    for name, at, size in (("length of the beginning", 8, 4), ("number of blocks", 12, 8)):
        bad[f"the largest {name}"] = bundle[:at] + b"\xff" * size + bundle[at + size :]
    probes = [_probe(name, body, 400) for name, body in bad.items()]
    probes += [_probe(f"announces {text}", b"", 413, {"Content-Length": text}) for text in (f"{TERABYTE}", "9" * 18)]
    lengths = ("9" * 30, "-1", "1e9", "0x10")
    probes += [_probe(f"announces {text}", b"", 400, {"Content-Length": text}) for text in lengths]
    kinds = ("application/json", "text/plain", "multipart/form-data; boundary=a")
    return probes + [_probe(f"of the type {kind}", bundle, 415, {"Content-Type": kind}) for kind in kinds]


def _callers(bundle: bytes) -> list[Probe]:
    """Return calls with keys that do not allow them, and calls for a model that does not exist."""
    body, probes = json.dumps({"prompt": PROMPT}).encode(), []
    for path, sent, kind in ((IMPORT, bundle, BUNDLE), (EXPORT, body, {}), (WARM, body, {})):
        refused = {f"{path} of a tenant": (OTHER_KEY, 403), f"{path} with a wrong key": ("torture-key-none", 401)}
        if path != WARM:
            refused[f"{path} of a key that is not kept"] = (THIRD_KEY, 403)
        for name, (key, status) in refused.items():
            fields = {**kind, "Authorization": f"Bearer {key}"}
            probes.append(Probe(name, frozenset({status}), path, sent, headers=fields))
        probes.append(Probe(f"{path} without a key", frozenset({401}), path, sent, headers=kind, with_key=False))
    lost = Probe("for another model", frozenset({404}), f"{IMPORT}?model=none", bundle, headers=BUNDLE)
    return [*probes, lost]


def _prompts() -> list[Probe]:
    """Return prompts that are invalid for warming and export."""
    fields: list[tuple[str, dict[str, Any]]] = [
        (WARM, {"prompt": [[7]] * 129}),
        (WARM, {"prompt": [1 << 40]}),
        (WARM, {"prompt": "a", "max_tokens": 5}),
        (EXPORT, {"prompt": [PROMPT, PROMPT]}),
        (EXPORT, {"prompt": [7] * 5000}),
        (EXPORT, {}),
        (EXPORT, {"prompt": "a", "messages": []}),
    ]
    return [Probe(f"{path} of {each}"[:80], frozenset({400}), path, json.dumps(each).encode()) for path, each in fields]


def _probe(name: str, body: bytes, status: int, fields: dict[str, str] | None = None) -> Probe:
    return Probe(f"a bundle: {name}", frozenset({status}), IMPORT, body, headers=BUNDLE | (fields or {}), large=True)


def _endless(bundle: bytes, server: TortureServer) -> bytes:
    """Return a bundle in a body without an end, with 4 MiB after the bundle."""
    piece = b"%x\r\n%b\r\n"
    start = head("POST", IMPORT, {**BUNDLE, **server.headers, "Transfer-Encoding": "chunked"})
    return start + piece % (len(bundle), bundle) + (piece % (1 << 20, bytes(1 << 20))) * 4


# ---- how ------------------------------------------------------------------------------------------------------------


def _spec(stage: Stage) -> ServerSpec:
    """Return a server with a disk cache, a tenant, and two operators, one with `persist` and one without."""
    path = stage.folder / "bundle-keys.yaml"
    owners = [{"name": "owner", "key": KEY, "operator": True, "persist": True}]
    owners += [{"name": "third", "key": THIRD_KEY, "operator": True}, {"name": "other", "key": OTHER_KEY}]
    path.write_text(json.dumps(owners), encoding="utf-8")
    environment = {"QUIRE_API_KEYS_FILE": str(path), "QUIRE_BODY_TIMEOUT_S": str(BODY_S)}
    return ServerSpec.of(environment, disk_cache=str(_folder(stage)), disk_cache_size="8MiB")


def _folder(stage: Stage) -> Path:
    return stage.folder / "bundles"


def _spools(stage: Stage) -> list[Path]:
    """Return the files of bundles in transfer."""
    return list(_folder(stage).glob("incoming-*"))


def _exported(server: TortureServer) -> bytes:
    answer = ask(server.url + EXPORT, {"prompt": PROMPT}, headers=server.headers)
    require(answer.status == 200, f"an export got {answer.status}: {answer.body[:200]!r}")
    return answer.body


def _import(server: TortureServer, bundle: bytes) -> Answer:
    return ask(server.url + IMPORT, bundle, headers={**BUNDLE, **server.headers})


def _sending(server: TortureServer, body: bytes, num_announced: int) -> socket.socket:
    """Return a connection on which the beginning of a body was sent."""
    connection = socket.create_connection(server.address, timeout=30.0)
    fields = {**BUNDLE, **server.headers, "Content-Length": str(num_announced)}
    with suppress(BrokenPipeError, ConnectionResetError):  # it may be refused before it has arrived
        connection.sendall(head("POST", IMPORT, fields) + body)
    return connection


def _until_refused(connection: socket.socket, *, trickles: bool) -> float:
    """Send nothing more, or a byte now and then, until the server gives up; returns the seconds."""
    started = time.monotonic()
    connection.settimeout(0.25)
    while time.monotonic() < started + 10 * BODY_S:
        try:
            status = read_answer(connection, started).status
        except TimeoutError:
            with suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(b"x" if trickles else b"")
            continue
        require(status == 408, f"a slow body got {status}")
        return time.monotonic() - started
    raise CaseFailedError(f"a slow body is still read after {10 * BODY_S} s")


BUNDLES: Final = (
    Case("I44", "bundles that lie, and callers that may not", bundles_that_lie),
    Case("I45", "bundles that are cut, slow and endless", cut_and_slow_bundles),
)
