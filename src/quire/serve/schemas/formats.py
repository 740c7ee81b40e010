"""What a client may hold a text to, in OpenAI's words and in vLLM's, and the step from there to a `Grammar`.

    chat, completions   response_format      {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}
                        structured_outputs   {"json": {…}}, {"regex": …}, {"choice": […]}, {"grammar": …}
    responses           text.format          {"type": "json_schema", "name": …, "schema": {…}}

All of them become one value, so nothing behind this file knows which words were used. `strict` is read and changes
nothing: a text that is held to a schema is held to it. What cannot be compiled is found out at the engine's door, and
refused there under the name that `Held.field` remembers: the client's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.core.validate import MAX_GRAMMAR_BYTES, MAX_NAME_LENGTH

SchemaName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
_GBNF_RULE: Final = re.compile(r"^[ \t]*+[\w-]++[ \t]*+::=", re.MULTILINE)  # goes back nowhere

Value = TypeVar("Value")


class TextFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_object"):
    """Some JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema with its name. Without the schema itself: some JSON object."""

    name: SchemaName
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON of a schema, as chat names it."""

    json_schema: JsonSchema


class NamedSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON of a schema, as responses name it."""

    name: SchemaName
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
OutputFormat = TextFormat | JsonObjectFormat | NamedSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a text is held to, as vLLM names it: exactly one of these.

    `json` is a schema, or its text; `grammar` is written in Lark, as llguidance reads it.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True, slots=True)
class Held:
    """What a text is held to (None: nothing), and where the request says so."""

    grammar: Grammar | None = None
    field: str = "grammar"


def held_to(response_format: ResponseFormat | None, structured_outputs: StructuredOutputs | None) -> Held:
    """Return what a chat or a completion is held to; raises `InvalidRequestError` for what is none. Does not mutate.

    >>> held_to(JsonSchemaFormat(JsonSchema("age", {"type": "integer"})), None).field
    'response_format.json_schema.schema'
    >>> held_to(TextFormat(), None).grammar is None
    True
    """
    if response_format is None or isinstance(response_format, TextFormat):
        return Held() if structured_outputs is None else _structured(structured_outputs)
    if structured_outputs is not None:
        raise InvalidRequestError(
            "structured_outputs", _given(structured_outputs), "none, because response_format is set"
        )
    if isinstance(response_format, JsonObjectFormat):
        return Held(Grammar.json_object(), "response_format")
    return _schema(response_format.json_schema.schema, "response_format.json_schema.schema")


def response_held_to(wanted: OutputFormat) -> Held:
    """Return what a response is held to; raises `InvalidRequestError` for what is none. Does not mutate."""
    if isinstance(wanted, TextFormat):
        return Held()
    if isinstance(wanted, JsonObjectFormat):
        return Held(Grammar.json_object(), "text.format")
    return _schema(wanted.schema, "text.format.schema")


def _structured(wanted: StructuredOutputs) -> Held:
    given = _given(wanted)
    if len(given) != 1:
        raise InvalidRequestError("structured_outputs", given, f"exactly one of {', '.join(KINDS)}")
    field = f"structured_outputs.{given[0]}"
    if wanted.json is not None:
        return _schema(_read_schema(wanted.json, field), field)
    if wanted.choice is not None:
        return _held(Grammar.choice, wanted.choice, field)
    if wanted.regex is not None:
        return Held(Grammar.regex(wanted.regex), field)
    if wanted.grammar is None:
        return Held(Grammar.json_object(), field)
    if _GBNF_RULE.search(wanted.grammar):
        raise InvalidRequestError(field, wanted.grammar, 'a grammar in Lark, of rules like start: "a", not in GBNF')
    return Held(Grammar.lark(wanted.grammar), field)


def _given(wanted: StructuredOutputs) -> list[str]:
    return [kind for kind in KINDS if getattr(wanted, kind) not in (None, False)]


def _schema(schema: dict[str, Any] | None, field: str) -> Held:
    return Held(Grammar.json_object(), field) if schema is None else _held(Grammar.json_schema, schema, field)


def _held(make: Callable[[Value], Grammar], value: Value, field: str) -> Held:
    """Return what a value of the request makes; raises under the client's name for it."""
    try:
        return Held(make(value), field)
    except InvalidRequestError as error:
        raise InvalidRequestError(field, error.value, error.allowed) from None


def _read_schema(schema: dict[str, Any] | str, field: str) -> dict[str, Any]:
    """Return a schema that may have come as its text; a reader of the text itself would miss what is no JSON."""
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
