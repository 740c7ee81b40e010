"""The guard: limits on connections, heads and slow readers, enforced in the HTTP protocol.

    connection ──► head: limited in bytes (431) and in seconds (408)
               ──► body: `read_body` bounds it ──► answer: a client that reads nothing for a while is disconnected
    limited number of connections: an idle one makes room, else 503

uvicorn parses and writes; this is its protocol with limits, because uvicorn has none for the head or for readers. The
guard counts bytes as they arrive, because the parser keeps an endless header without reporting it; the same goes for
trailers after the last chunk of a body. If an answer is sent before the whole body has arrived, the guard does not
close the connection at once, because the system would discard the answer with the unread bytes: it reads and drops the
rest for a moment.

A connection has one call at a time. A request that arrives before the previous answer has ended is dropped, and the
connection closed after that answer: the client sends the request again on another one (RFC 9112, 9.3.2). uvicorn would
queue any number of such requests, and no longer notice that the client of the running call has left.
"""

from __future__ import annotations

import secrets
import socket
import struct
from asyncio import AbstractEventLoop, TimerHandle, Transport
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from quire.serve.config import ServerConfig
from quire.serve.connections import ACCEPTED_AT_ONCE, end_with_client
from quire.serve.errors import ApiError, head_too_large, request_timeout

LINGER_S: Final = 2.0
"""How long the rest of a body is read and dropped after an early answer."""

IDLE_S: Final = 1.0
"""At the limit of connections, one that has been idle for this long makes room for a new one."""

MAX_HEADERS: Final = 256
"""The most headers of a request: each takes a hundred bytes of memory more than it has."""

DROP: Final = struct.pack("ii", 1, 0)

TOO_MANY_CONNECTIONS: Final = ApiError(
    503,
    "the server has reached its limit of connections; try again later",
    code="too_many_connections",
    headers={"retry-after": "1"},
)
TOO_MANY_HEADERS: Final = ApiError(431, f"the request has more than {MAX_HEADERS} headers", code="head_too_large")
NO_HTTP: Final = ApiError(400, "this is not a valid HTTP request", code="invalid_http_request")


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Limits of connections; `note_refused` gets the status of every answer that the guard itself sends."""

    max_connections: int
    max_head_bytes: int
    header_timeout_s: float
    write_timeout_s: float
    note_refused: Callable[[int], None]

    @classmethod
    def of(cls, config: ServerConfig, max_connections: int, note_refused: Callable[[int], None]) -> GuardLimits:
        """Return the limits that a server's settings set; `max_connections` is what the system allows."""
        return cls(
            max_connections,
            config.head_bytes,
            config.header_timeout_s,
            config.write_timeout_s,
            note_refused,
        )


def guarded(guard_limits: GuardLimits) -> type[GuardedProtocol]:
    """Return the protocol class for these limits; uvicorn takes a class."""

    class Guarded(GuardedProtocol):
        limits = guard_limits
        idle: ClassVar[dict[GuardedProtocol, float]] = {}

    return Guarded


class EarlyRequestError(Exception):
    """A request arrives before the previous answer has ended."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection."""

    limits: ClassVar[GuardLimits]
    idle: ClassVar[dict[GuardedProtocol, float]]
    """Connections without a call, with the time since when; the longest idle first."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._is_head_open = False  # a head has begun and has not ended
        self._is_body_open = False
        self._has_had_head = False
        self._is_refused = False
        self._num_head_bytes = 0  # of the path and headers that the parser has reported
        self._num_headers = 0
        self._num_hidden_bytes = 0  # received since its last report
        self._num_unread_bytes = 0  # in the write buffer at the last look
        self._refusal = NO_HTTP
        self._head_timer: TimerHandle | None = None
        self._read_timer: TimerHandle | None = None
        self._close_timer: TimerHandle | None = None

    # ---- the connection ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Accept a connection, or refuse it at the limit. Mutates."""
        super().connection_made(transport)
        end_with_client(transport.get_extra_info("socket"), self.limits.write_timeout_s)
        num_over = len(self.connections) - self.limits.max_connections
        if num_over <= 0 or self._take_place():
            self.idle[self] = self.loop.time()
            self._watch_head()
        elif num_over > ACCEPTED_AT_ONCE:
            self._drop()  # with TLS, those that were refused stay until their clients agree to end
        else:
            self._write_refusal(TOO_MANY_CONNECTIONS)
            self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers of a lost connection. Mutates."""
        self.idle.pop(self, None)
        for timer in (self._head_timer, self._read_timer, self._close_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, within the limits. Mutates."""
        if self._is_refused:
            return  # drop everything until the connection is closed
        self._num_hidden_bytes += len(data)
        super().data_received(data)
        if self._is_refused or self.transport.is_closing():
            return
        is_open = self._is_head_open or self._is_body_open
        if is_open and self._num_hidden_bytes > self.limits.max_head_bytes:
            self._refuse(head_too_large(self.limits.max_head_bytes))
        elif self._is_head_open or (self._is_idle and not self._is_body_open):
            self._watch_head()

    @property
    def _is_idle(self) -> bool:
        """Whether no answer is in progress."""
        return self.cycle is None or self.cycle.response_complete

    # ---- the parser's reports ---------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Note that a head begins; drop it if the previous answer has not ended. Mutates."""
        if not self._is_idle:
            self._is_refused = True
            raise EarlyRequestError  # the parser stops
        super().on_message_begin()
        self._is_head_open = True
        self._num_head_bytes = self._num_headers = 0
        if self._has_had_head:  # else all bytes of the connection belong to this head
            self._num_hidden_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Count a piece of the path. Mutates."""
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a complete header. Mutates."""
        super().on_header(name, value)
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            self._refusal = TOO_MANY_HEADERS
            raise self._refusal
        self._count_head(len(name) + len(value) + len(": \r\n"))

    def on_headers_complete(self) -> None:
        """Begin the call: its head is complete. Mutates."""
        self._is_head_open, self._is_body_open, self._has_had_head = False, True, True
        self._num_hidden_bytes = 0
        self.idle.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if not self.url.startswith(b"/") and (name := urlsplit(self.url).netloc):
            # RFC 9112, 3.2.2: the name in the target replaces the Host header.
            self.headers[:] = [(b"host", name), *(header for header in self.headers if header[0] != b"host")]
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Pass on a piece of the body. Mutates."""
        self._num_hidden_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Note that the body is complete. Mutates."""
        self._is_body_open = False
        super().on_message_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._stop_closing()  # the body of an early answer is complete: the connection stays open
            self.idle[self] = self.loop.time()
            self._unset_keepalive_if_required()
            handle = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = handle

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that the parser gave up on, because it is malformed or its head is too large. Mutates."""
        if not self._is_refused:
            self._refuse(self._refusal)

    # ---- the end of an answer ---------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """Note that an answer was written. Mutates."""
        is_more_left = self._is_body_open or self._is_refused
        self.cycle.body.clear()  # the part that the endpoint has not read
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif is_more_left:
            self._stop_closing()
            self._close_timer = self.loop.call_later(LINGER_S, self._close)
        elif self._is_idle:
            self.idle[self] = self.loop.time()

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that has been idle too long. Mutates."""
        self._close()

    # ---- slow clients -----------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Watch a client that reads more slowly than the server writes. Mutates."""
        super().pause_writing()
        self._num_unread_bytes = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(self.limits.write_timeout_s, self._look_at_reader)

    def resume_writing(self) -> None:
        """Stop watching: the client has read most of the answer. Mutates."""
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        super().resume_writing()

    def _look_at_reader(self) -> None:
        """Disconnect a client that has read nothing since the last look. Mutates."""
        unread = self.transport.get_write_buffer_size()
        if unread >= self._num_unread_bytes:
            self._drop()
        else:
            self._num_unread_bytes = unread
            self._read_timer = self.loop.call_later(self.limits.write_timeout_s, self._look_at_reader)

    def _watch_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_timeout_s, self._give_up_on_head)

    def _give_up_on_head(self) -> None:
        self._head_timer = None
        if not self._is_idle:
            self._watch_head()  # the previous answer is still running, so the client may take longer
        elif self._is_head_open and not self._is_refused:
            self._refuse(request_timeout("head", self.limits.header_timeout_s))
        else:
            self._close()

    def _take_place(self) -> bool:
        """Close the connection that has been idle the longest; return False if all are in use. Mutates."""
        for oldest, since_s in self.idle.items():
            if self.loop.time() - since_s < IDLE_S:
                return False
            del self.idle[oldest]
            if oldest.scheme == "https" or oldest.transport.get_write_buffer_size():
                oldest._drop()  # its client may not agree to end, or does not read, and its place is needed now
            else:
                oldest._close()
            return True
        return False

    # ---- refusing ---------------------------------------------------------------------------------------------------

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.limits.max_head_bytes:
            self._refusal = head_too_large(self.limits.max_head_bytes)
            raise self._refusal  # the parser stops, and calls send_400_response

    def _refuse(self, error: ApiError) -> None:
        """Answer an invalid request, and close. An answer that has begun ends here. Mutates."""
        self._is_refused = True
        if self._is_idle or not self.cycle.response_started:
            if self.cycle is not None:  # the endpoint sees a lost client, and writes nothing
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self._write_refusal(error)
            self._stop_closing()
            self._close_timer = self.loop.call_later(LINGER_S, self._close)
        else:
            self._close()

    def _write_refusal(self, error: ApiError) -> None:
        self.limits.note_refused(error.status)
        body = error.body()
        headers = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            "x-request-id": f"req-{secrets.token_hex(16)}",
            **error.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.transport.write(STATUS_LINE[error.status] + lines.encode("latin-1") + b"\r\n" + body)

    def _close(self) -> None:
        """Close when everything is written; drop what a client does not read in time. Mutates."""
        self._stop_closing()
        if not self.transport.is_closing():  # a second `close` would make a TLS transport unusable
            self.transport.close()
        self._close_timer = self.loop.call_later(self.limits.write_timeout_s, self._drop)

    def _drop(self) -> None:
        """Close at once, and drop what the system still holds for the client. Mutates."""
        connected = self.transport.get_extra_info("socket")
        if connected is not None and connected.fileno() >= 0:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, DROP)
        self.transport.abort()

    def _stop_closing(self) -> None:
        if self._close_timer is not None:
            self._close_timer.cancel()
            self._close_timer = None
