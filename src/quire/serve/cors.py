"""Origins: the web pages of other sites that may call the server, and the CORS headers for browsers.

    page of https://chat.example ──► OPTIONS /v1/…  ──► 204: this origin may call, with these headers
                                 ──► POST /v1/…     ──► answer + access-control-allow-origin

Off unless origins are configured. An origin matches only if scheme, name and port are equal. Desktop programs made of
web pages have origins with their own schemes, such as app://obsidian.md. A key is sent in a header that the page itself
must set, never in a cookie, so allowing an origin, or all with `*`, gives no page a key that it does not have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from starlette.responses import Response

from quire.serve.host_names import ANY, allowed_origin

METHODS: Final = "GET, POST, DELETE, OPTIONS"
EXPOSED: Final = (
    b"x-request-id, request-id, traceparent, openai-processing-ms, retry-after, retry-after-ms, x-should-retry"
)
ANSWER_KEPT_S: Final = "600"
MAX_HEADERS_LENGTH: Final = 2000
HEADER_NAMES: Final = re.compile(rb"[A-Za-z0-9_, -]*")


class Origins:
    """The origins whose pages may call. Immutable.

    >>> origins = Origins(["https://chat.example", "app://obsidian.md"])
    >>> origins.allow(b"https://chat.example"), origins.allow(b"https://chat.example:444"), Origins([]).allow(b"null")
    (True, False, False)
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(allowed_origin(name).encode() for name in names)
        self._are_all = ANY.encode() in self._names

    def allow(self, origin: bytes) -> bool:
        """Return whether pages of an origin may call; False for an empty origin."""
        return bool(origin) and (self._are_all or origin.lower() in self._names)

    def headers(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        """Return an answer's CORS headers. If any origin is configured, every answer has `vary: origin`."""
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
        """Return the answer to a browser's preflight request if its page may call, else None.

        Allows every header that the browser asks for: the call itself still needs its key.
        """
        if method != "OPTIONS" or b"access-control-request-method" not in headers:
            return None
        if not self.allow(headers.get(b"origin", b"")):
            return None
        requested = headers.get(b"access-control-request-headers", b"")
        is_plain = len(requested) <= MAX_HEADERS_LENGTH and HEADER_NAMES.fullmatch(requested)
        cors_headers = {
            "access-control-allow-methods": METHODS,
            "access-control-allow-headers": requested.decode("latin-1") if is_plain and requested else "content-type",
            "access-control-max-age": ANSWER_KEPT_S,
        }
        if headers.get(b"access-control-request-private-network") == b"true":
            cors_headers["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=cors_headers)
