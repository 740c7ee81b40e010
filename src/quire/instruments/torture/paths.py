"""Every path that takes JSON, as the server's own OpenAPI document lists them, with bodies that are no requests."""

from __future__ import annotations

from typing import Final

from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.refusals import Probe, refuse_all
from quire.instruments.torture.stage import Stage, TortureServer

JSON: Final = "application/json"
REFUSED: Final = frozenset({400, 413})
OFF: Final = {"/v1/load_lora_adapter": 403, "/v1/unload_lora_adapter": 403}
"""Paths that a server without the option for them refuses before it reads a body, and the status."""

BODIES: Final = (
    *(b"", b"{", b"[]", b"null", b'"text"', b"5", b"\xff\xfe{}"),
    *(b'{"model": "a", "model": "b"}', b'{"model": 5}', b'{"model": "\\ud800"}', b'{"no_such_field": NaN}'),
)
LARGE_BODIES: Final = (
    *(b"[" * 100_000, b'{"a":' * 100_000, b'{"model": ' + b"9" * 100_000 + b"}"),
    b'{"metadata": [' + b"[]," * 300_000 + b"0]}",
)


def paths(stage: Stage) -> str:
    """I46: every path that takes JSON refuses what is no request, in the form of its interface.

    A quick run sends each path every third body, and each body to every third path.
    """
    bodies, step = (*BODIES, *LARGE_BODIES), 3 if stage.is_quick else 1
    with stage.serving() as server:
        found = json_paths(server)
        chosen = [(path, body) for index, path in enumerate(found) for body in bodies[index % step :: step]]
        remark = refuse_all(server, [_probe(path, body) for path, body in chosen])
    return f"{len(found)} paths, {remark}"


def json_paths(server: TortureServer) -> list[str]:
    """Return the paths to which a server's OpenAPI document lets clients post JSON."""
    document = server.get("/openapi.json").json()
    posts = {path: each["post"] for path, each in document["paths"].items() if "post" in each}
    found = [path for path, post in posts.items() if JSON in post.get("requestBody", {}).get("content", {})]
    require(len(found) > 0, "/openapi.json lists no path that takes JSON")
    return found


def _probe(path: str, body: bytes) -> Probe:
    statuses = frozenset({OFF[path]}) if path in OFF else REFUSED
    return Probe(f"{body[:40]!r} to {path}", statuses, path, body, large=body in LARGE_BODIES)


PATHS: Final = (Case("I46", "every path, with bodies that are no requests", paths),)
