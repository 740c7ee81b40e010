"""The body of a call, read with an eye on its size and on the clock: neither is left to the client."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from quire.serve.config import ServerConfig
from quire.serve.errors import body_too_large, request_timeout


async def read_body(request: Request, config: ServerConfig) -> bytes:
    """Return the body; raises `ApiError` 413 for one that is too large and 408 for one that does not come in time.

    A length that is announced is believed at once where it is too large; otherwise what comes is counted, so that no
    more than the limit is ever held. Raises `ClientDisconnect` where the client leaves.
    """
    limit = config.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise body_too_large(limit)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _read(request.receive, limit)
    except TimeoutError:
        raise request_timeout("body", config.body_timeout_s) from None


async def _read(receive: Receive, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise body_too_large(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
