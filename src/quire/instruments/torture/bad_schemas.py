"""I20: malicious schemas and expressions. Some are refused; some are served, at a limited cost.

refused     schemas with dangling or remote references, without any text, or too expensive to compile
served      schemas that are only expensive: they can also be refused; other requests must not suffer
different   a thousand schemas: each is enforced, and their memory stops growing
"""

from __future__ import annotations

import time
from typing import Any, Final

from quire.instruments.torture.failure import require
from quire.instruments.torture.refusals import Probe, bad, bad_chat, refuse_all
from quire.instruments.torture.stage import Stage, TortureServer

MAX_HEAVY_S: Final = 10.0
MAX_GROWTH_BYTES: Final = 100e6
NUM_VALUES: Final = 2_000
"""The size of each different schema. The cache keeps ten (64 MiB, by its own estimate); others must be evicted."""

Form = dict[str, Any]

REFUSED: Final[tuple[Form, ...]] = (
    {"json": {"$ref": "#"}},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json": {"$ref": "http://127.0.0.1/schema"}},
    {"json": {"$ref": "file:///etc/passwd"}},
    {"json": {"$ref": "#/nowhere"}},
    {"json": {"type": "nothing"}},
    {"json": {"type": "integer", "minimum": 3, "maximum": 2}},
    {"json": {"type": "string", "pattern": "("}},
    {"json": {"type": "string", "pattern": "(?<=a)b"}},
    {"json": "{"},
    {"regex": "(" * 5_000 + "a" + ")" * 5_000},
    {"grammar": "start: missing"},
    {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    {"choice": []},
    {"regex": "a", "choice": ["a"]},
)
HEAVY: Final[tuple[Form, ...]] = (
    {"json": {"type": "string", "pattern": "(a+)+$"}},
    {"json": {"type": "string", "pattern": "^((((a{1,99}){1,99}){1,99}){1,99}){1,99}$"}},
    {"json": {"enum": [str(value) for value in range(5_000)]}},
    {"json": {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(1_000)}}},
    {"regex": "(((((a|b){1,99}c){1,99}d){1,99}e){1,99}f){1,99}"},
    {"regex": "(.*a.*b.*c.*d.*e.*f){8}"},
    {"regex": "(a|bb){1000000000}"},
    {"choice": [f"choice number {index}" for index in range(5_000)]},
)


def schemas(stage: Stage) -> str:
    """I20: unenforceable schemas are refused, expensive ones hurt no other request, and memory does not grow."""
    probes = [_probe(form) for form in REFUSED]
    probes += [
        bad_chat({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}})
        for schema in ({"$ref": "#"}, {"$ref": "http://127.0.0.1/schema"}, {"type": "string", "pattern": "("})
    ]
    with stage.serving() as server:
        slowest = max(_serve(server, form) for form in HEAVY)
        first, count = (80, 160) if stage.is_quick else (200, 1000)
        _serve_different(server, 0, first)
        before = server.process.resident_bytes() or 0
        _serve_different(server, first, count)
        growth = (server.process.resident_bytes() or 0) - before
        require(growth < MAX_GROWTH_BYTES, f"memory grew by {growth / 1e6:.0f} MB over {count - first} schemas")
        remark = refuse_all(server, probes)
    return f"{remark}; {len(HEAVY)} heavy ones, {slowest:.1f} s at most; {count} others, {growth / 1e6:+.0f} MB"


def _probe(form: Form) -> Probe:
    return bad({"structured_outputs": form}, param="structured_outputs", large=len(str(form)) > 1_000)


def _serve(server: TortureServer, form: Form) -> float:
    """Request a text with an expensive schema; it must be served or refused in time. Returns the seconds."""
    started = time.perf_counter()
    answer = server.complete(structured_outputs=form, max_tokens=16, temperature=1.0, seed=1)
    seconds = time.perf_counter() - started
    shown = str(form)[:60]
    require(answer.status in (200, 400, 500), f"{shown} got {answer.status}: {answer.body[:120]!r}")
    require(answer.status == 200 or bool(answer.error.get("message")), f"{shown} got no message")
    require(seconds < MAX_HEAVY_S, f"{shown} took {seconds:.1f} s")
    return seconds


def _serve_different(server: TortureServer, first: int, end: int) -> None:
    """Request texts with new schemas."""
    for number in range(first, end):
        schema = {"enum": [f"{number} {value}" for value in range(NUM_VALUES)]}
        answer = server.complete(structured_outputs={"json": schema}, max_tokens=16)
        require(answer.status == 200, f"the schema {number} got {answer.status}: {answer.body[:120]!r}")
        text = answer.json()["choices"][0]["text"]
        require(text.startswith(f'"{number} '), f"the schema {number} got the text {text[:40]!r}")
