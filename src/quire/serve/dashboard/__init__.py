"""The dashboard: a page at `/` that shows the memory live, and its files under `/dashboard/`.

    /                    page/index.html
    /dashboard/NAME      page/NAME: style and modules; assets/NAME: colours, and uPlot, which draws the plots
    /live, /v1/...       the page's requests, with a key if keys are set

The page is static and needs no key: it contains no data of the server. Its files are read once, when the server starts,
so requests read no files and no request path becomes a file path. Nothing is built, and nothing is loaded from
elsewhere. The policy allows only code and data of this server, no inline script or style, and no framing: a model's
output is text, and could not run as code even if the page had a bug. Images may also be data URLs: those that the user
attaches to a message.

The files change with quire's version, so browsers revalidate them each time and usually get 304.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from quire.assets import ASSETS_FOLDER

PAGE_FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Files of any other kind (the licence of uPlot) are in the same folder but not served."""

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
ETAG_BYTES: Final = 12


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file of the page, ready to send."""

    body: bytes
    headers: Mapping[str, str]

    @classmethod
    def of(cls, path: Path) -> PageFile:
        """Read a file of a known type."""
        body = path.read_bytes()
        return cls(
            body,
            {
                "content-type": MEDIA_TYPES[path.suffix],
                "cache-control": "no-cache",
                "etag": f'"{hashlib.blake2b(body, digest_size=ETAG_BYTES).hexdigest()}"',
                "content-security-policy": POLICY,
                "cross-origin-opener-policy": "same-origin",
                "referrer-policy": "no-referrer",
                "x-content-type-options": "nosniff",
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the file, or with 304 if the client has it already."""
        known = Request(scope).headers.get("if-none-match", "")
        etag = self.headers["etag"]
        is_known = known.strip() == "*" or etag in {tag.strip().removeprefix("W/") for tag in known.split(",")}
        if is_known:
            answer = Response(status_code=304, headers=dict(self.headers))
        else:
            answer = Response(self.body, headers=dict(self.headers))
        await answer(scope, receive, send)


def dashboard_routes() -> tuple[Route, ...]:
    """Return the routes of the page, with its files in memory: no request reads a file. Does not mutate."""
    files = [*PAGE_FOLDER.iterdir(), *ASSETS_FOLDER.iterdir()]
    paths = sorted(path for path in files if path.suffix in MEDIA_TYPES)
    places = {"/" if path.name == INDEX else f"/dashboard/{path.name}": PageFile.of(path) for path in paths}
    return tuple(Route(place, file, methods=["GET"]) for place, file in places.items())
