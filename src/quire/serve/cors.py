"""Origins: the web pages of other sites that may call the server, and what a browser must be told of that (CORS).

    page of https://chat.example ──► OPTIONS /v1/…  ──► 204: this origin may call, with these headers
                                 ──► POST /v1/…     ──► answer + access-control-allow-origin

Off unless origins are named. An origin is compared as a whole: scheme, name and port. Desktop programs made of web
pages have origins of their own schemes, such as app://obsidian.md. A key travels in a header that a page must set
itself, never in a cookie, so naming an origin, or all by `*`, gives no page a key that it does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.responses import Response

from quire.serve.host_names import ANY, allowed_origin

METHODS: Final = b"GET, POST, DELETE, OPTIONS"
EXPOSED: Final = b"x-request-id, openai-processing-ms, retry-after"
ANSWER_KEPT_S: Final = b"600"
MAX_HEADERS_LENGTH: Final = 2000
HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9_, -]*")


class Origins:
    """Pages of which origins may call. Does not change.

    >>> origins = Origins(["https://chat.example", "app://obsidian.md"])
    >>> origins.allow(b"https://chat.example"), origins.allow(b"https://chat.example:444"), Origins([]).allow(b"null")
    (True, False, False)
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(allowed_origin(name).encode() for name in names)
        self._are_all = ANY.encode() in self._names

    def allow(self, origin: bytes) -> bool:
        """Return whether pages of an origin may call; no origin at all is no page."""
        return bool(origin) and (self._are_all or origin.lower() in self._names)

    def headers(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        """Return what an answer tells a browser. Where any origin is named, every answer says that it depends on it."""
        if not self._names:
            return []
        if not self.allow(origin):
            return [(b"vary", b"origin")]
        return [
            (b"vary", b"origin"),
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", EXPOSED),
        ]

    def preflight(self, method: str, headers: Mapping[bytes, bytes]) -> Response | None:
        """Return the answer to a browser that asks before it calls, if its page may call; else None.

        What is asked for is allowed: the call itself still needs its key.
        """
        if method != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        if not self.allow(headers.get(b"origin", b"")):
            return None
        wanted = headers.get(b"access-control-request-headers", b"")
        is_plain = len(wanted) <= MAX_HEADERS_LENGTH and HEADER_NAMES.fullmatch(wanted)
        told = {
            "access-control-allow-methods": METHODS.decode(),
            "access-control-allow-headers": wanted.decode("latin-1") if is_plain and wanted else "content-type",
            "access-control-max-age": ANSWER_KEPT_S.decode(),
        }
        if headers.get(b"access-control-request-private-network") == b"true":
            told["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=told)
