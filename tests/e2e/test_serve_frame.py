"""The server around its endpoints, over real sockets: who may ask, what a call may cost, and how it ends."""

from __future__ import annotations

import logging
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPException
from typing import Any

import pytest

from quire.core.errors import ExecutionError, InvalidConfigError
from quire.engine.records.stats import ModelState
from quire.serve import guard
from quire.serve.config import ServerConfig
from quire.serve.server import listen
from support.bare_server import NUM_PARTS, PART, Answer, BareServer, FakeModel, read_answer, serving
from support.prometheus_text import parse
from support.waiting import wait_until

KEY = "sesame-1"
KIB = 1 << 10


@pytest.fixture(scope="module")
def server() -> Iterator[BareServer]:
    """A server that lets everybody in, with small limits."""
    limits = {"max_header_bytes": 4 * KIB, "max_body": 100_000, "header_timeout_s": 0.4, "body_timeout_s": 0.4}
    with serving(write_timeout_s=0.4, keep_alive_timeout_s=1, **limits) as running:
        wait_until(lambda: running.services.gate.is_ready)
        yield running


def head(path: str, *lines: str, method: str = "GET", host: str = "localhost") -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", f"Host: {host}", *lines, "", "")).encode("latin-1")


# ---- answers --------------------------------------------------------------------------------------------------------


def test_every_answer_has_an_id_of_ours_and_a_time(server: BareServer) -> None:
    seen = set()
    for path in ("/livez", "/v1/models", "/v1/fail", "/nowhere"):
        headers = server.get(path, X_Request_Id="mine").headers
        assert re.fullmatch("req-[0-9a-f]{32}", headers["x-request-id"])
        assert headers["openai-processing-ms"].isdecimal()
        seen.add(headers["x-request-id"])
    assert len(seen) == 4
    assert server.get("/v1/models", X_Request_Id="mine").value["request_id"] != "mine"


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/livez/", 404, "not_found"),
        ("POST", "/livez", 405, "method_not_allowed"),
        ("GET", "/v1/measure", 405, "method_not_allowed"),
        ("GET", "/v1/refuse", 400, "invalid_value"),
        ("GET", "/v1/fail", 500, "internal_error"),
    ],
)
def test_errors_are_json(server: BareServer, method: str, path: str, status: int, code: str) -> None:
    answer = server.ask(method, path, None)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert b"secret" not in answer.body
    if status == 405:
        assert answer.headers["allow"]


def test_a_mistake_of_ours_is_told_to_the_log(server: BareServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "quire.serve"):
        message = f"call {server.get('/v1/fail').headers['x-request-id']} failed"
        wait_until(lambda: message in caplog.messages)
    (record,) = [record for record in caplog.records if record.getMessage() == message]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


def test_a_call_is_a_line_in_the_log_without_its_query(server: BareServer, caplog: pytest.LogCaptureFixture) -> None:
    trace = "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01"
    with caplog.at_level(logging.INFO, "quire.serve.access"):
        answer = server.get("/v1/models?secret=1", traceparent=trace, X_Request_Id="theirs")
        wait_until(lambda: bool(lines_of(answer, caplog)))
    (fields,) = lines_of(answer, caplog)
    assert fields.pop("ms") >= 0
    assert fields == {
        "request_id": answer.headers["x-request-id"],
        "client_request_id": "theirs",
        "method": "GET",
        "path": "/v1/models",
        "status": 200,
        "trace_id": "a1" * 16,
    }


def test_a_probe_that_goes_well_leaves_no_line(server: BareServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "quire.serve.access"):
        probes = [server.get(path) for path in ("/livez", "/readyz", "/health", "/version", "/load", "/metrics")]
        failed, last = server.get("/livez/"), server.get("/v1/models")
        wait_until(lambda: bool(lines_of(last, caplog)))
    assert {answer.status for answer in probes} == {200}
    assert [len(lines_of(answer, caplog)) for answer in (*probes, failed)] == [0] * 6 + [1]


def lines_of(answer: Answer, caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines of the log for a call; those of other calls may come late."""
    fields = [record.__dict__.get("fields", {}) for record in list(caplog.records)]
    return [each for each in fields if each.get("request_id") == answer.headers["x-request-id"]]


def test_a_trace_is_passed_through_or_begun(server: BareServer) -> None:
    trace = "00-" + "a1" * 16 + "-" + "b2" * 8 + "-01"
    assert server.get("/livez", traceparent=trace).headers["traceparent"] == trace
    for wrong in ("", "00-0-0-0", trace.upper(), trace.replace("a1", "00"), "ff" + trace[2:], trace + "-x"):
        made = server.get("/livez", traceparent=wrong).headers["traceparent"]
        assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-00", made)
        assert made[3:35] not in wrong


# ---- health ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_bytes", [None, 1 << 30])
def test_the_memory_of_a_gpu_is_told_again_once_it_was_measured(host_bytes: int | None) -> None:
    model = FakeModel()
    model.is_slow = True
    with serving(model) as server:
        wait_until(lambda: len(server.said) == 2)  # the table and the address
        plan = model.report.plan
        needs = replace(plan.needs, host_bytes=host_bytes, graph_bytes=3 << 20)
        model.report = replace(model.report, plan=replace(plan, needs=needs))
        model.is_slow = False
        wait_until(lambda: any(said.startswith("ready after") for said in server.said))
        ready = next(index for index, said in enumerate(server.said) if said.startswith("ready after"))
        assert server.said[2:ready] == ([] if host_bytes is None else [str(model.report)])


def test_it_answers_while_it_loads_and_says_when_it_is_ready() -> None:
    model = FakeModel()
    model.is_slow = True
    with serving(model) as server:
        assert server.get("/livez").value == {"status": "alive"}
        for path in ("/readyz", "/health", "/ping", "/v1/stream"):
            answer = server.get(path)
            assert (answer.status, answer.error["code"]) == (503, "engine_unavailable")
            assert int(answer.headers["retry-after"]) >= 1
        model.is_slow = False
        wait_until(lambda: server.get("/readyz").status == 200)
        assert server.ask("POST", "/ping", None).status == 200
        model.state = ModelState.RESTARTING
        assert server.get("/health").status == 503
        assert server.get("/livez").status == 200
        model.state = ModelState.READY
        assert server.get("/v1/stream").body == PART * NUM_PARTS
        assert server.get("/load").value == {
            "server_load": 0,
            "num_waiting": 0,
            "num_waiting_tokens": 0,
            "num_running": 2,
            "kv_usage": 0.25,
        }
    assert model.num_closed == 1


def test_a_model_that_cannot_be_loaded_ends_the_server() -> None:
    model = FakeModel()
    model.failure = ExecutionError("the weights are torn")
    with pytest.raises(ExecutionError, match="torn"), serving(model) as server:
        server.thread.join(300)
    assert model.num_closed == 1


def test_an_engine_that_is_lost_for_good_ends_the_server() -> None:
    model = FakeModel()
    with pytest.raises(ExecutionError, match="could not be restarted"), serving(model) as server:
        wait_until(lambda: server.services.gate.is_ready)
        model.state = ModelState.FAILED
        server.thread.join(300)
    assert model.num_closed == 1


def test_metrics_are_prometheus_text(server: BareServer) -> None:
    server.get("/v1/models")
    answer = server.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = parse(answer.body.decode())
    requests = families["quire_http_requests_total"]
    assert requests.kind == "counter"
    assert requests.value(endpoint="/v1/models", status="200") >= 1
    assert families["quire_requests_running"].value() == 2
    assert families["quire_kv_usage_ratio"].value() == 0.25
    assert families["quire_engine_state"].value(state="ready") == 1
    assert families["quire_queue_sequences_max"].value() == 4 * 64
    assert families["quire_queue_tokens_max"].value() == 8 * 64 * 16
    assert families["process_resident_memory_bytes"].value() > 0


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[BareServer]:
    """A server that wants a key."""
    with serving(api_key=(KEY, "other")) as running:
        wait_until(lambda: running.services.gate.is_ready)
        yield running


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/ping", "/version"])
def test_health_needs_no_key(locked: BareServer, path: str) -> None:
    assert locked.get(path).status == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/metrics", "/load", "/nowhere", "/v1/fail", "/openapi.json"),
        *("/dashboard", "/dashboard/", "/dashboard/../v1/models", "/dashboard/main.mjs/", "/index.html"),
        *("//v1/models", "/v1/models/", "/v1//models", "/./v1/models", "/livez/../v1/models", "/livez/v1/models"),
        *("/v1%2Fmodels", "/%76%31/models", "/livez%2F..%2Fv1%2Fmodels", "/livez/", "/livez.", "/livez;/v1/models"),
        *("/livez%00", "/LIVEZ", "/v1/models?path=/livez", "/v1/models;/livez", "/readyz//", "/%2e/livez"),
    ],
)
@pytest.mark.parametrize("host", ["here", "x/health?", "x/livez#", "/livez", "", "here:80/livez?"])
def test_nothing_else_opens_without_a_key(locked: BareServer, path: str, host: str) -> None:
    answer = locked.send(head(path, host=host))
    assert answer.status == 401
    assert answer.error["type"] == "authentication_error"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "line",
    [
        *(
            "Authorization: Bearer",
            "Authorization: Bearer wrong",
            f"Authorization: Basic {KEY}",
            f"Authorization: {KEY}",
        ),
        *(f"Authorization: Bearer {KEY}x", f"Authorization: Bearer {KEY[:-1]}", f"X-Api-Key: {KEY}x", "X-Api-Key:"),
        *(f"Authorization: Bearer {KEY} {KEY}", "Authorization: Bearer \xe9\xff", "X-Api-Key: \xe9\xff"),
    ],
)
def test_a_wrong_key_is_none(locked: BareServer, line: str) -> None:
    assert locked.send(head("/v1/models", line)).status == 401


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models2", "//v1/models", "/v1", "/live", "/api/tags"])
def test_the_header_of_another_interface_is_no_key(locked: BareServer, path: str) -> None:
    assert locked.send(head(path, f"X-Api-Key: {KEY}")).status == 401
    assert locked.send(head(path, f"Authorization: Bearer {KEY}")).status != 401


def test_a_key_is_a_tenant(locked: BareServer) -> None:
    assert locked.get("/v1/models", Authorization=f"Bearer {KEY}").value["tenant"] == "key-1"
    assert locked.get("/v1/models", Authorization="bearer other").value["tenant"] == "key-2"
    assert locked.get("//v1/models", Authorization=f"Bearer {KEY}").status == 404


def test_a_key_is_not_in_the_log(locked: BareServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        for path in ("/v1/models", "/v1/fail", "/nowhere", "/metrics"):
            for lines in ((f"Authorization: Bearer {KEY}",), (f"Authorization: {KEY}",), (f"X-Api-Key: {KEY}",) * 2):
                answer = locked.send(head(path, *lines))
                wait_until(lambda answer=answer: bool(lines_of(answer, caplog)))  # type: ignore[misc]
    assert len(caplog.records) >= 12
    assert not [record for record in caplog.records if KEY in f"{record.__dict__}{record.getMessage()}"]


def test_the_only_key_sees_all_that_is_counted() -> None:
    with serving(api_key=(KEY,)) as server:
        assert server.get("/metrics", Authorization=f"Bearer {KEY}").status == 200
        assert server.get("/load", Authorization=f"Bearer {KEY}").value["kv_usage"] == 0.25


def test_metrics_can_be_opened() -> None:
    with serving(api_key=(KEY,), open_metrics=True) as server:
        assert server.get("/metrics").status == 200
        assert server.get("/load").status == 401


def test_a_key_has_its_share() -> None:
    with serving(api_key=(KEY, "other"), max_sequences_per_key=1) as server:
        wait_until(lambda: server.services.gate.is_ready)
        with server.connected() as waiting:
            waiting.sendall(head("/v1/wait", f"Authorization: Bearer {KEY}"))
            wait_until(lambda: server.services.gate.num_visits == 1)
            answer = server.get("/v1/stream", Authorization=f"Bearer {KEY}")
            assert (answer.status, answer.error["code"]) == (429, "slow_down")
            assert answer.headers["retry-after"]
            assert server.get("/v1/stream", Authorization="Bearer other").status == 200
        wait_until(lambda: server.services.gate.num_visits == 0)
        assert server.get("/v1/stream", Authorization=f"Bearer {KEY}").status == 200


# ---- heads and bodies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        head("/livez", "X: " + "x" * 5000),
        head("/livez", *(f"X-{index}: x" for index in range(500))),
        head("/" + "x" * 5000),
        b"GET /livez HTTP/1.1\r\nX: " + b"x" * 5000,
        b"GET /" + b"x" * 5000,
        b"GET /livez HTTP/1.1\r\nX: " + b"x" * 1_000_000,
    ],
    ids=["header", "headers", "path", "endless header", "endless path", "megabyte"],
)
def test_a_large_head_is_431(server: BareServer, data: bytes) -> None:
    answer = server.send(data)
    assert (answer.status, answer.error["code"]) == (431, "head_too_large")
    assert answer.headers["connection"] == "close"


def test_very_many_headers_are_431() -> None:
    with serving() as server:
        assert server.send(head("/livez", *["a:"] * 300)).error["code"] == "head_too_large"
        assert server.send(head("/livez", *["a:"] * 200)).status == 200


@pytest.mark.skipif(sys.platform != "linux", reason="these options are those of Linux")
def test_the_system_ends_connections_whose_clients_have_vanished(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(head("/livez"))
        assert read_answer(connection).status == 200
        mine = connection.getsockname()
        [theirs] = [
            each.transport.get_extra_info("socket")
            for each in server.server._http.server_state.connections
            if each.client == mine
        ]
        assert theirs.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 1
        assert theirs.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000  # 0.4 s, rounded up


def test_a_head_that_never_ends_is_431_however_slowly_it_comes(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\n")
        for _ in range(5):
            connection.sendall(b"X: " + b"x" * 997)
            time.sleep(0.02)
        assert read_answer(connection).status == 431


def test_what_stands_behind_the_last_chunk_is_bounded_too(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(head("/v1/measure", "Transfer-Encoding: chunked", method="POST") + b"2\r\nab\r\n0\r\nX: ")
        time.sleep(0.05)
        for _ in range(5):
            connection.sendall(b"x" * 1000)
            time.sleep(0.02)
        assert read_answer(connection).status == 431


def test_a_head_within_the_limit_passes(server: BareServer) -> None:
    assert server.send(head("/livez", "X: " + "x" * 3900)).status == 200


def test_heads_are_counted_one_by_one(server: BareServer) -> None:
    with server.connected() as connection:
        for _ in range(4):
            connection.sendall(head("/livez", "X: " + "x" * 3000))
            assert read_answer(connection).status == 200


def test_a_slow_head_is_408(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(b"GET /livez HT")
        answer = read_answer(connection)
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")


@pytest.mark.parametrize("data", [b"", b"\r\n\r\n"])
def test_a_connection_that_asks_nothing_is_closed(server: BareServer, data: bytes) -> None:
    with server.connected() as connection:
        connection.sendall(data)
        assert connection.recv(100) == b""


def test_stray_bytes_after_an_answer_do_not_keep_a_connection(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(head("/livez"))
        assert read_answer(connection).status == 200
        connection.sendall(b"\r\n")
        assert connection.recv(100) == b""


def test_half_a_head_does_not_end_the_answer_before_it(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(head("/v1/stream"))
        time.sleep(0.1)
        connection.sendall(b"GET /li")
        assert read_answer(connection).body == PART * NUM_PARTS


def test_a_request_that_does_not_wait_for_the_answer_before_it_gets_none(
    server: BareServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LINGER_S", 0.1)
    with server.connected() as connection:
        connection.sendall(head("/livez") * 10_000)
        assert read_answer(connection).status == 200
        assert connection.recv(100) == b""


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00\x01", b"SAY hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100]
)
def test_garbage_is_400(server: BareServer, data: bytes) -> None:
    answer = server.send(data)
    assert (answer.status, answer.error["code"]) == (400, "invalid_http_request")


def test_garbage_within_a_body_is_400(server: BareServer) -> None:
    data = head("/v1/measure", "Transfer-Encoding: chunked", method="POST") + b"2\r\nab\r\nnonsense\r\n"
    assert server.send(data).status == 400


def test_a_body_that_says_it_is_too_large_is_413_before_it_comes(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(head("/v1/measure", "Content-Length: 100001", method="POST"))
        answer = read_answer(connection)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_a_client_that_sends_all_of_a_large_body_reads_the_answer(server: BareServer) -> None:
    assert server.ask("POST", "/v1/measure", bytes(3_000_000)).status == 413
    assert server.ask("POST", "/v1/measure", bytes(100_000)).value == {"length": 100_000}


def test_a_chunked_body_without_end_is_413(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(head("/v1/measure", "Transfer-Encoding: chunked", method="POST"))
        for _ in range(60):
            connection.sendall(b"800\r\n" + bytes(2048) + b"\r\n")
        assert read_answer(connection).status == 413


def test_a_connection_that_goes_on_sending_after_its_answer_is_closed(server: BareServer) -> None:
    with server.connected() as connection, pytest.raises(OSError):
        connection.sendall(head("/v1/measure", "Transfer-Encoding: chunked", method="POST"))
        for _ in range(1000):
            connection.sendall(b"800\r\n" + bytes(2048) + b"\r\n")
            time.sleep(0.01)


def test_a_slow_body_is_408(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(head("/v1/measure", "Content-Length: 10", method="POST") + b"abc")
        answer = read_answer(connection)
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")


def test_a_connection_may_go_on_when_its_body_has_come_after_all(server: BareServer) -> None:
    with server.connected() as connection:
        connection.sendall(head("/nowhere", "Content-Length: 10", method="POST"))
        assert read_answer(connection).status == 404
        connection.sendall(b"0123456789" + head("/livez"))
        assert read_answer(connection).status == 200
        assert connection.recv(100) == b""  # and is closed when it is not used


def test_there_are_only_so_many_connections() -> None:
    with serving(max_connections=2) as server:
        with server.connected() as first, server.connected() as second:
            for connection in (first, second):
                connection.sendall(head("/livez"))
                assert read_answer(connection).status == 200
            with server.connected() as third:
                answer = read_answer(third)
            assert (answer.status, answer.error["code"]) == (503, "too_many_connections")
        wait_until(lambda: _can_connect(server))


def _can_connect(server: BareServer) -> bool:
    try:
        return server.get("/livez").status == 200
    except (OSError, HTTPException):  # refused once more, before the request was sent
        return False


def test_a_client_that_reads_nothing_is_cut_off(server: BareServer) -> None:
    with server.connected() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(head("/v1/large"))
        time.sleep(1.5)
        with pytest.raises(ConnectionResetError):
            while connection.recv(1 << 16):
                pass


# ---- the end --------------------------------------------------------------------------------------------------------


def test_calls_under_way_end_before_the_server_does() -> None:
    with serving(drain_timeout_s=300) as server:
        wait_until(lambda: server.services.gate.is_ready)
        with server.connected() as streaming:
            streaming.sendall(head("/v1/stream"))
            wait_until(lambda: server.services.gate.num_visits == 1)
            server.stop()
            wait_until(lambda: server.services.gate.is_draining)
            for path in ("/readyz", "/v1/stream"):
                answer = server.get(path)
                assert (answer.status, answer.error["code"]) == (503, "server_is_draining")
                assert answer.headers["retry-after"]
            assert server.get("/livez").status == 200
            assert read_answer(streaming).body == PART * NUM_PARTS
        server.thread.join(300)
        assert not server.thread.is_alive()
    assert not server.server.was_forced


def test_calls_that_take_too_long_are_told_so() -> None:
    with serving(drain_timeout_s=0.1) as server:
        wait_until(lambda: server.services.gate.is_ready)
        with server.connected() as streaming:
            streaming.sendall(head("/v1/stream"))
            wait_until(lambda: server.services.gate.num_visits == 1)
            server.stop()
            body = read_answer(streaming).body
        server.thread.join(300)
    assert body.endswith(b"cut off\n")
    assert not server.server.was_forced


def test_a_second_signal_does_not_wait() -> None:
    with serving(drain_timeout_s=10_000) as server:
        wait_until(lambda: server.services.gate.is_ready)
        with server.connected() as streaming:
            streaming.sendall(head("/v1/wait"))
            wait_until(lambda: server.services.gate.num_visits == 1)
            server.stop()
            wait_until(lambda: server.services.gate.is_draining)
            server.stop()
            server.thread.join(300)
            assert not server.thread.is_alive()
    assert server.server.was_forced and server.model.num_killed


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_client_that_leaves_has_left_the_gate(server: BareServer, num_more: int) -> None:
    with server.connected() as waiting:
        waiting.sendall(head("/v1/wait") + num_more * head("/livez"))
        wait_until(lambda: server.services.gate.num_visits == 1)
    wait_until(lambda: server.services.gate.num_visits == 0)
    server.services.gate.check()


def test_what_cannot_be_listened_on_is_a_setting_that_is_refused(server: BareServer) -> None:
    with pytest.raises(InvalidConfigError, match=f"^port is {server.port}; allowed: a port that no other"):
        listen("127.0.0.1", server.port)
    with pytest.raises(InvalidConfigError, match=r"^host is '192\.0\.2\.1'"):
        listen("192.0.2.1", 0)
    with pytest.raises(InvalidConfigError, match=r"^host is .no\.such\.host\.invalid."):
        listen("no.such.host.invalid", 0)


def test_the_settings_of_a_bare_server_are_those_of_the_product() -> None:
    assert ServerConfig(port=0).max_connections == 4096
