"""The body of a request: its limits, and how it is read. The server bounds both size and time.

max_body_bytes = text or ids that fit the context, for each prompt + the other fields       never over `max_body`
                 for a model that reads images: `max_image_body`
max_values, max_numbers                                    its content, counted before it becomes objects
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Final

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from quire.core.json_bounds import DEFAULT_BOUNDS, JsonBounds
from quire.engine.text.tokenizer import TEXT_BYTES_PER_TOKEN
from quire.serve.errors import body_too_large, request_timeout, unsupported_media_type
from quire.serve.read.body_budget import HeldBody
from quire.serve.services import ServerServices, Services

OTHER_FIELDS_BYTES: Final = 1 << 20
"""Room for everything but prompts: tools, schemas, biases."""

JSON_BYTES_PER_BYTE: Final = 3
"""If JSON escapes everything that is not ASCII, a character of 2 to 4 bytes becomes 6 or 12."""

JSON_BYTES_PER_ID: Final = 12
"""A token id in JSON: ten digits, a comma and a space."""

MAX_NUMBERS: Final = 1 << 18
"""Maximum numbers in one body, unless a single prompt can have more: parsing them blocks all Python threads."""

OF_BROWSERS: Final = ("origin", "referer", "sec-fetch-site")
"""A browser sends at least one of these headers with every form."""

PLAIN: Final = ("", "application/x-www-form-urlencoded")
"""Media types from clients that do not set one; `curl -d` sends that of a form."""

MAX_LENGTH_DIGITS: Final = 20
"""Maximum digits of a Content-Length to parse: a longer number is over every limit."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """The limits of a body; `why` names the limit's source for a client, and what to do."""

    max_bytes: int
    why: str = "send less"
    bounds: JsonBounds = DEFAULT_BOUNDS

    @classmethod
    def of(cls, services: Services, *, num_prompts: int = 1, has_text: bool = True) -> BodyLimits:
        """Return the limits of a body with this many prompts, which are texts or token ids. Does not mutate."""
        limits, config = services.model.limits, services.config
        context, text_bytes = limits.max_model_len, TEXT_BYTES_PER_TOKEN * JSON_BYTES_PER_BYTE
        prompt_bytes = context * (max(text_bytes, JSON_BYTES_PER_ID) if has_text else JSON_BYTES_PER_ID)
        fits = num_prompts * prompt_bytes + OTHER_FIELDS_BYTES
        why = f"a context of {context} tokens has no room for more"
        most, setting = config.max_body_bytes, "max_body"
        if has_text and services.model.report.reads_images:
            fits, most, setting = sys.maxsize, config.max_image_body_bytes, "max_image_body"
        if fits > most:
            fits, why = most, f"this server accepts no larger body ({setting})"
        many = "; send less at once" if num_prompts > 1 else "; send less"
        max_numbers = num_prompts * context + (limits.vocab_size if has_text else 0)  # prompt ids, allowed ids
        bounds = JsonBounds(max_numbers=max(context, min(max_numbers, MAX_NUMBERS)))
        return cls(fits, why + many, bounds)


async def read_json_body(request: Request, limits: BodyLimits, *, any_media_type: bool = False) -> bytearray:
    """Return a body of plain JSON; raises `ApiError` 415 for any other body, else like `read_body`.

    A body without a media type, with that of a form (as `curl -d` sends), or with `any_media_type` any other, is also
    read as JSON, unless a browser sent it: a page of another site can submit a form without a preflight, but never
    JSON, and never without the headers `OF_BROWSERS`.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_free = (any_media_type or media_type in PLAIN) and not any(name in request.headers for name in OF_BROWSERS)
    if media_type != "application/json" and not is_free:
        raise unsupported_media_type("the body must be JSON, with the header Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise unsupported_media_type("the body must not be compressed (no Content-Encoding)")
    return await read_body(request, limits)


async def read_body(request: Request, limits: BodyLimits) -> bytearray:
    """Return the body; raises `ApiError` 413 if it is too large, and 408 if it does not arrive in time.

    Its bytes are counted before they are kept, and held until the request ends: 503 if all requests together hold too
    many, 429 if the tenant's do. The announced size is checked at once, arriving bytes as they come. Raises
    `ClientDisconnect` if the client leaves.
    """
    server: ServerServices = request.app.state.models.server
    held, announced = request.state.context.body, request.headers.get("content-length", "").lstrip("0")
    if announced.isdecimal():
        num_bytes = int(announced[:MAX_LENGTH_DIGITS])  # Python refuses to parse thousands of digits
        if num_bytes > limits.max_bytes:
            raise body_too_large(limits.max_bytes, limits.why)
        held.require(num_bytes)
    try:
        async with asyncio.timeout(server.config.body_timeout_s):
            return await _read(request.receive, limits, held)
    except TimeoutError:
        raise request_timeout("body", server.config.body_timeout_s) from None


async def _read(receive: Receive, limits: BodyLimits, held: HeldBody) -> bytearray:
    body = bytearray()  # not a list of parts: a part of one byte would take much more than a byte
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        if len(body) + len(part) > limits.max_bytes:
            raise body_too_large(limits.max_bytes, limits.why)
        held.take(len(part))
        body += part
        if not message.get("more_body", False):
            return body
