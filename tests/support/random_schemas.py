"""Random JSON schemas whose texts are all short, and the check of a text against its schema.

A model of random weights writes whatever it may, so a schema must bound everything: lengths of strings and lists,
ranges of numbers, how deep it nests. Whoever holds such a model to a schema gets a text within a few hundred tokens.
The check shares no line with what holds the texts: `json` reads them, `jsonschema` validates them.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import random
import re
import string
import uuid
from collections.abc import Callable
from datetime import date
from typing import Any
from urllib.parse import urlsplit

from jsonschema import Draft202012Validator, FormatChecker

Schema = dict[str, Any]

NAMES = ("id", "name", "kind", "tags", "größe", "a b", 'quo"te', "back\\slash", "line\nbreak", "x", "名", "")
TEXTS = ("yes", "no", "", "a b", 'quo"te', "back\\slash", "tab\t", "é", "名前", "😀", "<|im_end|>", "0")
BOUNDED_FORMATS = ("date", "time", "date-time", "ipv4", "ipv6", "uuid")
FORMATS = (*BOUNDED_FORMATS, "email", "hostname", "duration", "uri")
CLASSES = ("[a-z]", "[0-9]", "[A-F0-9]", r"\d", "[äöü]", "[^\\x00-\\x7f]", "(foo|bar)", "-", "x?")
MAX_DEPTH = 4


class SchemaMaker:
    """Draws schemas from a seed; equal seeds give equal schemas."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)
        self._definitions: dict[str, Schema] = {}

    def schema(self) -> Schema:
        """Return a schema. Mutates."""
        self._definitions = {}
        drawn = self._object(0) if self._random.random() < 0.7 else self._any(0)
        return {**drawn, "$defs": self._definitions} if self._definitions else drawn

    def prompt(self) -> str:
        """Return a prompt. Mutates."""
        letters = string.printable + "äé名😀"
        return "".join(self._random.choices(letters, k=self._random.randint(1, 24)))

    def _any(self, depth: int) -> Schema:
        leaves: list[Callable[[], Schema]] = [
            *(self._integer, self._number, self._multiple, self._text, self._pattern, self._format),
            *(self._enum, self._const, self._mixed, lambda: {"type": "boolean"}, lambda: {"type": "null"}),
        ]
        inner = [self._object, self._array, self._tuple, self._any_of, self._nullable, self._reference]
        inner += [self._all_of, self._one_of, self._dictionary]
        if depth < MAX_DEPTH and self._random.random() < 0.4:
            return self._random.choice(inner)(depth + 1)
        return self._random.choice(leaves)()

    # ---- what has parts -----------------------------------------------------------------------------------------

    def _object(self, depth: int) -> Schema:
        names = self._random.sample(NAMES, self._random.randint(0, 4))
        properties = {name: self._any(depth) for name in names}
        schema: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
        required = [name for name in names if self._random.random() < 0.7]
        if required or self._random.random() < 0.5:
            schema["required"] = self._random.sample(required, len(required))
        return schema

    def _array(self, depth: int) -> Schema:
        least = self._random.randint(0, 2)
        return {
            "type": "array",
            "items": self._any(depth),
            "minItems": least,
            "maxItems": least + self._random.randint(0, 2),
        }

    def _tuple(self, depth: int) -> Schema:
        parts = [self._any(depth) for _ in range(self._random.randint(1, 3))]
        return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}

    def _any_of(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth) for _ in range(self._random.randint(1, 3))]}

    def _nullable(self, _: int) -> Schema:
        drawn = self._random.choice([self._integer, self._text, self._number])()
        return {**drawn, "type": [drawn["type"], "null"]}

    def _all_of(self, depth: int) -> Schema:
        """Return what holds two at once: two ranges that overlap, or an object and what it must have."""
        if self._random.random() < 0.5:
            middle = self._random.randint(-50, 50)
            return {"allOf": [{"type": "integer", "minimum": middle - 5}, {"type": "number", "maximum": middle}]}
        drawn = self._object(depth)
        return {"allOf": [drawn, {"required": list(drawn["properties"])[:1]}]}

    def _one_of(self, _: int) -> Schema:
        return {"oneOf": [self._integer(), self._text(), {"type": "null"}]}

    def _dictionary(self, depth: int) -> Schema:
        pattern = self._random.choice(["^[a-c]{1,2}$", "^(foo|bar)$"])
        return {
            "type": "object",
            "patternProperties": {pattern: self._any(depth)},
            "additionalProperties": False,
            "maxProperties": self._random.randint(1, 3),
        }

    def _reference(self, depth: int) -> Schema:
        """Refer to a definition, an old one or a new one; only a list refers to itself."""
        if not self._definitions or self._random.random() < 0.5:
            drawn = None if self._random.random() < 0.2 else self._any(depth)
            name = f"part{len(self._definitions)}"
            self._definitions[name] = self._list(name) if drawn is None else drawn
        else:
            name = self._random.choice(list(self._definitions))
        return {"$ref": f"#/$defs/{name}"}

    def _list(self, name: str) -> Schema:
        """Return a schema that refers to itself: what it describes has an end all the same."""
        following = {"anyOf": [{"type": "null"}, {"$ref": f"#/$defs/{name}"}]}
        return {
            "type": "object",
            "properties": {"value": self._integer(), "next": following},
            "required": ["value", "next"],
            "additionalProperties": False,
        }

    # ---- what has none ------------------------------------------------------------------------------------------

    def _integer(self) -> Schema:
        least = self._random.randint(-1000, 1000)
        bounds: Schema = {"minimum": least, "maximum": least + self._random.choice([0, 1, 9, 12345])}
        if self._random.random() < 0.2:
            bounds = {"exclusiveMinimum": least, "exclusiveMaximum": least + self._random.randint(2, 99)}
        return {"type": "integer", **bounds}

    def _number(self) -> Schema:
        least = self._random.choice([-10, 0, 0.5, 3, -0.25])
        return {"type": "number", "minimum": least, "maximum": least + self._random.choice([0.5, 1, 100])}

    def _multiple(self) -> Schema:
        step, number = self._random.choice([(7, "integer"), (3, "integer"), (0.25, "number"), (10, "number")])
        return {"type": number, "multipleOf": step, "minimum": -10 * step, "maximum": 100 * step}

    def _mixed(self) -> Schema:
        return {"type": ["string", "integer", "boolean"], "maxLength": 4, "minimum": 0, "maximum": 99}

    def _text(self) -> Schema:
        least = self._random.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + self._random.randint(0, 8)}

    def _pattern(self) -> Schema:
        parts = [
            each if self._random.random() < 0.5 else f"({each}){{{least},{least + 2}}}"
            for each in self._random.choices(CLASSES, k=self._random.randint(1, 3))
            for least in [self._random.randint(0, 2)]
        ]
        if self._random.random() < 0.2:
            return {"type": "string", "pattern": self._random.choice(["[a-c]", "^x", "y$", r"\w\s"]), "maxLength": 6}
        return {"type": "string", "pattern": f"^{''.join(parts)}$"}

    def _format(self) -> Schema:
        name = self._random.choice(FORMATS)
        return {"type": "string", "format": name, **({} if name in BOUNDED_FORMATS else {"maxLength": 24})}

    def _enum(self) -> Schema:
        values: list[Any] = [*TEXTS, 0, -7, 1.5, True, False, None, [1, "a"], {"k": []}]
        return {"enum": self._random.sample(values, self._random.randint(1, 5))}

    def _const(self) -> Schema:
        return {"const": self._random.choice([*TEXTS, 3, -0.5, True, None, [], {"k": [1, {"l": "m"}]}])}


# ---- the check ------------------------------------------------------------------------------------------------------

# Of a date its form is held to, and that the month has such a day: in a leap year, whatever year it says (0000, too).
READERS: dict[str, Callable[[str], object]] = {
    "date": lambda text: date.fromisoformat("2000" + text[4:]),
    "date-time": lambda text: date.fromisoformat("2000" + text[4:10]),
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": urlsplit,
}
CLOCK = r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
FORMS = {
    "date": r"\d{4}-\d\d-\d\d",
    "time": CLOCK,
    "date-time": r"\d{4}-\d\d-\d\d[tT]" + CLOCK,
    "email": r"[^@]+@[^@]+",
    "hostname": r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?)*",
    "duration": r"P(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(\d+H)?(\d+M)?(\d+S)?)?)",
}


def format_checker() -> FormatChecker:
    """Return what knows the formats above, and no others: the package's own need packages of theirs."""
    checker = FormatChecker(formats=())
    for name in FORMATS:
        checker.checks(name, raises=ValueError)(functools.partial(has_form, name))
    return checker


def has_form(name: str, text: object) -> bool:
    """Return whether a value has the form of a format, as all but texts have; raises `ValueError` for some without."""
    if not isinstance(text, str):
        return True
    form, read = FORMS.get(name), READERS.get(name)
    return (form is None or re.fullmatch(form, text) is not None) and (read is None or read(text) is not None)


def failure_of(schema: Schema, text: str) -> str:
    """Return what is wrong with a text that should be JSON of a schema; an empty text where nothing is."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    validator = Draft202012Validator(schema, format_checker=format_checker())
    return "; ".join(error.message for error in validator.iter_errors(value))
