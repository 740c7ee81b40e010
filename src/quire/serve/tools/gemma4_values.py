r"""The values in calls of Gemma 4, as rules of a grammar: JSON with bare keys, and with a token around each text.

    {"days": [1, 2], "city": "Rome"}    is written    {city:<|"|>Rome<|"|>,days:[1,2]}

The keys of an object come in alphabetical order, as in the tools and calls that the template shows. Each part of a
schema becomes a rule, and a definition that refers to itself a recursive one. Numbers follow their schema exactly; a
text is free, or one of a list. A strict tool with other rules is refused; otherwise these are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from quire.serve.tools.base import Mark, Tool
from quire.serve.tools.bracket_calls import MAX_KEY_LENGTH
from quire.serve.tools.rules import NOTES, SEPARATORS, definition, literal, pattern, refused, some_of

QUOTE: Final = '<|"|>'
MAX_COUNT: Final = 1 << 20
NOT_IN_KEYS: Final = frozenset(':,{}[]<>"\n')
_NOT: Final = r':,{}\[\]<>"\n'
KEY_PATTERN: Final = rf"[^\s{_NOT}]([^{_NOT}]{{0,{MAX_KEY_LENGTH - 2}}}[^\s{_NOT}])?"
KEY: Final = re.compile(KEY_PATTERN)
OF_NUMBERS: Final = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
OF_TYPES: Final[Mapping[str, frozenset[str]]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "number": OF_NUMBERS,
    "integer": OF_NUMBERS,
}
"""The keywords of a type that a rule can follow."""

PYTHON_TYPES: Final[Mapping[object, Any]] = {
    **{"string": str, "number": (int, float), "integer": int, "boolean": bool},
    **{"null": type(None), "object": dict, "array": list},
}


def shared_rules(mark: Mark) -> str:
    """Return the rules `value` for any value, and `text`."""
    quote = mark(QUOTE)
    if quote == literal(QUOTE):
        text = [f"text: {quote} rest_of_text", f"rest_of_text[lazy]: /(.|\\n)*{pattern(QUOTE)}/"]
    else:  # a text that spells out the mark would end there
        text = [f"text: {quote} TEXT? {quote}", rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{pattern(QUOTE)}(.|\n)*/"]
    types = {"type": ["number", "boolean", "null"], "x-guidance": SEPARATORS}
    rules = [
        "value: text | plain | list | object",
        f"plain: %json {json.dumps(types)}",
        'list: "[" (value ("," value)*)? "]"',
        'object: "{" (pair ("," pair)*)? "}"',
        'pair: KEY ":" value',
        f"KEY: /{KEY_PATTERN}/",
    ]
    return "\n".join([*text, *rules])


def arguments_rules(index: int, tool: Tool, mark: Mark) -> str:
    """Return the rule `arguments_INDEX` for all arguments of a tool, and those for their parts."""
    rules = _Rules(f"arguments_{index}", tool, mark)
    rules.add_arguments()
    return "\n".join(rules.lines)


class _Rules:
    """Makes the rules for the arguments of one tool. Mutable."""

    def __init__(self, name: str, tool: Tool, mark: Mark) -> None:
        self.lines: list[str] = []
        self._name = name
        self._num_names = 0
        self._tool = tool
        self._mark = mark
        self._definitions: dict[str, str] = {}

    def add_arguments(self) -> None:
        schema: Any = definition(self._tool, self._tool.parameters)
        self._skip(schema, OF_TYPES["object"])
        self.lines.append(f"{self._name}: {self._object(schema)}")

    def _add(self, body: str) -> str:
        """Add a rule; return its name."""
        name = self._new_name()
        self.lines.append(f"{name}: {body}")
        return name

    def _new_name(self) -> str:
        self._num_names += 1
        return f"{self._name}_{self._num_names}"

    def _skip(self, schema: Mapping[str, Any], known: Iterable[str]) -> None:
        """Pass over the keywords that no rule follows; raises if the tool is strict."""
        others = sorted(schema.keys() - NOTES - {"type", "$defs", "definitions", *known})
        if others and self._tool.strict:
            raise refused(self._tool, f"a schema without {others[0]}, which the calls of this model cannot follow")

    def _value(self, schema: Any) -> str:
        """Return the rule for a value."""
        if not isinstance(schema, Mapping) or not schema.keys() - NOTES:
            return "value"
        if isinstance(schema.get("$ref"), str):
            return self._reference(schema)
        if "enum" in schema or "const" in schema:
            return self._one_of(schema)
        for key in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(key)
            if not isinstance(parts, list) or schema.keys() - NOTES != {key}:
                continue
            if key == "anyOf" or len(parts) == 1 or (key == "oneOf" and not self._tool.strict):
                return self._either([self._value(part) for part in parts if part is not False])
        return self._typed(schema)

    def _either(self, rules: Sequence[str]) -> str:
        if not rules:
            raise refused(self._tool, "a schema that at least one value follows")
        return rules[0] if len(rules) == 1 else self._add(" | ".join(dict.fromkeys(rules)))

    def _reference(self, schema: Mapping[str, Any]) -> str:
        reference = schema["$ref"]
        found = definition(self._tool, {"$ref": reference})
        if found.keys() == {"$ref"}:
            self._skip(schema, ())
            return "value"
        self._skip(schema, ("$ref",))
        if reference not in self._definitions:
            name = self._definitions[reference] = self._new_name()
            self.lines.append(f"{name}: {self._value(found)}")
        return self._definitions[reference]

    def _one_of(self, schema: Mapping[str, Any]) -> str:
        """Return the rule for the values of a list."""
        self._skip(schema, ("enum", "const"))
        values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]
        types = _types(schema)
        return self._either([self._add(self._constant(each)) for each in values if not types or _has_type(each, types)])

    def _constant(self, value: Any) -> str:
        parts = self._written(value).split(QUOTE)
        return f" {self._mark(QUOTE)} ".join(literal(part) if part else "" for part in parts).strip()

    def _written(self, value: Any) -> str:
        """Return a value as the model writes it."""
        if isinstance(value, str):
            if QUOTE in value:
                raise refused(self._tool, f"texts without {QUOTE!r}, which ends a text in the calls of this model")
            return f"{QUOTE}{value}{QUOTE}"
        if isinstance(value, Mapping):
            pairs = (f"{self._key(key)}:{self._written(value[key])}" for key in in_order(value))
            return f"{{{','.join(pairs)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._written, value))}]"
        return json.dumps(value)

    def _typed(self, schema: Mapping[str, Any]) -> str:
        types = _types(schema)
        if not types:  # a schema that has keywords of a type is one for this type
            types = [kind for kind in ("object", "array") if schema.keys() & OF_TYPES[kind]]
        self._skip(schema, (key for kind in types for key in OF_TYPES.get(kind, ())))
        rules = []
        for kind in types:
            if kind == "string":
                rules.append("text")
            elif kind == "object":
                rules.append(self._add(self._object(schema)))
            elif kind == "array":
                rules.append(self._add(self._list(schema)))
            elif kind in PYTHON_TYPES:
                numbers = {key: schema[key] for key in schema.keys() & OF_TYPES.get(kind, frozenset())}
                guidance = {**SEPARATORS, "lenient": not self._tool.strict}
                rules.append(self._add(f"%json {json.dumps({'type': kind, **numbers, 'x-guidance': guidance})}"))
            else:
                raise refused(self._tool, f"types of JSON, not {kind!r:.80}")
        return self._either(rules) if types else "value"

    def _list(self, schema: Mapping[str, Any]) -> str:
        least, most = _count(schema.get("minItems")) or 0, _count(schema.get("maxItems"))
        items = True if "prefixItems" in schema else schema.get("items")
        most = 0 if items is False else most
        if most is not None and most < least:
            raise refused(self._tool, "lists whose maxItems is not less than minItems")
        if most == 0:
            return '"[" "]"'
        item = self._value(items)
        more = item if most == 1 else f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {more} "]"' if least else f'"[" ({more})? "]"'

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Return the rule for an object: some of the keys, all required ones, and others if they are allowed."""
        properties, needed = schema.get("properties", {}), schema.get("required", [])
        properties = properties if isinstance(properties, Mapping) else {}
        needed = [key for key in needed if isinstance(key, str)] if isinstance(needed, list) else []
        named = {key: each for key, each in properties.items() if each is not False}
        named = dict.fromkeys(needed, True) | named
        others = schema.get("additionalProperties", "properties" not in schema)
        other = self._other(named, others) if others is not False else ""
        alternatives = []
        if named:
            keys = in_order(named)
            items = [f"{literal(self._key(key) + ':')} {self._value(named[key])}" for key in keys]
            alternatives.append(some_of(items, [key in needed for key in keys], '","', self._add))
        if other:
            alternatives = [f'{each} ("," {other})*' for each in (*alternatives, other)]
        if named.keys().isdisjoint(needed):
            alternatives.append(literal(""))
        elif other:
            alternatives.pop()
        return f'"{{" ({" | ".join(alternatives)}) "}}"'

    def _other(self, named: Iterable[str], schema: Any) -> str:
        """Return the rule for a key that is none of those with a name, and its value."""
        keys = "|".join(map(pattern, named))
        name = self._new_name()
        if keys:
            self.lines.append(f"{name.upper()}: /{KEY_PATTERN}/ & ~/({keys})/")
        return self._add(f'{name.upper() if keys else "KEY"} ":" {self._value(schema)}')

    def _key(self, key: str) -> str:
        if not KEY.fullmatch(key):
            raise refused(self._tool, f"names of parameters that this model's calls can have, not {key!r:.80}")
        return key


def in_order(keys: Iterable[str]) -> list[str]:
    """Return keys in the order of the template, that of Jinja's `dictsort`.

    >>> in_order(["b", "C", "a"])
    ['a', 'b', 'C']
    """
    return sorted(keys, key=str.lower)


def _types(schema: Mapping[str, Any]) -> list[str]:
    types = schema.get("type", [])
    return [str(each) for each in types] if isinstance(types, list) else [str(types)]


def _has_type(value: Any, types: Iterable[str]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    return any(isinstance(value, PYTHON_TYPES.get(each, ())) for each in types)


def _count(value: Any) -> int | None:
    """Return a limit of a list's length; None if it is none, or larger than any answer."""
    return value if isinstance(value, int) and 0 <= value <= MAX_COUNT else None
