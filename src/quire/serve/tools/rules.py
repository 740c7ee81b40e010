r"""Pieces of grammars in llguidance's dialect of Lark.

llguidance treats every token that a tokenizer has in addition to its vocabulary as special, if it is called so or looks
like "<tool_call>": text never matches it, letter by letter, and only a rule can say it, by its id. So a mark is written
as the token that it is. Free text may not have such a token, and the first one begins a call; where a model spells the
mark out, a lazy rule finds its end, so that it begins a call as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from quire.serve.tools.base import Mark, Tool

SEPARATORS: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Space as models are trained to write it, and no room for more: a small model would not find the way out."""

NOTES: Final = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
)
LOOKS_AROUND: Final = re.compile(r"\(\?<?[=!]|\\[1-9]")
NAMED: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose keys are names of the client's own."""

OPEN: Final = frozenset(
    {"additionalProperties", "allOf", "anyOf", "else", "if", "minProperties", "not", "oneOf", "patternProperties"}
    | {"propertyNames", "$ref", "then", "unevaluatedProperties"}
)
"""Keywords that may give a meaning to properties that are not named."""


def literal(text: str) -> str:
    r"""Return a text as a grammar has it.

    >>> literal('"a"')
    '"\\"a\\""'
    """
    return json.dumps(text)


def pattern(text: str) -> str:
    r"""Return a text as the regular expression of a grammar.

    >>> pattern("</think>"), pattern("<|a|>")
    ('<\\/think>', '<\\|a\\|>')
    """
    return re.sub(r"[^A-Za-z0-9_<>]", lambda match: "\\" + match[0], text)


def make_mark(id_of: Callable[[str], int | None]) -> Mark:
    """Return how a grammar says marks, of which some are tokens.

    >>> mark = make_mark({"<tool_call>": 7}.get)
    >>> mark("<tool_call>"), mark("functions")
    ('<[7]>', '"functions"')
    """

    def mark(text: str) -> str:
        token_id = id_of(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    return mark


def repeated(element: str, most: int) -> str:
    """Return what follows the first of several elements.

    >>> repeated('"," call', 3), repeated('"," call', 1)
    (' ("," call){0,2}', '')
    """
    return f" ({element}){{0,{most - 1}}}" if most > 1 else ""


def arguments_schema(tool: Tool) -> str:
    """Return the arguments of a call. Keywords that cannot be kept are passed over, unless the tool is a strict one."""
    schema = _without_notes(tool.parameters, keeps_all=tool.strict)
    schema = schema if _adds_up(schema) else _closed(schema)
    schema |= {"type": "object", "x-guidance": {**SEPARATORS, "lenient": not tool.strict}}
    return f"%json {json.dumps(schema)}"


def _closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties that it names and no others, where it leaves that open.

    Whatever is written then is allowed by the schema as it came. A function has no use for arguments that it does not
    know, and a small model would go on inventing some. Does not mutate.
    """
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for key in ("properties", "$defs", "definitions"):
        if isinstance(found.get(key), Mapping):
            found[key] = {name: _closed(each) for name, each in found[key].items()}
    if "items" in found:
        found["items"] = _closed(found["items"])
    properties, required = found.get("properties"), found.get("required", [])
    names_all = isinstance(properties, Mapping) and isinstance(required, list) and _names(properties, required)
    return found | {"additionalProperties": False} if names_all and not OPEN & found.keys() else found


def _names(properties: Mapping[str, Any], required: list[Any]) -> bool:
    return all(isinstance(name, str) and name in properties for name in required)


def _adds_up(schema: Any) -> bool:
    """Return whether the properties of some object may be in several places. Does not mutate."""
    if isinstance(schema, list):
        return any(map(_adds_up, schema))
    if not isinstance(schema, Mapping):
        return False
    several = "properties" in schema and not schema.keys().isdisjoint(("$ref", "anyOf", "oneOf"))
    return several or "allOf" in schema or any(map(_adds_up, schema.values()))


def _without_notes(schema: Any, *, keeps_all: bool) -> Any:
    """Return a schema without what it says to readers only, which would fill a grammar. Does not mutate.

    Unless it keeps all, patterns go that look around: no automaton can.
    """
    if isinstance(schema, list):
        return [_without_notes(each, keeps_all=keeps_all) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            found[key] = {name: _without_notes(each, keeps_all=keeps_all) for name, each in value.items()}
        elif key == "pattern" and not keeps_all and isinstance(value, str) and LOOKS_AROUND.search(value):
            continue
        elif key not in NOTES:
            found[key] = value if key in ("const", "enum") else _without_notes(value, keeps_all=keeps_all)
    return found


def text_before(opener: str, mark: Mark) -> str:
    """Return free text with a mark at its end, be that a token or letters; needs the rules of `free_text`."""
    said = mark(opener)
    return "spelled" if said == literal(opener) else f"(FREE? {said} | spelled)"


def free_text(opener: str, *, is_bare: bool) -> str:
    """Return the rules of free text; where calls may be bare, it begins as no call does."""
    first = r"FREE: /\s*[^\s{](.|\n)*/" if is_bare else r"FREE: /(.|\n)+/"
    return "\n".join(["free: FREE?", first, f"spelled[lazy]: /(.|\\n)*{pattern(opener)}/", r"GAP: /[ \n]?/"])
