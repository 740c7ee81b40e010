"""Frame: the work that every request needs, regardless of its endpoint.

    scope ──► our host name (421), no page of another site (403), a browser's preflight (204), a key (401)
          ──► RequestContext: our id, the key's tenant, the trace ──► endpoint
    send  ◄── x-request-id, openai-processing-ms, traceparent                 ◄──┘
    at the end: count the request, log a line, send a trace if traces are on

A plain ASGI wrapper: chunks of a stream pass through it untouched. It decides by `scope["path"]` alone, as the router
does; clients can forge a URL built from the Host header. If keys are set, every path outside the short list of open
paths needs a key, even a path that does not exist.

Nothing that a client sends becomes an id of ours: its `x-request-id` is only logged.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.serve.context import RequestContext
from quire.serve.errors import ApiError, api_error_of, method_not_allowed, not_found, unauthorized
from quire.serve.hosts import require_single
from quire.serve.messages_errors import is_messages_path, takes_x_api_key
from quire.serve.services import ServerServices
from quire.serve.tenants import ANYBODY, Tenant

OPEN_PATHS: Final = frozenset({"/livez", "/readyz", "/health", "/ping", "/version"})
METRICS_PATH: Final = "/metrics"
PROBES: Final = OPEN_PATHS | {METRICS_PATH, "/load"}
"""Paths that monitors poll every few seconds; their successful answers are not logged."""
NO_ROUTE: Final = "none"
CLIENT_CLOSED_REQUEST: Final = 499
MAX_LOGGED_LENGTH: Final = 200
TRACEPARENT: Final = re.compile(
    rb"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-[0-9a-f]{2}(-.*)?"
)

Draw = Callable[[int], bytes]

logger = logging.getLogger("quire.serve")
access_logger = logging.getLogger("quire.serve.access")


class Frame:
    """Wraps the application. `open_paths` need no key, like `OPEN_PATHS`; `draw` returns random bytes."""

    def __init__(
        self,
        app: ASGIApp,
        services: ServerServices,
        *,
        open_paths: frozenset[str] = frozenset(),
        draw: Draw = secrets.token_bytes,
    ) -> None:
        self._app = app
        self._services = services
        self._draw = draw
        self._is_logged = services.config.access_log
        metrics = {METRICS_PATH} if services.config.open_metrics else set()
        self._open_paths = OPEN_PATHS | open_paths | metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        context = self._make_context(headers)
        scope.setdefault("state", {})["context"] = context
        origins = self._services.hosts.origins
        cors_headers = origins.headers(headers.get(b"origin", b""))
        if is_messages_path(scope["path"]):
            cors_headers = [*cors_headers, (b"request-id", context.request_id.encode())]
        answer = _Answer(send, context, self._services.clock.now, cors_headers)
        calls, traces = self._services.calls, self._services.traces
        calls.note_call(1)
        try:
            try:
                require_single(scope["headers"])
                self._services.hosts.check(headers)
                preflight = origins.preflight(scope["method"], headers)
                if preflight is None:
                    context.tenant = self._tenant(scope["path"], headers)
            except ApiError as refusal:
                await make_response(refusal, scope["path"])(scope, receive, answer.send)
            else:
                context.body = self._services.bodies.open(context.tenant.name)
                await (preflight or self._app)(scope, receive, answer.send)
        except Exception as error:
            logger.exception("call %s failed", context.request_id)
            if not answer.status:
                await make_response(api_error_of(error), scope["path"])(scope, receive, answer.send)
        finally:
            context.body.release()
            if context.images is not None:
                context.images.release()
            if context.visit is not None:
                context.visit.leave()
            if context.stay is not None:
                context.stay.leave()
            calls.note_call(-1)
            status, route = answer.status or CLIENT_CLOSED_REQUEST, _route_path(scope)
            calls.note_request(route, status)
            if traces is not None and scope["method"] == "POST":
                traces.note(context, scope["method"], route, status, self._services.clock.now())
            if self._is_logged and not (scope["path"] in PROBES and status < 400):
                access_logger.info("call", extra={"fields": self._fields(scope, answer)})

    def _make_context(self, headers: dict[bytes, bytes]) -> RequestContext:
        client_request_id = headers.get(b"x-request-id", b"")[:MAX_LOGGED_LENGTH].decode("latin-1")
        given = headers.get(b"traceparent", b"")
        traceparent = traceparent_of(given, self._draw, is_recorded=self._services.traces is not None)
        return RequestContext(
            request_id=f"req-{self._draw(16).hex()}",
            client_request_id=client_request_id,
            tenant=ANYBODY,
            arrival_s=self._services.clock.now(),
            traceparent=traceparent,
            body=self._services.bodies.open(ANYBODY.name),
            parent_id=traceparent[36:52] if given.startswith(traceparent.encode()) else "",
        )

    def _tenant(self, path: str, headers: dict[bytes, bytes]) -> Tenant:
        """Return the tenant of a request; raises `ApiError` without a valid key."""
        tenants = self._services.tenants
        if not tenants.has_keys or path in self._open_paths:
            return ANYBODY
        tenant = tenants.find(_key_of(path, headers))
        if tenant is None:
            raise unauthorized(path)
        return tenant

    def _fields(self, scope: Scope, answer: _Answer) -> dict[str, Any]:
        """Return a request's log fields: no prompt, no text, no query, no key."""
        context = answer.context
        fields: dict[str, Any] = {
            "request_id": context.request_id,
            "method": scope["method"],
            "path": scope["path"][:MAX_LOGGED_LENGTH],
            "status": answer.status or CLIENT_CLOSED_REQUEST,
            "ms": round(1000 * (self._services.clock.now() - context.arrival_s), 1),
            "trace_id": context.trace_id,
        }
        if context.tenant.name:
            fields["tenant"] = context.tenant.name
        if context.client_request_id:
            fields["client_request_id"] = context.client_request_id
        if context.num_prompt_tokens:
            fields |= {
                "prompt_tokens": context.num_prompt_tokens,
                "cached_tokens": context.num_cached_tokens,
                "output_tokens": context.num_output_tokens,
                "finish": context.finish_reason,
            }
        return fields


class _Answer:
    """Passes an answer on with our headers, and keeps its status."""

    __slots__ = ("_cors_headers", "_now", "_send", "context", "status")

    def __init__(
        self, send: Send, context: RequestContext, now: Callable[[], float], cors_headers: list[tuple[bytes, bytes]]
    ) -> None:
        self._send = send
        self._now = now
        self._cors_headers = cors_headers
        self.context = context
        self.status = 0

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message on. Mutates its headers."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            elapsed_ms = 1000 * (self._now() - self.context.arrival_s)
            message["headers"] = [
                *message.get("headers", ()),
                (b"x-request-id", self.context.request_id.encode()),
                (b"openai-processing-ms", b"%d" % elapsed_ms),
                (b"traceparent", self.context.traceparent.encode()),
                *self._cors_headers,
            ]
        return self._send(message)


def traceparent_of(header: bytes, draw: Draw, *, is_recorded: bool = False) -> str:
    r"""Return the W3C trace context of a request: its header's, or a new one if the header is not valid.

    >>> traceparent_of(b"00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01", bytes)
    '00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01'
    >>> traceparent_of(b"00-nonsense", lambda size: b"\x01" * size)
    '00-01010101010101010101010101010101-0101010101010101-00'
    """
    match = TRACEPARENT.fullmatch(header)
    if match is None or (match[1] == b"00" and match[4]):
        return f"00-{draw(16).hex()}-{draw(8).hex()}-{is_recorded:02x}"
    return header[:55].decode()  # later versions may append fields that we do not know


def _key_of(path: str, headers: dict[bytes, bytes]) -> bytes:
    """Return the key of a request, which may be empty. `authorization` decides if it is present."""
    authorization = headers.get(b"authorization")
    if authorization is None:
        return headers.get(b"x-api-key", b"").strip() if takes_x_api_key(path) else b""
    scheme, _, key = authorization.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def make_response(error: ApiError, path: str) -> Response:
    """Return an error as the answer to a request for this path."""
    return Response(error.body(path), error.status, error.headers, media_type="application/json")


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the answer for an exception of an endpoint or of the router."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_CLOSED_REQUEST)  # only the log shows this status
    answer = _routing_error(request, error) if isinstance(error, HTTPException) else api_error_of(error)
    return make_response(answer, request.scope["path"])


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    if error.status_code == 404:
        return not_found(request.scope["path"])
    if error.status_code == 405:
        return method_not_allowed(request.method, (error.headers or {}).get("Allow", ""))
    return ApiError(error.status_code, error.detail)


def _route_path(scope: Scope) -> str:
    """Return the path of a request's route: one of few, while a request can name any path."""
    route = scope.get("route")
    return route.path if isinstance(route, Route) else NO_ROUTE
