"""Whom a server answers: by which name, to which page, and what a tenant's key tells of other tenants."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidConfigError
from quire.serve.config import ServerConfig
from quire.serve.tenants import read_tenants
from support.bare_server import BareServer, serving
from support.live_lines import LiveLines
from support.server import RunningServer, running_server

LOOPBACK = (
    *("localhost", "LOCALHOST", "localhost.", "localhost:8000", "localhost:", "quire.localhost", "127.0.0.1:1"),
    *("127.255.0.9", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000"),
)
ELSEWHERE = (
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost"),
    *("evil.example/localhost", "localhost@evil.example", "localhost evil.example", "127.0.0.1, evil.example"),
    *("[::1]evil.example", "[::2]", "192.168.1.7", "0.0.0.0", "127.1.evil.example", "localhost\xe9", ".localhost"),
    *("a" * 3000, "localhost." * 300, "[" + ":" * 300 + "]"),
)


def request(path: str, *lines: str, method: str = "GET", version: str = "1.1") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/{version}", *lines, "", "")).encode("latin-1")


def called(server: BareServer, path: str, *lines: str, **more: str) -> tuple[int, str | None]:
    """The status and the code of the answer to a call with these headers."""
    answer = server.send(request(path, *lines, **more))
    return answer.status, answer.error["code"] if answer.status >= 400 else None


@pytest.fixture(scope="module")
def server() -> Iterator[BareServer]:
    """A server on loopback, without keys."""
    with serving() as running:
        yield running


@pytest.fixture(scope="module")
def named() -> Iterator[BareServer]:
    """A server that has names of its own."""
    with serving(allowed_host=("quire.example", "[2001:db8::7]")) as running:
        yield running


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_names_and_addresses_are_answered(server: BareServer, host: str) -> None:
    assert called(server, "/livez", f"Host: {host}") == (200, None)


@pytest.mark.parametrize("path", ["/livez", "/v1/models", "/metrics", "/", "/nowhere"])
@pytest.mark.parametrize("host", ELSEWHERE)
def test_any_other_name_is_refused(server: BareServer, host: str, path: str) -> None:
    assert called(server, path, f"Host: {host}") == (421, "unknown_host")


def test_a_refusal_is_one_line_that_says_how_to_allow_the_name(server: BareServer) -> None:
    message = server.send(request("/livez", "Host: evil.example")).error["message"]
    assert "'evil.example'" in message and "--allowed-host" in message and "\n" not in message


def test_a_call_without_a_name_comes_from_no_page(server: BareServer) -> None:
    assert called(server, "/livez", version="1.0") == (200, None)
    assert called(server, "/livez", "Host:") == (200, None)


def test_the_name_in_the_target_goes_before_the_header(server: BareServer) -> None:
    assert called(server, "http://localhost/livez", "Host: evil.example") == (200, None)
    assert called(server, "http://evil.example/livez", "Host: localhost") == (421, "unknown_host")
    assert called(server, "http://evil.example/livez", version="1.0") == (421, "unknown_host")
    assert called(server, "http://localhost@evil.example/livez", "Host: localhost") == (421, "unknown_host")


@pytest.mark.parametrize("name", ["Host", "Origin", "Authorization"])
@pytest.mark.parametrize("path", ["/livez", "/v1/models"])
def test_a_header_that_decides_stands_once(server: BareServer, name: str, path: str) -> None:
    value = {"Host": "localhost", "Origin": "http://localhost", "Authorization": "Bearer a"}[name]
    first = () if name == "Host" else ("Host: localhost",)
    assert called(server, path, *first, f"{name}: {value}", f"{name.lower()}: {value}") == (400, "repeated_header")


def test_a_setting_adds_names(named: BareServer) -> None:
    for host in ("quire.example", "QUIRE.example.:443", "[2001:db8:0::7]:80", *LOOPBACK):
        assert called(named, "/v1/models", f"Host: {host}") == (200, None)
    for host in ("www.quire.example", *ELSEWHERE):
        assert called(named, "/v1/models", f"Host: {host}") == (421, "unknown_host")


def test_the_setting_holds_with_keys_and_on_every_address_too() -> None:
    with serving(allowed_host=("quire.example",), api_key=("sesame",)) as server:
        assert called(server, "/v1/models", "Host: evil.example", "Authorization: Bearer sesame")[0] == 421
        assert called(server, "/v1/models", "Host: quire.example", "Authorization: Bearer sesame")[0] == 200
        assert called(server, "/v1/models", "Host: quire.example")[0] == 401
    with serving(allowed_host=("quire.example",), host="0.0.0.0") as server:
        assert called(server, "/livez", "Host: evil.example")[0] == 421
        assert called(server, "/livez", "Host: 10.0.0.7:8000")[0] == 200  # an address cannot be bound to another one
        assert called(server, "/livez", "Host: 10.0.0.7:8000", "Origin: http://10.0.0.7")[0] == 403


@pytest.mark.parametrize(
    "settings", [{"host": "0.0.0.0"}, {"api_key": ("sesame",)}, {"allowed_host": ("*",)}, {"host": "192.0.2.1"}]
)
def test_a_server_that_is_reached_by_other_names_answers_to_all(settings: Any) -> None:
    with serving(**settings) as server:
        for host in ("evil.example", "quire", "192.168.1.7"):
            assert called(server, "/livez", f"Host: {host}", "Origin: http://other.example") == (200, None)


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["http://localhost", "http://localhost:3000", "https://[::1]:1", "http://127.0.0.1"])
def test_pages_of_this_machine_may_ask(server: BareServer, origin: str) -> None:
    assert called(server, "/v1/models", "Host: 127.0.0.1", f"Origin: {origin}") == (200, None)


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://evil.example:8000", "null", "", "localhost", "http://localhost.evil.example"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_pages_of_other_sites_may_not(server: BareServer, origin: str, method: str) -> None:
    lines = ("Host: 127.0.0.1", f"Origin: {origin}", "Content-Type: text/plain", "Content-Length: 0")
    assert called(server, "/v1/measure", *lines, method=method) == (403, "foreign_origin")


def test_what_a_page_of_another_site_embeds_is_refused_and_what_it_links_to_is_not(server: BareServer) -> None:
    embedded = ("Host: localhost", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Dest: image")
    assert called(server, "/livez", *embedded) == (403, "foreign_origin")
    framed = ("Host: localhost", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Dest: iframe")
    assert called(server, "/livez", *framed) == (403, "foreign_origin")
    linked = ("Host: localhost", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Dest: document")
    assert called(server, "/", *linked) == (200, None)
    assert called(server, "/", "Host: localhost", "Sec-Fetch-Site: same-origin", "Sec-Fetch-Dest: empty") == (200, None)


def test_no_page_opens_a_web_socket(server: BareServer) -> None:
    lines = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAA")
    assert called(server, "/live", "Host: localhost", "Origin: http://evil.example", *lines) == (403, "foreign_origin")
    assert called(server, "/live", "Host: localhost", "Origin: http://localhost", *lines) == (404, "not_found")


def test_the_setting_lets_pages_of_its_names_in(named: BareServer) -> None:
    assert called(named, "/livez", "Host: 127.0.0.1", "Origin: https://quire.example") == (200, None)
    assert called(named, "/livez", "Host: 127.0.0.1", "Origin: https://evil.example") == (403, "foreign_origin")


@pytest.mark.parametrize("settings", [{}, {"api_key": ("sesame",)}, {"allowed_host": ("*",)}])
def test_no_answer_may_be_read_by_another_page(settings: Any) -> None:
    with serving(**settings) as server:
        lines = ("Host: localhost", "Origin: http://localhost:3000", "Authorization: Bearer sesame")
        asks = "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, content-type"
        for path in ("/", "/livez", "/load", "/metrics", "/v1/models", "/v1/measure", "/openapi.json", "/nowhere"):
            for method in ("GET", "POST", "OPTIONS"):
                answer = server.send(request(path, *lines, *asks, "Content-Length: 0", method=method))
                assert not [name for name in answer.headers if name.startswith("access-control-")], (method, path)
                assert method != "OPTIONS" or answer.status in (404, 405)


# ---- tenants --------------------------------------------------------------------------------------------------------

KEYS = """
- {name: alice, key: alice, best_priority: -3}
- {name: bob, key: bob}
- {name: batch, key: batch, best_priority: 5}
- {name: owner, key: owner, operator: true}
"""
FIELDS: dict[str, Any] = {"model": "guide", "prompt": "A block is", "max_tokens": 2}


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(KEYS)
    with running_server(api_keys_file=str(path), max_live_readers=7, settings={"policy": "priority"}) as running:
        yield running


def ask(server: RunningServer, key: str, path: str) -> Any:
    return server.ask("GET", path, None, {"Authorization": f"Bearer {key}"})


def test_metrics_are_for_operators(tenants: RunningServer) -> None:
    answer = ask(tenants, "alice", "/metrics")
    assert (answer.status, answer.error["code"]) == (403, "operator_required")
    assert "quire_" not in answer.body.decode() and "operator: true" in answer.error["message"]
    assert b"quire_requests_running" in ask(tenants, "owner", "/metrics").body


def test_load_tells_a_tenant_its_own(tenants: RunningServer) -> None:
    def hold(name: str) -> Any:
        tenant = tenants.services.tenants.find(name.encode())
        assert tenant is not None
        return tenants.services.gate.enter(tenant, 3, 70)

    visits = [tenants.call(lambda: hold("bob")), tenants.call(lambda: hold("alice"))]
    try:
        tenants.call(visits[1].begin)
        own = {"server_load": 3, "num_waiting": 3, "num_waiting_tokens": 70, "num_running": 0, "kv_usage": None}
        begun = {"server_load": 3, "num_waiting": 0, "num_waiting_tokens": 0, "num_running": 3, "kv_usage": None}
        none = {"server_load": 0, "num_waiting": 0, "num_waiting_tokens": 0, "num_running": 0, "kv_usage": None}
        assert [ask(tenants, key, "/load").value for key in ("bob", "alice", "batch")] == [own, begun, none]
        every = ask(tenants, "owner", "/load").value
        assert (every["server_load"], every["num_waiting"]) == (6, 3) and every["kv_usage"] is not None
    finally:
        for visit in visits:
            tenants.call(lambda visit=visit: visit.__exit__(None, None, None))


@pytest.mark.parametrize(
    ("key", "priority", "status"),
    [
        *(("bob", None, 200), ("bob", 0, 200), ("bob", 7, 200), ("bob", -1, 400), ("bob", -(1 << 30), 400)),
        *(("alice", -3, 200), ("alice", -4, 400), ("batch", None, 200), ("batch", 5, 200), ("batch", 0, 400)),
        ("owner", -1, 400),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_key_has_a_best_priority(
    tenants: RunningServer, key: str, priority: int | None, status: int, path: str
) -> None:
    fields: dict[str, Any] = {"model": "guide", "priority": priority}
    if path == "/v1/completions":
        fields |= {"prompt": "A block is", "max_tokens": 2}
    elif path == "/v1/responses":
        fields |= {"input": "Hi", "max_output_tokens": 2}
    else:
        fields |= {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    answer = tenants.ask("POST", path, json.dumps(fields).encode(), headers)
    assert answer.status == status, answer.body
    if status == 400:
        assert (answer.error["param"], answer.error["code"]) == ("priority", "invalid_value")
        assert re.search(r"allowed: -?\d+ or more with this API key", answer.error["message"])


def test_without_keys_and_with_one_key_any_priority_is_allowed() -> None:
    for keys in ((), ("sesame",)):
        with running_server(api_key=keys) as server, server.client(api_key="sesame") as client:
            assert client.completions.create(**FIELDS, extra_body={"priority": -9}).choices


def test_one_tenant_cannot_take_all_places_to_watch(tenants: RunningServer) -> None:
    watching: list[LiveLines] = []
    try:
        for key in ("alice", "bob", "batch"):  # 7 places: 1 is kept for operators, each of 3 tenants has 2
            for _ in range(2):
                watching.append(LiveLines(tenants.port, key))
                watching[-1].until(lambda _: True)
            answer = ask(tenants, key, "/live")
            assert (answer.status, answer.error["code"]) == (429, "too_many_readers")
        with LiveLines(tenants.port, "owner") as owner:
            owner.until(lambda _: True)
            assert ask(tenants, "owner", "/live").status == 503
    finally:
        for each in watching:
            each.close()
        end = time.monotonic() + 20
        while tenants.call(lambda: tenants.services.live.num_readers):
            assert time.monotonic() < end, "somebody watches still"
            time.sleep(0.01)


def test_a_tenant_that_watches_learns_nothing_of_others(tenants: RunningServer) -> None:
    with LiveLines(tenants.port, "batch") as idle, LiveLines(tenants.port, "owner") as owner:
        idle.until(lambda _: True)
        owner.until(lambda _: True)
        before = owner.picture.last["seq"]
        for _ in range(3):
            with tenants.client(api_key="alice") as client:
                client.completions.create(**{**FIELDS, "max_tokens": 400}, extra_body={"ignore_eos": True})
        tenants.wait_until_idle()
        owner.until(lambda found: found.last["seq"] > before + 3 and not found.requests)
        assert idle.picture.last["step"] is None and owner.picture.last["step"] > 0
        idle.check()


def test_what_is_wrong_about_a_best_priority_is_named(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    for value in ("soon", "1.5", "4294967296", "true"):
        path.write_text(f"- {{name: alice, key: alice, best_priority: {value}}}\n")
        with pytest.raises(InvalidConfigError, match=r"^api_keys_file\[0\]\.best_priority is "):
            read_tenants(ServerConfig(api_keys_file=str(path)), b"drawn at the start")
