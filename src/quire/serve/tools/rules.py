r"""Parts of grammars in llguidance's dialect of Lark.

llguidance treats a tokenizer's added token as special if it is marked so or looks like "<tool_call>": text never
matches such a token letter by letter; only a rule with its id can. So a mark is written as its token. Free text cannot
contain the token, so its first occurrence begins a call; if a model spells the mark out, a lazy rule finds its end, so
that it also begins a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.serve.tools.base import Mark, Tool

MAX_REFERENCES: Final = 16

SEPARATORS: Final = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Only the space that models are trained to write: with more allowed, a small model might never stop writing it."""

NOTES: Final = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
)
LOOKS_AROUND: Final = re.compile(r"\(\?<?[=!]|\\[1-9]")
NAMED: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
"""Keywords whose keys are names that the client chose."""

OPEN: Final = frozenset(
    {"additionalProperties", "allOf", "anyOf", "else", "if", "minProperties", "not", "oneOf", "patternProperties"}
    | {"propertyNames", "$ref", "then", "unevaluatedProperties"}
)
"""Keywords that may give a meaning to properties without a name in `properties`."""


def literal(text: str) -> str:
    r"""Return a text as a literal of a grammar.

    >>> literal('"a"')
    '"\\"a\\""'
    """
    return json.dumps(text)


def pattern(text: str) -> str:
    r"""Return a text as a regular expression of a grammar.

    >>> pattern("</think>"), pattern("<|a|>")
    ('<\\/think>', '<\\|a\\|>')
    """
    return re.sub(r"[^A-Za-z0-9_<>\n]", lambda match: "\\" + match[0], text).replace("\n", r"\n")


def make_mark(id_of: Callable[[str], int | None]) -> Mark:
    """Return a function that writes marks in a grammar: as tokens if they have one.

    >>> mark = make_mark({"<tool_call>": 7}.get)
    >>> mark("<tool_call>"), mark("functions")
    ('<[7]>', '"functions"')
    """

    def mark(text: str) -> str:
        token_id = id_of(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    return mark


def repeated(element: str, most: int) -> str:
    """Return the rule for the elements after the first.

    >>> repeated('"," call', 3), repeated('"," call', 1)
    (' ("," call){0,2}', '')
    """
    return f" ({element}){{0,{most - 1}}}" if most > 1 else ""


def some_of(items: Sequence[str], needed: Sequence[bool], separator: str, add: Callable[[str], str]) -> str:
    """Return the rule for at least one of the items, in order, with all needed ones; `add` makes a rule, with a name.

    It is made of the rules for the two halves. A chain of rules would be too deep for the compiler.
    """
    if len(items) == 1:
        return items[0]
    half = len(items) // 2
    first = some_of(items[:half], needed[:half], separator, add)
    last = some_of(items[half:], needed[half:], separator, add)
    both = f"{first} {separator} {last}" if any(needed[half:]) else f"{first} ({separator} {last})?"
    return add(both if any(needed[:half]) else f"{both} | {last}")


def arguments_schema(tool: Tool) -> str:
    """Return the rule for a call's arguments. Ignores keywords that cannot be enforced, unless the tool is strict."""
    schema = _without_notes(tool.parameters, keeps_all=tool.strict)
    schema = schema if _adds_up(schema) else _closed(schema)
    schema |= {"type": "object", "x-guidance": {**SEPARATORS, "lenient": not tool.strict}}
    return f"%json {json.dumps(schema)}"


def value_schema(tool: Tool, schema: Any) -> str:
    """Return the rule for one argument with a schema, which may refer to definitions of the tool's schema."""
    named = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    found = _without_notes(named | dict(schema), keeps_all=tool.strict)
    found = found if _adds_up(found) else _closed(found)
    return f"%json {json.dumps({**found, 'x-guidance': {**SEPARATORS, 'lenient': not tool.strict}})}"


def definition(tool: Tool, schema: Any) -> Mapping[str, Any]:
    """Return a schema, or the definition of the tool's schema to which it only refers. Does not mutate."""
    for _ in range(MAX_REFERENCES):
        alone = isinstance(schema, Mapping) and schema.keys() <= NOTES | {"$ref"}
        reference = schema.get("$ref") if alone else None
        place = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", reference) if isinstance(reference, str) else None
        if place is None or place[2] not in tool.parameters.get(place[1], {}):
            break
        schema = tool.parameters[place[1]][place[2]]
    return schema if isinstance(schema, Mapping) else {}


def refused(tool: Tool, allowed: str) -> InvalidRequestError:
    """Return the refusal of a tool's parameters."""
    return InvalidRequestError(tool.place, tool.parameters, allowed)


def _closed(schema: Any) -> Any:
    """Return a schema that allows only named properties in objects where it leaves that open.

    Every value that it allows is also allowed by the original schema. A function has no use for unknown arguments, and
    a small model would keep inventing some. Does not mutate.
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
    """Return whether a schema may define some object's properties in several places. Does not mutate."""
    if isinstance(schema, list):
        return any(map(_adds_up, schema))
    if not isinstance(schema, Mapping):
        return False
    several = "properties" in schema and not schema.keys().isdisjoint(("$ref", "anyOf", "oneOf"))
    return several or "allOf" in schema or any(map(_adds_up, schema.values()))


def _without_notes(schema: Any, *, keeps_all: bool) -> Any:
    """Return a schema without annotations for readers, which would bloat a grammar. Does not mutate.

    Also drops patterns with lookaround or back references, which no automaton supports, unless `keeps_all`.
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
    """Return the rule for free text that ends with a mark, as a token or in letters; needs the rules of `free_text`."""
    opener_rule = mark(opener)
    return "spelled" if opener_rule == literal(opener) else f"(FREE? {opener_rule} | spelled)"


def free_text(opener: str, bare: str = "") -> str:
    """Return the rules of free text. If calls may be bare, no text begins as they do: `bare`, a regular expression."""
    form = rf" & ~/\s*{bare}(.|\n)*/" if bare else ""
    spelled = f"spelled[lazy]: /(.|\\n)*{pattern(opener)}/{form}"
    return "\n".join(["free: FREE?", rf"FREE: /(.|\n)+/{form}", spelled, r"GAP: /[ \n]?/"])
