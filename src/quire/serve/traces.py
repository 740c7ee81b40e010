"""Traces: each POST request as spans of OpenTelemetry, sent to a collector by OTLP over HTTP.

    POST /v1/chat/completions      from the arrival of the request to the end of its answer
    └── llm_request                from the end of tokenization to its last token, with vLLM's and GenAI's attributes
        ├── queue                  until the engine's first step for it
        ├── prefill                until the first token of the answer
        └── decode                 until the last one

Off by default. The SDK is the extra `quire[otel]`, and only this module imports it. Spans are made when a request has
ended, from recorded times, which takes a fraction of a millisecond on the event loop. A thread sends them. While the
collector is slow or away, at most `MAX_SPANS` wait, and the oldest are dropped. A span has the fields of the access log
and the sampling parameters: no prompt, no text, no key.

A request with a `traceparent` continues that trace, and is left out if its caller does not record. Any other request
begins a trace, with the `trace_id` of the logs.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Final, cast

import quire
from quire.core.clock import Clock
from quire.core.errors import InvalidConfigError
from quire.serve.context import GeneratedText, RequestContext

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.id_generator import IdGenerator
    from opentelemetry.trace import Span

INSTALL: Final = "pip install 'quire[otel]'"
MAX_SPANS: Final = 4096
SEND_WITHIN_S: Final = 5.0
"""Time limit for sending a batch, and for sending the last batch when the server stops."""

Attributes = dict[str, str | int | float | tuple[str, ...]]


class Traces:
    """Makes spans of requests, and sends them to `endpoint`. Use it in one event loop.

    Raises `InvalidConfigError` if OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str, clock: Clock) -> None:
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            allowed = f"none, because OpenTelemetry is not installed; traces need it: {INSTALL}"
            raise InvalidConfigError("otlp_traces_endpoint", endpoint, allowed) from None
        own = Resource({"service.name": "quire", "service.version": quire.__version__})
        resource = own.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        self._api = trace
        self._ids = _Ids()
        self._provider = TracerProvider(
            resource=resource, id_generator=cast("IdGenerator", self._ids), shutdown_on_exit=False
        )
        exporter = OTLPSpanExporter(endpoint, timeout=SEND_WITHIN_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_SPANS))
        self._tracer = self._provider.get_tracer("quire", quire.__version__)
        self._epoch_s = time.time() - clock.now()

    def note(self, context: RequestContext, method: str, route: str, status: int, ended_s: float) -> None:
        """Make the spans of a request that has ended, to be sent later. Mutates."""
        attributes: Attributes = {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            "gen_ai.request.id": context.request_id,
        }
        if context.tenant.name:
            attributes["quire.tenant"] = context.tenant.name
        span = self._tracer.start_span(
            f"{method} {route}",
            self._parent(context),
            kind=self._api.SpanKind.SERVER,
            attributes=attributes,
            start_time=self._ns(context.arrival_s),
        )
        if status >= 500:
            self._fail(span, f"status {status}")
        if context.generated is not None and span.is_recording():
            self._note_text(context, context.generated, span)
        span.end(self._ns(ended_s))

    def close(self) -> None:
        """Send the remaining spans, within some seconds, and end the thread."""
        self._provider.shutdown()

    def _parent(self, context: RequestContext) -> Context | None:
        """Return the caller's span; for a request that begins its trace, set the next span's ids. Mutates."""
        trace_id, span_id, flags = (int(part, 16) for part in context.traceparent.split("-")[1:4])
        if not context.parent_id:
            self._ids.trace_id, self._ids.span_id = trace_id, span_id
            return None
        api = self._api
        caller = api.SpanContext(
            trace_id, int(context.parent_id, 16), is_remote=True, trace_flags=api.TraceFlags(flags)
        )
        within: Context = api.set_span_in_context(api.NonRecordingSpan(caller))
        return within

    def _note_text(self, context: RequestContext, text: GeneratedText, call: Span) -> None:
        span = self._tracer.start_span(
            "llm_request",
            self._api.set_span_in_context(call),
            attributes=text_attributes(context, text),
            start_time=self._ns(text.admitted_s),
        )
        if "error" in context.finish_reason.split(","):
            self._fail(span, "error")
        within = self._api.set_span_in_context(span)
        for name, (start_s, end_s) in phases(text).items():
            self._tracer.start_span(name, within, start_time=self._ns(start_s)).end(self._ns(end_s))
        span.end(self._ns(text.ended_s))

    def _fail(self, span: Span, kind: str) -> None:
        span.set_attribute("error.type", kind)
        span.set_status(self._api.StatusCode.ERROR)

    def _ns(self, seconds: float) -> int:
        return int(1e9 * (self._epoch_s + seconds))


class _Ids:
    """An `IdGenerator` of OpenTelemetry with settable ids for the next span."""

    def __init__(self) -> None:
        self.trace_id = self.span_id = 0

    def generate_trace_id(self) -> int:
        """Return the id for a new trace. Mutates."""
        planned, self.trace_id = self.trace_id, 0
        return planned or random.getrandbits(128) or 1

    def generate_span_id(self) -> int:
        """Return the id for a new span. Mutates."""
        planned, self.span_id = self.span_id, 0
        return planned or random.getrandbits(64) or 1

    def is_trace_id_random(self) -> bool:
        """Whether ids count as random numbers."""
        return False


def phases(text: GeneratedText) -> dict[str, tuple[float, float]]:
    """Return the phases of a text, each with its start and end. Pure.

    >>> from quire.core.sampling_params import SamplingParams
    >>> phases(GeneratedText(True, "guide", SamplingParams(), 1.0, 1.5, 2.0, 4.0))
    {'queue': (1.0, 1.5), 'prefill': (1.5, 2.0), 'decode': (2.0, 4.0)}
    >>> phases(GeneratedText(True, "guide", SamplingParams(), 1.0, ended_s=4.0))
    {'queue': (1.0, 4.0)}
    """
    found: dict[str, tuple[float, float]] = {}
    start_s = text.admitted_s
    for name, end_s in (("queue", text.started_s), ("prefill", text.first_token_s), ("decode", text.ended_s)):
        if end_s is None:  # the text ended in this phase
            return found | {name: (start_s, text.ended_s)}
        found[name] = start_s, min(max(end_s, start_s), text.ended_s)
        start_s = found[name][1]
    return found


def text_attributes(context: RequestContext, text: GeneratedText) -> Attributes:
    """Return the attributes of a text: GenAI's, and vLLM's names for some of them. Pure."""
    sampling = text.sampling
    seconds = {name: end_s - start_s for name, (start_s, end_s) in phases(text).items()}
    attributes: Attributes = {
        "gen_ai.operation.name": "chat" if text.is_chat else "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": text.model,
        "gen_ai.response.model": text.model,
        "gen_ai.request.id": context.request_id,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.n": sampling.n,
        "gen_ai.response.finish_reasons": tuple(filter(None, context.finish_reason.split(","))),
        "gen_ai.usage.input_tokens": context.num_prompt_tokens,
        "gen_ai.usage.output_tokens": context.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": context.num_cached_tokens,
        "gen_ai.usage.prompt_tokens": context.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": context.num_output_tokens,
        "gen_ai.latency.time_in_queue": seconds["queue"],
        "gen_ai.latency.e2e": text.ended_s - context.arrival_s,
    }
    if sampling.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
    if text.first_token_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = text.first_token_s - context.arrival_s
    for name in ("prefill", "decode"):
        if name in seconds:
            attributes[f"gen_ai.latency.time_in_model_{name}"] = seconds[name]
    return attributes
