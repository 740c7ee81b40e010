"""HttpClient: many exchanges with one server at once, in an event loop, on connections that it reuses.

    exchange ──► an idle connection, or a new one ──► request bytes, written at once
             ◄── status, headers; pieces of the body as they arrive; then the connection is idle again

A client on the server's machine takes processor time from the server, so this is only a parser in C between two
callbacks: no request library, no task per connection, no copies of bodies that a caller takes piece by piece.
Cancelling an exchange closes its connection, like a client that disconnects.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools

from quire.core.errors import InvalidValueError

TakePiece = Callable[[bytes], None]
HTTP_OK = 200


@dataclass(slots=True)
class Reply:
    """A status, headers with lower-case names, and the body, except the pieces that a caller took."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    is_complete: bool = False


class HttpConnection(asyncio.Protocol):
    """One connection: one exchange at a time. The parser calls the methods `on_…`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._reply = Reply()
        self._take: TakePiece | None = None
        self._done: asyncio.Future[None] | None = None
        self.has_received = False  # any byte of the reply
        self._has_head = False

    @property
    def is_open(self) -> bool:
        """Whether another exchange can follow."""
        return self._transport is not None and not self._transport.is_closing()

    async def exchange(self, request: bytes, take: TakePiece | None) -> Reply:
        """Send a request and return the reply; `take` gets the pieces of its body if the status is 200.

        Raises `ConnectionError` if the connection ends before the reply does.
        """
        if self._transport is None:
            raise ConnectionResetError("the connection is closed")
        self._reply, self._take, self.has_received, self._has_head = Reply(), take, False, False
        self._done = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            await self._done
            return self._reply
        finally:
            self._done = None
            if not self._reply.is_complete:
                self.close()

    def close(self) -> None:
        """Close the connection now, and drop unsent data. Mutates."""
        if self._transport is not None:
            self._transport.abort()

    # ---- called by the transport --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Take bytes."""
        self.has_received = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(ConnectionResetError(f"the reply is not HTTP: {error}"))
            self.close()

    def eof_received(self) -> None:
        """End a reply without a length: it ends when the server closes the connection (RFC 9112, 6.3)."""
        has_length = self._reply.headers.keys() & {"content-length", "transfer-encoding"}
        if self._has_head and not self._reply.is_complete and not has_length:
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        """End the exchange, if there is one."""
        self._transport = None
        self._end(ConnectionResetError(f"the connection ended before the reply{f': {error}' if error else ''}"))

    # ---- called by the parser -----------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header."""
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Take the status."""
        self._reply.status, self._has_head = self._parser.get_status_code(), True

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body."""
        if self._take is not None and self._reply.status == HTTP_OK:
            self._take(body)
        else:
            self._reply.body += body

    def on_message_complete(self) -> None:
        """End the exchange."""
        self._reply.is_complete = True
        if not self._parser.should_keep_alive():
            self.close()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class HttpClient:
    """A client of one server; `url` may end with `/v1`, as for OpenAI's clients. Belongs to one event loop."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urlsplit(url)
            self._host = parts.hostname or ""
            self._port = parts.port or (443 if parts.scheme == "https" else 80)
            is_one = parts.scheme in ("http", "https") and self._host and not (parts.query or parts.fragment)
        except ValueError:  # an invalid port, an incomplete IPv6 address
            is_one = False
        if not is_one:
            raise InvalidValueError("url", url, "http://HOST:PORT, or https://")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        fields = {"Host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._fields = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self._idle: list[HttpConnection] = []

    def post_request(self, path: str, body: bytes) -> bytes:
        """Return the bytes that post JSON to a path. Does not mutate."""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._fields}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body

    async def exchange(self, request: bytes, take: TakePiece | None = None) -> Reply:
        """Send a request and return the reply, as `HttpConnection` does; raises `OSError` if that fails.

        If the server has closed an idle connection, opens a new one.
        """
        connection = self._idle_connection()
        if connection is not None:
            try:
                return await self._exchange_on(connection, request, take)
            except ConnectionError:
                if connection.has_received:
                    raise
        _, connection = await asyncio.get_running_loop().create_connection(
            HttpConnection, self._host, self._port, ssl=self._tls
        )
        return await self._exchange_on(connection, request, take)

    def close(self) -> None:
        """Close the idle connections. Mutates."""
        while self._idle:
            self._idle.pop().close()

    def _idle_connection(self) -> HttpConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _exchange_on(self, connection: HttpConnection, request: bytes, take: TakePiece | None) -> Reply:
        reply = await connection.exchange(request, take)
        if connection.is_open:
            self._idle.append(connection)
        return reply
