"""The frame around every call: whatever an endpoint does, its bytes, its place and its line in the log are in order."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from quire.core.clock import ManualClock
from quire.core.errors import InvalidConfigError, InvalidRequestError
from quire.engine.records.stats import ModelState
from quire.serve.config import ServerConfig
from quire.serve.errors import ApiError
from quire.serve.frame import MAX_LOGGED_LENGTH, NO_ROUTE, OPEN_PATHS, Frame, answer_error, traceparent_of
from quire.serve.host_names import MAX_LENGTH, allowed_name, name_of
from quire.serve.hosts import Hosts, make_hosts, require_single
from quire.serve.prometheus import render
from quire.serve.services import Services
from quire.serve.tenants import ANYBODY
from support.bare_server import FakeModel
from support.only_model import make_services
from support.prometheus_text import parse

TRACE = b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01"
KEYS = "- {name: alice, key: sesame}\n- {name: bob, key: [b1, b2]}\n"


class Call:
    """One call of a frame around an endpoint that a test has written; what was sent, and the line in the log."""

    def __init__(self, endpoint: Any, *headers: tuple[bytes, bytes], path: str = "/v1/models", **config: Any) -> None:
        self.clock = ManualClock(100.0)
        model: Any = FakeModel()
        model.state = ModelState.READY
        self.services: Services = make_services(model, ServerConfig(**config), self.clock)
        self.messages: list[Any] = []
        self.lines: list[dict[str, Any]] = []
        self.context: Any = None
        self._endpoint = endpoint
        self.scope: dict[str, Any] = {"type": "http", "method": "GET", "path": path, "headers": list(headers)}
        asyncio.run(self._run())

    async def _run(self) -> None:
        counter = itertools.count(1)
        frame = Frame(self._app, self.services, draw=lambda size: bytes([next(counter)]) * size)
        handler = logging.Handler()
        handler.emit = lambda record: self.lines.append(record.fields)  # type: ignore[method-assign,attr-defined]
        access = logging.getLogger("quire.serve.access")
        before, access.level, access.handlers = (access.level, access.handlers), logging.INFO, [handler]
        try:
            await frame(self.scope, self._receive, self._send)
        finally:
            access.level, access.handlers = before

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.context = scope["state"]["context"]
        await self._endpoint(self, send)

    async def _receive(self) -> Any:
        raise AssertionError("nothing is read before an endpoint reads it")

    async def _send(self, message: Any) -> None:
        self.messages.append(message)

    def metric(self, name: str, **labels: str) -> float:
        services, model = self.services, self.services.model
        families = services.metrics.families(services.gate, model.state, model.stats(), "guide")
        families += services.calls.families()
        return parse(render(families).decode())[name].value(**labels)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.messages[0]["headers"])

    @property
    def code(self) -> str:
        return str(json.loads(self.messages[1]["body"])["error"]["code"])

    def check(self) -> None:
        """Fail unless nothing of the call is left."""
        self.services.bodies.check()
        self.services.gate.check()
        assert self.services.bodies.held_bytes == self.services.gate.num_visits == 0
        assert len(self.lines) == 1
        assert self.metric("quire_http_requests_active") == 0
        status = str(self.lines[0]["status"])
        assert self.metric("quire_http_requests_total", endpoint=NO_ROUTE, status=status) == 1


async def answer(call: Call, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": [(b"x-own", b"1")]})
    await send({"type": "http.response.body", "body": b""})


# ---- what an endpoint may do ----------------------------------------------------------------------------------------

FAILURES = st.sampled_from(
    [None, ZeroDivisionError("secret"), InvalidRequestError("n", 0, "1"), ApiError(418, "tea", code="teapot")]
)


@given(FAILURES, st.booleans(), st.booleans(), st.integers(0, 40_000))
def test_whatever_an_endpoint_does_nothing_of_its_call_is_left(
    failure: Exception | None, has_begun: bool, enters: bool, num_bytes: int
) -> None:
    async def endpoint(call: Call, send: Any) -> None:
        assert call.metric("quire_http_requests_active") == 1
        call.context.body.take(num_bytes)
        if enters:
            call.context.visit = call.services.gate.enter(ANYBODY, 1, 5)
        call.clock.advance(0.25)
        if has_begun:
            await answer(call, send)
        if failure is not None:
            raise failure

    logging.getLogger("quire.serve").setLevel(logging.CRITICAL)
    try:
        call = Call(endpoint)
    finally:
        logging.getLogger("quire.serve").setLevel(logging.NOTSET)
    call.check()
    status = {None: 499, ZeroDivisionError: 500, InvalidRequestError: 400, ApiError: 418}[failure and type(failure)]
    assert call.lines[0]["status"] == (204 if has_begun else status)
    assert call.lines[0]["ms"] == 250.0
    if call.messages:
        assert call.status == call.lines[0]["status"]
        assert call.headers[b"x-request-id"] == call.lines[0]["request_id"].encode()
        assert call.headers[b"openai-processing-ms"] == b"250"
        assert (b"x-own" in call.headers) == has_begun
        assert b"secret" not in b"".join(message.get("body", b"") for message in call.messages)


def test_a_call_that_is_cancelled_has_left_too() -> None:
    async def endpoint(call: Call, send: Any) -> None:
        call.context.visit = call.services.gate.enter(ANYBODY, 1, 5)
        call.context.body.take(40_000)
        raise asyncio.CancelledError

    calls: list[Call] = []

    async def noted(call: Call, send: Any) -> None:
        calls.append(call)
        await endpoint(call, send)

    with pytest.raises(asyncio.CancelledError):
        Call(noted)
    calls[0].check()
    assert calls[0].lines[0]["status"] == 499


def test_the_line_of_a_call_has_its_tokens_and_nothing_that_was_said() -> None:
    async def endpoint(call: Call, send: Any) -> None:
        context = call.context
        context.num_prompt_tokens, context.num_cached_tokens, context.num_output_tokens = 9, 4, 2
        context.finish_reason = "stop"
        await answer(call, send)

    call = Call(endpoint, (b"x-request-id", b"\xe9" * 300), (b"traceparent", TRACE), path="/" + "x" * 500)
    assert call.lines == [
        {
            "request_id": f"req-{'01' * 16}",
            "method": "GET",
            "path": ("/" + "x" * 500)[:MAX_LOGGED_LENGTH],
            "status": 204,
            "ms": 0.0,
            "trace_id": "a" * 32,
            "client_request_id": "é" * MAX_LOGGED_LENGTH,
            "prompt_tokens": 9,
            "cached_tokens": 4,
            "output_tokens": 2,
            "finish": "stop",
        }
    ]
    assert call.headers[b"traceparent"] == TRACE


# ---- who may call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("authorization", "tenant"),
    [
        (b"Bearer sesame", "alice"),
        (b"bearer   sesame ", "alice"),
        (b"Bearer b2", "bob"),
        *((line, None) for line in (b"", b"Bearer", b"Bearer ", b"sesame", b"Basic sesame", b"Bearer Sesame")),
        *((line, None) for line in (b"Bearer sesame b1", b"Bearer\tsesame", b"Bearer sesame\x00", b"Bearer s\xe9same")),
    ],
)
def test_a_key_makes_a_tenant_and_any_other_line_makes_none(
    tmp_path: Path, authorization: bytes, tenant: str | None
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS, encoding="utf-8")
    call = Call(answer, (b"authorization", authorization), api_keys_file=str(path))
    call.check()
    if tenant is None:
        assert (call.status, call.code, call.context) == (401, "invalid_api_key", None)
        assert "tenant" not in call.lines[0]
    else:
        assert (call.status, call.context.tenant.name, call.lines[0]["tenant"]) == (204, tenant, tenant)


def test_open_paths_need_no_key_and_nothing_else_is_open() -> None:
    locked: dict[str, Any] = {"api_key": ("sesame",)}
    for path in OPEN_PATHS:
        assert Call(answer, path=path, **locked).status == 204
    for path in ("/metrics", "/", "/livez/", "/LIVEZ", "//livez", "/v1/../livez"):
        assert Call(answer, path=path, **locked).status == 401
    assert Call(answer, path="/metrics", open_metrics=True, **locked).status == 204


@pytest.mark.parametrize(
    ("error", "status", "code", "message"),
    [
        (HTTPException(404), 404, "not_found", "/nowhere is not a path on this server; GET /openapi.json lists them"),
        (
            HTTPException(405, headers={"Allow": "GET, HEAD"}),
            *(405, "method_not_allowed", "PUT is not allowed here; allowed: GET, HEAD"),
        ),
        (HTTPException(405), 405, "method_not_allowed", "PUT is not allowed here; allowed: "),
        (HTTPException(414, "too long"), 414, None, "too long"),
        (InvalidRequestError("n", 0, "1"), 400, "invalid_value", "n is 0; allowed: 1"),
    ],
)
def test_errors_of_routes_have_the_form_of_all_errors(
    error: Exception, status: int, code: str | None, message: str
) -> None:
    scope = {"type": "http", "method": "PUT", "path": "/nowhere", "headers": []}
    answered = asyncio.run(answer_error(Request(scope), error))
    detail = json.loads(answered.body)["error"]
    assert (answered.status_code, detail["code"], detail["message"]) == (status, code, message)
    gone = asyncio.run(answer_error(Request(scope), ClientDisconnect()))
    assert (gone.status_code, gone.body) == (499, b"")


@pytest.mark.parametrize("name", [b"host", b"origin", b"authorization"])
def test_a_header_that_decides_may_not_be_there_twice(name: bytes) -> None:
    call = Call(answer, (name, b"localhost"), (b"accept", b"a"), (b"accept", b"b"), (name, b"localhost"))
    assert (call.status, call.code, call.context) == (400, "repeated_header", None)
    require_single([(b"accept", b"a"), (b"accept", b"b"), (name, b"x")])


# ---- names of hosts -------------------------------------------------------------------------------------------------

LABEL = st.from_regex(r"[a-z0-9](?:[a-z0-9_-]{0,5}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABEL, min_size=1, max_size=4).map(".".join).filter(lambda name: not re.fullmatch(r"[0-9.]+", name))
PORTS = st.sampled_from(["", ":", ":1", ":65535"])


@given(NAMES, PORTS, st.booleans(), st.booleans())
def test_a_name_has_one_spelling_and_is_ours_only_where_it_was_allowed(
    name: str, port: str, has_dot: bool, is_upper: bool
) -> None:
    authority = (name.upper() if is_upper else name) + ("." if has_dot else "") + port
    found = name_of(authority)
    assert found is not None
    assert (found.text, found.is_address) == (name, False)
    assert found.is_loopback == (name.rpartition(".")[2] == "localhost")
    assert allowed_name(name) == name
    strict = Hosts([], is_checked=True, any_address=True)
    named = Hosts([name], is_checked=True, any_address=False)
    host = authority.encode()
    named.check({b"host": host, b"origin": b"https://" + host})
    if not found.is_loopback:
        for headers in ({b"host": host}, {b"host": b"localhost", b"origin": b"http://" + host}):
            with pytest.raises(ApiError):
                strict.check(headers)


@given(st.ip_addresses(), PORTS)
def test_an_address_has_one_spelling_and_cannot_be_pointed_elsewhere(address: Any, port: str) -> None:
    for spelling in (str(address), address.exploded, str(address).upper()):
        found = name_of((f"[{spelling}]" if address.version == 6 else spelling) + port)
        assert found == (str(address), address.is_loopback, True)
    host = (f"[{address}]" if address.version == 6 else str(address)).encode()
    Hosts([], is_checked=True, any_address=True).check({b"host": host})
    if not address.is_loopback:
        with pytest.raises(ApiError):  # a page from an address is a page from another machine
            Hosts([], is_checked=True, any_address=True).check({b"host": host, b"origin": b"http://" + host})


@pytest.mark.parametrize(
    "authority",
    [
        *("", ":80", "a@b", "localhost@evil", "a b", "a/b", "a..b", ".a", "a:b", "a:80:80", "[::1", "::1", "[::1]x"),
        *("[127.0.0.1]x", "[evil]", "%6cocalhost", "localhost\x00", "é.example", "a:-1", "[::1%25eth0]", "[:::]"),
        "a" * (MAX_LENGTH + 1),
    ],
)
def test_what_is_no_name_is_nobodys(authority: str) -> None:
    assert name_of(authority) is None
    for names in ([], ["evil.example"]):
        if authority:
            with pytest.raises(ApiError) as caught:
                Hosts(names, is_checked=True, any_address=True).check({b"host": authority.encode()})
            assert caught.value.status == 421
    with pytest.raises(InvalidConfigError):
        allowed_name(authority)


@pytest.mark.parametrize(
    "name", ["localhost.evil.example", "127.0.0.1.evil.example", "127.1", "0x7f.1", "evil-localhost"]
)
def test_names_that_look_like_this_machine_are_not(name: str) -> None:
    found = name_of(name)
    assert found is not None
    assert not found.is_loopback


@pytest.mark.parametrize(
    ("config", "is_checked", "any_address"),
    [
        ({}, True, False),
        ({"api_key": ("k",)}, False, False),
        ({"host": "0.0.0.0"}, False, True),
        ({"host": "0.0.0.0", "allowed_host": ("a.example",)}, True, True),
        ({"api_key": ("k",), "allowed_host": ("a.example",)}, True, False),
        ({"allowed_host": ("*",)}, False, False),
    ],
)
def test_the_settings_decide_whether_names_are_looked_at(
    config: dict[str, Any], is_checked: bool, any_address: bool
) -> None:
    hosts = make_hosts(ServerConfig(**config))

    def passes(host: bytes) -> bool:
        try:
            hosts.check({b"host": host})
        except ApiError:
            return False
        return True

    assert passes(b"evil.example") == (not is_checked)
    assert passes(b"10.0.0.7") == (any_address or not is_checked)
    assert passes(b"localhost")
    assert passes(b"")


# ---- traces ---------------------------------------------------------------------------------------------------------

HEX = "0123456789abcdef"
VALID = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
PARTS = st.tuples(
    st.sampled_from(["00", "01", "fe", "ff", "0", "0G"]),
    st.text(HEX, min_size=31, max_size=33) | st.just("0" * 32) | st.text(HEX, min_size=32, max_size=32),
    st.text(HEX, min_size=16, max_size=16) | st.just("0" * 16),
    st.sampled_from(["00", "01", "ff", "1", "0A"]),
    st.sampled_from(["", "-more", "-"]),
)


@given(PARTS | st.text(max_size=60).map(lambda text: (text,)))
def test_a_trace_goes_on_where_its_header_is_one_and_begins_anew_elsewhere(parts: tuple[str, ...]) -> None:
    *fields, more = parts if len(parts) == 5 else (*parts, "")
    header = "-".join(fields) + more
    found = traceparent_of(header.encode("utf-8", "replace"), lambda size: b"\x01" * size)
    assert VALID.fullmatch(found)
    is_valid = VALID.fullmatch("-".join(fields)) is not None and (not more or fields[0] != "00")
    if is_valid:
        assert found == "-".join(fields)
    else:
        assert found == f"00-{'01' * 16}-{'01' * 8}-00"
