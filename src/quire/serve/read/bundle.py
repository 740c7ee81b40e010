"""The body of /cache/import: checked and written to a file as it arrives, off the event loop."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from starlette.requests import ClientDisconnect, Request

from quire.compute.worker.store.portable import MAX_BEGINNING_BYTES
from quire.compute.worker.store.spool import Intake, IntakeLimits
from quire.serve.errors import body_too_large, request_timeout, unsupported_media_type
from quire.serve.services import Services

BYTES_AT_ONCE: Final = 1 << 20
MEDIA_TYPE: Final = "application/octet-stream"


def require_bundle(request: Request, limits: IntakeLimits) -> None:
    """Raise `ApiError` for a body of another type, or one that announces more than the cache can hold."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != MEDIA_TYPE:
        raise unsupported_media_type(f"the body must be a bundle, with the header Content-Type: {MEDIA_TYPE}")
    most = MAX_BEGINNING_BYTES + limits.max_blocks * limits.entry_bytes
    announced = request.headers.get("content-length", "0").lstrip("0") or "0"
    if len(announced) > len(str(most)) or (announced.isdecimal() and int(announced) > most):
        raise body_too_large(most, "the disk cache holds no more; raise --disk-cache-size")


async def read_bundle(request: Request, services: Services, intake: Intake) -> None:
    """Feed the body to an intake; raises `InvalidRequestError` for a bad one. Mutates.

    Each MiB has the time limit of a whole body elsewhere, because other bundles wait meanwhile.
    """
    limit_s, more = services.config.body_timeout_s, True
    while more:
        try:
            async with asyncio.timeout(limit_s):
                part, more = await _part(request)
        except TimeoutError:
            raise request_timeout("next MiB of the body", limit_s) from None
        await services.bundles.run(partial(intake.feed, part))
    await services.bundles.run(intake.finish)


async def _part(request: Request) -> tuple[bytes, bool]:
    """Return about a MiB of the body, and whether more follows."""
    part, more = bytearray(), True
    while more and len(part) < BYTES_AT_ONCE:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(part), more
