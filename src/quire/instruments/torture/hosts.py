"""Access: pages of other sites, servers with empty keys, tenants that spy on each other."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPResponse
from typing import Any

from quire.core.errors import ExecutionError
from quire.instruments.http.plain import ask
from quire.instruments.http.server_process import ServerProcess
from quire.instruments.http.sockets import head
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import CaseFailedError, require
from quire.instruments.torture.refusals import COMPLETIONS, Probe, bad, refuse_all
from quire.instruments.torture.stage import KEY, OTHER_KEY, PLAIN, ServerSpec, Stage, TortureServer

THIRD_KEY = "torture-key-three"
NUM_PLACES = 5
BODY = json.dumps({"prompt": "A block is", "max_tokens": 4}).encode()
EVIL = "evil.example"


def pages(stage: Stage) -> str:
    """I40: foreign host names that resolve to this machine, and pages of other sites, as browsers send them."""
    hosts = (EVIL, f"{EVIL}:80", f"localhost.{EVIL}", f"127.0.0.1.{EVIL}", f"localhost@{EVIL}", f"[::1].{EVIL}")
    probes = [
        Probe(f"Host {host} for {path}", frozenset({421}), path, method="GET", host=host, code="unknown_host")
        for host in hosts
        for path in ("/livez", "/v1/models", "/metrics", "/")
    ]
    probes += [Probe(f"Host {host}", frozenset({421}), body=BODY, host=host, code="unknown_host") for host in hosts]
    for origin in (f"http://{EVIL}", f"http://localhost.{EVIL}", "null"):
        for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json"):
            headers = {"Origin": origin, "Content-Type": kind}
            probes.append(Probe(f"{kind} of {origin}", frozenset({403}), body=BODY, headers=headers))
    embedded = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Dest": "empty"}
    probes.append(Probe("an embedded stream", frozenset({403}), "/live", method="GET", headers=embedded))
    probes.append(Probe("a target with a name", frozenset({421}), f"http://{EVIL}/livez", method="GET"))
    twice = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"
    probes.append(Probe("two names", frozenset({400}), data=twice, code="repeated_header"))
    with stage.serving() as server:
        for host in ("localhost", "127.0.0.1:1", "[::1]", "quire.localhost"):
            require(ask(f"{server.url}/livez", headers={"Host": host}).status == 200, f"Host {host} is refused")
        return refuse_all(server, probes)


def empty_keys(stage: Stage) -> str:
    """I41: empty keys: the server must refuse to start, not run without keys."""
    empty_file, blank_file, config = (stage.folder / name for name in ("empty.yaml", "blank.yaml", "config.yaml"))
    empty_file.write_text("\n\n", encoding="utf-8")
    blank_file.write_text("- {name: ada, key: ' '}\n", encoding="utf-8")
    config.write_text("api_key:\n", encoding="utf-8")
    environments: list[dict[str, str]] = [{"QUIRE_API_KEY": text} for text in ("", " ", ",", " , ", f"{KEY},")]
    environments += [{"QUIRE_API_KEYS_FILE": text} for text in ("", str(empty_file), str(blank_file))]
    environments.append({"QUIRE_CONFIG": str(config)})
    for environment in environments:
        _require_no_start(f"{environment}", environment=environment)
    _require_no_start("--api-key ''", options=("--api-key", ""))
    return f"{len(environments) + 1} servers refused to start"


def _require_no_start(what: str, **options: Any) -> None:
    try:
        with ServerProcess(PLAIN.config, start_timeout_s=30.0, **options):
            raise CaseFailedError(f"a server has started with {what}")
    except ExecutionError as error:
        is_refused = "has ended with status 2: quire: error: " in str(error)
        require(is_refused and KEY not in str(error), f"with {what}: {error}")


def neighbours(stage: Stage) -> str:
    """I42: a tenant requests facts about others and a higher priority, and sends two keys at once."""
    other = {"Authorization": f"Bearer {OTHER_KEY}"}
    two = b"".join(f"Authorization: Bearer {key}\r\n".encode() for key in (KEY, OTHER_KEY))
    probes = [
        Probe("/metrics", frozenset({403}), "/metrics", method="GET", headers=other, code="operator_required"),
        bad({"priority": -1}, headers=other, param="priority"),
        bad({"priority": -1_000_000}, headers=other, param="priority"),
        Probe(
            "two keys",
            frozenset({400}),
            data=b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + two + b"\r\n",
            code="repeated_header",
        ),
    ]
    with stage.serving(_spec(stage)) as server:
        require(server.wait_for_metric("quire_steps_total") > 0, "an operator does not see the counters")
        load = ask(f"{server.url}/load", headers=other).json()
        require(not any(load.values()), f"/load shows a tenant other tenants: {load}")
        with _watching(server, OTHER_KEY) as answer:
            require(answer.status == 200, f"a tenant that watches got {answer.status}")
            lines = [json.loads(answer.readline()) for _ in range(4)]
        for line in lines[1:]:
            told = [line[name] for name in ("step", "blocks", "requests", "events", "ttft_ms", "itl_ms", "running")]
            told += [*line["ledger"].values(), *line["totals"].values()]
            require(not any(told), f"/live shows a tenant other tenants: {line}")
        remark = refuse_all(server, probes)
        fine = [ask(server.url + COMPLETIONS, _body(server, priority), headers=other) for priority in (None, 0, 9)]
        require([answer.status for answer in fine] == [200] * 3, "a tenant may not request a lower priority")
    return remark


def places(stage: Stage) -> str:
    """I43: a tenant opens /live streams up to its limit: another tenant and an operator still get places."""
    with stage.serving(_spec(stage)) as server, ExitStack() as stack:
        statuses = [stack.enter_context(_watching(server, OTHER_KEY)).status for _ in range(3 * NUM_PLACES)]
        taken = statuses.count(200)
        require(0 < taken < NUM_PLACES - 1, f"a tenant took {taken} of {NUM_PLACES} places")
        require(set(statuses) == {200, 429}, f"it got {sorted(set(statuses))}")
        for who, key in (("another tenant", THIRD_KEY), ("an operator", KEY)):
            status = stack.enter_context(_watching(server, key)).status
            require(status == 200, f"{who} got {status}")
    return f"it took {taken} of {NUM_PLACES}"


def _spec(stage: Stage) -> ServerSpec:
    """Return a server with two tenants and an operator; bystanders use the operator's key."""
    path = stage.folder / "keys.yaml"
    tenants: list[dict[str, Any]] = [
        {"name": "owner", "key": KEY, "operator": True},
        {"name": "other", "key": OTHER_KEY},
        {"name": "third", "key": THIRD_KEY},
    ]
    path.write_text(json.dumps(tenants), encoding="utf-8")
    return ServerSpec.of({"QUIRE_API_KEYS_FILE": str(path), "QUIRE_MAX_LIVE_READERS": str(NUM_PLACES)})


def _body(server: TortureServer, priority: int | None) -> dict[str, Any]:
    return {"model": server.model, "prompt": "A block is", "max_tokens": 2, "priority": priority}


@contextmanager
def _watching(server: TortureServer, key: str) -> Iterator[HTTPResponse]:
    """Yield the answer to a reader of /live; its body is read line by line."""
    with socket.create_connection(server.address, timeout=10.0) as connection:
        connection.sendall(head("GET", "/live", {"Authorization": f"Bearer {key}"}))
        answer = HTTPResponse(connection)
        try:
            answer.begin()
            yield answer
        finally:
            answer.close()


HOSTS = (
    Case("I40", "pages of other sites", pages),
    Case("I41", "keys left empty", empty_keys),
    Case("I42", "tenants that look at each other", neighbours),
    Case("I43", "one tenant in every place of /live", places),
)
