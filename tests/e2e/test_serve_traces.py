"""Traces by OTLP over HTTP, as a collector on this machine reads them."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExportResult

from quire.core.clock import ManualClock
from quire.core.errors import InvalidConfigError
from quire.serve.config import ServerConfig
from quire.serve.context import RequestContext
from quire.serve.read.body_budget import BodyBudget
from quire.serve.tenants import ANYBODY
from quire.serve.traces import MAX_SPANS, Traces
from support.server import JSON, RunningServer, running_server

MESSAGES = [{"role": "user", "content": "What is a block table?"}]
FIELDS: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "top_p": 0.5, "n": 2}
TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """What a collector of OTLP was sent."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.bodies: list[bytes] = []

    def spans(self) -> list[Any]:
        requests = [ExportTraceServiceRequest.FromString(body) for body in self.bodies]
        return [
            span
            for each in requests
            for part in each.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict[str, Any]:
        [first, *_] = ExportTraceServiceRequest.FromString(self.bodies[0]).resource_spans
        return values(first.resource.attributes)


@contextmanager
def collector() -> Iterator[Collector]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            found.bodies.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        found = Collector(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as Python has them."""

    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {each.key: value(each.value) for each in attributes}


@contextmanager
def traced_server(url: str) -> Iterator[RunningServer]:
    """A server that has sent its last spans when the context is left."""
    with running_server(otlp_traces_endpoint=url) as server:
        yield server
    assert server.services.traces is not None
    server.services.traces.close()


def test_a_call_is_a_trace_with_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    with collector() as found, traced_server(found.url) as server:
        answer = server.post("/v1/chat/completions", FIELDS)
        assert answer.status == 200
        assert server.post("/v1/chat/completions", {"messages": []}).status == 400
        assert server.get("/v1/models").status == 200
    spans = found.spans()
    by_name = {span.name: span for span in spans if values(span.attributes).get("http.response.status_code") != 400}
    assert len(spans) == 6  # five, and one of the call that was refused
    call, text = by_name["POST /v1/chat/completions"], by_name["llm_request"]
    phases = [by_name[name] for name in ("queue", "prefill", "decode")]
    _, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
    assert (call.trace_id.hex(), call.span_id.hex(), call.parent_span_id, flags) == (trace_id, span_id, b"", "01")
    assert text.parent_span_id == call.span_id
    assert [phase.parent_span_id for phase in phases] == [text.span_id] * 3
    assert {span.trace_id for span in by_name.values()} == {call.trace_id}
    times = [call.start_time_unix_nano, text.start_time_unix_nano]
    for phase in phases:
        times += [phase.start_time_unix_nano, phase.end_time_unix_nano]
    times += [text.end_time_unix_nano, call.end_time_unix_nano]
    assert times == sorted(times)
    assert values(call.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.request.id": answer.headers["x-request-id"],
    }
    told, usage = values(text.attributes), json.loads(answer.body)["usage"]
    assert told["gen_ai.operation.name"] == "chat"
    assert (told["gen_ai.request.model"], told["gen_ai.request.n"]) == ("guide", 2)
    assert (told["gen_ai.request.temperature"], told["gen_ai.request.top_p"]) == (0.0, 0.5)
    assert told["gen_ai.request.max_tokens"] == 6
    assert told["gen_ai.usage.prompt_tokens"] == told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert told["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    for name in ("e2e", "time_to_first_token", "time_in_queue", "time_in_model_prefill", "time_in_model_decode"):
        assert told[f"gen_ai.latency.{name}"] >= 0.0
    assert found.resource()["service.name"] == "quire"
    assert found.resource()["deployment.environment"] == "test"
    assert not any(b"block table" in body for body in found.bodies)


@pytest.mark.parametrize(("flags", "num_spans"), [("01", 5), ("00", 0)])
def test_a_call_continues_the_trace_of_its_caller(flags: str, num_spans: int) -> None:
    traceparent = f"00-{TRACE_ID}-{CALLER_ID}-{flags}"
    with collector() as found, traced_server(found.url) as server:
        headers = {**JSON, "traceparent": traceparent}
        answer = server.ask("POST", "/v1/completions", b'{"prompt": "A", "max_tokens": 1, "stream": true}', headers)
        assert (answer.status, answer.headers["traceparent"]) == (200, traceparent)
    spans = found.spans()
    assert len(spans) == num_spans
    assert {span.trace_id.hex() for span in spans} <= {TRACE_ID}
    assert [span.parent_span_id.hex() for span in spans if span.name.startswith("POST")] == [CALLER_ID][:num_spans]


def test_a_collector_that_is_away_holds_nothing_up() -> None:
    with traced_server("http://127.0.0.1:9/v1/traces") as server:
        for _ in range(3):
            assert server.post("/v1/completions", {"prompt": "A", "max_tokens": 1}).status == 200


def test_waiting_spans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that takes no batch: the sender waits for it, and the callers for nobody."""
    go_on, batches = threading.Event(), []

    def export(_: object, spans: Any) -> SpanExportResult:
        batches.append(len(spans))
        assert go_on.wait(300)
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    traces = Traces("http://127.0.0.1:9/v1/traces", ManualClock())
    body = BodyBudget(1, 1).open("")
    context = RequestContext("req-1", "", ANYBODY, 0.0, f"00-{TRACE_ID}-{CALLER_ID}-01", body)
    for _ in range(2 * MAX_SPANS):
        traces.note(context, "POST", "/tokenize", 200, 1.0)
    go_on.set()
    traces.close()
    assert MAX_SPANS <= sum(batches) <= MAX_SPANS + 512  # a batch was on its way


def test_without_the_extra_the_server_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(InvalidConfigError, match=r"not installed.*pip install 'quire\[otel\]'"):
        Traces("http://localhost:4318/v1/traces", ManualClock())


@pytest.mark.parametrize("url", ["localhost:4317", "http://localhost:4318", "grpc://a/b", "http://a/b c", ""])
def test_an_endpoint_is_a_url_with_a_path(url: str) -> None:
    with pytest.raises(InvalidConfigError, match="otlp_traces_endpoint"):
        ServerConfig(otlp_traces_endpoint=url)
