"""Bodies that are cheap to send and expensive to read: their status, the server's memory, and the service of others."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

from quire.instruments.http.sockets import head, read_answer
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.floods import FLOODS, MEBIBYTE, Flood, limit_of, send_flood, watching
from quire.instruments.torture.refusals import COMPLETIONS, JSON_TYPE, Probe, bad, bad_chat, check_answer, send
from quire.instruments.torture.stage import KEY, OTHER_KEY, PLAIN, ServerSpec, Stage, TortureServer, wait_until

MAX_GROWTH_BYTES: Final = 64 * MEBIBYTE
MAX_HELD_S: Final = 2.0
"""The longest allowed delay of the event loop. Usually milliseconds, but more on a busy machine."""

MIN_SERVED: Final = 3
"""Bystanders that must be served during a case."""

LEAST_S, MOST_S = 3.0, 60.0
NUM_SENDERS: Final = 24
SLOW: Final = ServerSpec.of(
    {
        "QUIRE_API_KEY": f"{KEY},{OTHER_KEY}",
        "QUIRE_OPEN_METRICS": "yes",
        "QUIRE_MAX_BODY": "512KiB",
        "QUIRE_MAX_BODIES": "4MiB",
        "QUIRE_BODY_TIMEOUT_S": "30",
    }
)

Act = Callable[[TortureServer], str]


def watched(stage: Stage, act: Act, spec: ServerSpec = PLAIN) -> str:
    """Repeat an act until bystanders have been served; raises if the server holds too much memory."""
    with stage.serving(spec) as server:
        assert server.bystanders is not None
        counts, begun = server.bystanders.counts, time.monotonic()
        with watching(server.process.pid, server.url) as found:
            served = counts.num_same
            remark = act(server)
            while counts.num_same < served + MIN_SERVED or time.monotonic() < begun + LEAST_S:
                require(time.monotonic() < begun + MOST_S, "no bystander was served meanwhile")
                act(server)
        require(found.num_answers > 0, "/livez was not answered")
        growth, held_ms = found.growth_bytes / MEBIBYTE, 1e3 * found.slowest_s
        require(found.growth_bytes < MAX_GROWTH_BYTES, f"the server grew by {growth:.0f} MiB")
        require(found.slowest_s < MAX_HELD_S, f"/livez took {held_ms:.0f} ms")
    return f"{remark}, {growth:+.0f} MiB, /livez {held_ms:.0f} ms at most"


def flood_case(number: str, name: str, floods: Sequence[Flood]) -> Case:
    """Return the case that sends floods, each at its full size and at the largest allowed size."""

    def run(stage: Stage) -> str:
        bodies: list[tuple[str, bytes]] = []

        def act(server: TortureServer) -> str:
            if not bodies:
                limits = {flood.path: limit_of(server.address, flood.path, server.headers) for flood in floods}
                sizes = [(flood, {flood.num_bytes, min(flood.num_bytes, limits[flood.path])}) for flood in floods]
                bodies.extend((flood.path, flood.body(size)) for flood, each in sizes for size in sorted(each))
            for path, body in bodies:
                answer = send_flood(server.address, path, body, server.headers)
                require(answer.status in (400, 413), f"{len(body)} bytes to {path} got {answer.status}")
                require(len(answer.body) < 1500, f"the refusal of {len(body)} bytes has {len(answer.body)} bytes")
            return f"{len(bodies)} bodies of up to {max(len(body) for _, body in bodies) / MEBIBYTE:.0f} MiB"

        return watched(stage, act)

    return Case(number, name, run)


def probe_case(number: str, name: str, make_probes: Callable[[], Sequence[Probe]]) -> Case:
    """Return the case that sends probes; each must be refused with an answer that quotes little."""

    def run(stage: Stage) -> str:
        probes = make_probes()

        def act(server: TortureServer) -> str:
            for probe in probes:
                answer = send(server, probe)
                check_answer(probe, answer)
                shown = max(answer.body.count(sign) for sign in (b"x", b"9", b"["))
                require(shown < 250, f"{probe.name}: the refusal shows {shown} characters of the input")
            return f"{len(probes)} inputs"

        return watched(stage, act)

    return Case(number, name, run)


def slow_senders(stage: Stage) -> str:
    """I34: many senders stop in mid-body: a key fills only its own share, others are served, memory is freed."""
    body = b'{"prompt": "' + b"x" * (400 << 10)

    def act(server: TortureServer) -> str:
        statuses = []
        with ExitStack() as stack:
            for _ in range(NUM_SENDERS):
                sender = stack.enter_context(socket.create_connection(server.address, timeout=30.0))
                fields = {**JSON_TYPE, "Authorization": f"Bearer {KEY}", "Content-Length": str(len(body) + 100)}
                sender.sendall(head("POST", COMPLETIONS, fields))
                sender.sendall(body)
                sender.settimeout(0.2)
                try:
                    statuses.append(read_answer(sender, time.perf_counter()).status)
                except TimeoutError:
                    statuses.append(0)
            held = server.metric("quire_body_bytes")
            require(0 < held <= MEBIBYTE, f"the bodies of one key hold {held / MEBIBYTE:.1f} MiB, a quarter is 1 MiB")
            require(set(statuses) == {0, 429}, f"senders got {sorted(set(statuses))}, not 429 or silence")
            large = "x" * (300 << 10)
            kept, server.headers = server.headers, {"Authorization": f"Bearer {OTHER_KEY}"}
            try:
                other = server.complete(prompt="a", max_tokens=1, user=large)
            finally:
                server.headers = kept
            require(other.status == 200, f"the large call of another key got {other.status}")
        wait_until(lambda: server.metric("quire_body_bytes") == 0, "rid of the senders' bytes")
        return f"{NUM_SENDERS} senders, {statuses.count(429)} refused"

    return watched(stage, act, SLOW)


def _nested() -> Sequence[Probe]:
    deep, closed = b"[" * 200_000, "[" * 1000 + "]" * 1000
    arguments = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": closed}}]}]
    function = {"name": "f", "parameters": {"a": json.loads("[" * 400 + "]" * 400)}}
    return (
        bad(deep, code="invalid_json"),
        bad(b'{"prompt": ' + deep, code="invalid_json"),
        bad(b'{"a":' * 200_000, code="invalid_json"),
        bad(b'{"prompt": "a", "metadata": ' + deep, code="invalid_json"),
        bad(b'{"prompt": "a", "metadata": ' + closed.encode() + b"}", code="invalid_json"),
        bad_chat({"messages": arguments}, param="messages"),
        bad_chat({"tools": [{"type": "function", "function": function}]}),
    )


def _numbers() -> Sequence[Probe]:
    names = ("n", "max_tokens", "temperature", "seed", "logprobs", "priority")
    digits = ("9" * 4000, "9" * 500_000, "-" + "9" * 500_000, "1e999999", "9" * 400_000 + "." + "9" * 100_000)
    return [bad(f'{{"prompt": "a", "{name}": {number}}}'.encode()) for name in names for number in digits]


def _twins() -> Sequence[Probe]:
    return (
        bad(b'{"prompt": "a", "prompt": "b"}', code="invalid_json", param="prompt"),
        bad(b'{"prompt": "a", "pro\\u006dpt": "b"}', code="invalid_json", param="prompt"),
        bad(b'{"prompt": "a", "logit_bias": {"1": 1, "1": 2}}', code="invalid_json"),
        bad(b'{"prompt": "a", "metadata": {"a": [{"b": 1, "b": 2}]}}', code="invalid_json"),
        bad(b'{"prompt": "a"' + b', "n": 1' * 10_000 + b"}", code="invalid_json", param="n"),
        bad(b'{"prompt": "a"' + b', "n": 1' * 100_000 + b"}", param="n"),
        bad(b'{"prompt": "a", "%s": 1, "%s": 2}' % (b"x" * 100_000, b"x" * 100_000), code="invalid_json"),
    )


def _echoes() -> Sequence[Probe]:
    long = "x" * 100_000
    message: dict[str, Any] = {"role": "user", "content": "a"}
    completions: tuple[dict[str, Any], ...] = (
        *({name: long} for name in ("n", "stop", "cache_salt", "request_id", "truncation_side", "suffix", "echo")),
        *({name: [long]} for name in ("bad_words", "allowed_token_ids", "stop_token_ids", "prompt_logprobs")),
        *({long: 1}, {"prompt": [1, long]}, {"logit_bias": {long: 1}}, {"stream_options": {long: 1}}),
        *({"response_format": {"type": long}}, {"structured_outputs": {"json": long}}),
    )
    chats: tuple[dict[str, Any], ...] = (
        *({name: long} for name in ("tool_choice", "reasoning_effort", "tools", "messages", "audio")),
        *({"messages": [{"role": long, "content": "a"}]}, {"messages": [message | {"content": [{"type": long}]}]}),
        *({"chat_template_kwargs": {long: 1}}, {"tools": [{"type": "function", "function": {"name": long}}]}),
    )
    return [*map(bad, completions), *map(bad_chat, chats)]


BODIES: Final = (
    *(flood_case(f"I{30 + index}", flood.name, [flood]) for index, flood in enumerate(FLOODS[:4])),
    Case("I34", "slow senders that hold bytes", slow_senders),
    probe_case("I35", "deep nesting", _nested),
    probe_case("I36", "huge numbers", _numbers),
    probe_case("I37", "keys that stand twice", _twins),
    probe_case("I38", "long strings that an error would show", _echoes),
    flood_case("I39", "messages, prompts, keys, arguments and line feeds by the million", FLOODS[4:]),
)
