"""Turns a client's constraint on a text, in any form of `schemas/formats.py`, into a `Grammar`.

The engine's door refuses a grammar that does not compile. `Held.field` is the client's name for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.core.validate import MAX_GRAMMAR_BYTES
from quire.serve.errors import ApiError
from quire.serve.schemas.formats import (
    JsonObjectFormat,
    OutputFormat,
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
)
from quire.serve.translate.gbnf import lark_of

KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
_GBNF_RULE: Final = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)  # never backtracks

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Held:
    """The grammar of a text, or None, and the request's field for it; `sent`: the client's text of a grammar."""

    grammar: Grammar | None = None
    field: str = "grammar"
    sent: str = ""


def held_to(
    response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None, grammar: str | None = None
) -> Held:
    """Return the constraint on a chat or completion; raises `InvalidRequestError` if it is not valid. Does not mutate.

    >>> from quire.serve.schemas.formats import JsonSchema, JsonSchemaFormat
    >>> held_to(JsonSchemaFormat(JsonSchema("age", {"type": "integer"})), None).field
    'response_format.json_schema.schema'
    >>> held_to(TextFormat(), None).grammar is None
    True
    """
    if grammar:
        for name, other in (("response_format", response_format), ("structured_outputs", structured_outputs)):
            if other is not None and not isinstance(other, TextFormat):
                raise InvalidRequestError("grammar", grammar, f"none, because {name} is set")
        return held_to_grammar(grammar, "grammar")
    if response_format is None or isinstance(response_format, TextFormat):
        return Held() if structured_outputs is None else _structured(structured_outputs)
    if structured_outputs is not None:
        raise InvalidRequestError(
            "structured_outputs", _given(structured_outputs), "none, because response_format is set"
        )
    given = response_format.schema
    if isinstance(response_format, JsonObjectFormat):
        return held_to_schema(given, "response_format" if given is None else "response_format.schema")
    if response_format.json_schema is None:
        if given is None:
            name = "response_format.json_schema"
            raise ApiError(400, f"{name} is required", code="missing_required_parameter", param=name)
        return held_to_schema(given, "response_format.schema")
    if given is not None:
        raise InvalidRequestError("response_format.schema", given, "none, because response_format.json_schema is set")
    return held_to_schema(response_format.json_schema.schema, "response_format.json_schema.schema")


def response_held_to(wanted: OutputFormat) -> Held:
    """Return the constraint on a response; raises `InvalidRequestError` if it is not valid. Does not mutate."""
    if isinstance(wanted, TextFormat):
        return Held()
    if isinstance(wanted, JsonObjectFormat):
        return held_to_schema(wanted.schema, "text.format" if wanted.schema is None else "text.format.schema")
    return held_to_schema(wanted.schema, "text.format.schema")


def _structured(wanted: StructuredOutputs) -> Held:
    given = _given(wanted)
    if len(given) != 1:
        raise InvalidRequestError("structured_outputs", given, f"exactly one of {', '.join(KINDS)}")
    field = f"structured_outputs.{given[0]}"
    if wanted.json is not None:
        return held_to_schema(_read_schema(wanted.json, field), field)
    if wanted.choice is not None:
        return _held(Grammar.choice, wanted.choice, field)
    if wanted.regex is not None:
        return Held(Grammar.regex(wanted.regex), field)
    if wanted.grammar is None:
        return Held(Grammar.json_object(), field)
    return held_to_grammar(wanted.grammar, field)


def held_to_grammar(text: str, field: str) -> Held:
    """Return the constraint of a client's grammar, in Lark or GBNF, which its rules tell apart. Does not mutate.

    >>> held_to_grammar('root ::= "a"', "grammar").grammar.text
    'start: /a/'
    """
    return Held(Grammar.lark(lark_of(text, field) if _GBNF_RULE.search(text) else text), field, text)


def _given(wanted: StructuredOutputs) -> list[str]:
    return [kind for kind in KINDS if getattr(wanted, kind) not in (None, False)]


def held_to_schema(schema: dict[str, Any] | None, field: str) -> Held:
    """Return the constraint for a schema, or for any JSON object if None; `field` is the client's name for it."""
    return Held(Grammar.json_object(), field) if schema is None else _held(Grammar.json_schema, schema, field)


def _held(make: Callable[[Value], Grammar], value: Value, field: str) -> Held:
    """Return the constraint that `make` returns for a value; an error names the client's field."""
    try:
        return Held(make(value), field)
    except InvalidRequestError as error:
        raise InvalidRequestError(field, error.value, error.allowed) from None


def _read_schema(schema: dict[str, Any] | str, field: str) -> dict[str, Any]:
    """Return a schema given as an object or as text, parsed here so that text that is not JSON is refused."""
    if isinstance(schema, dict):
        return schema
    if len(schema) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(field, f"{len(schema)} characters", f"at most {MAX_GRAMMAR_BYTES} bytes of text")
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InvalidRequestError(field, schema, "a JSON schema: an object, or the text of one")
    return found
