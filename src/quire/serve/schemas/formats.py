"""What a client may hold a text to, in OpenAI's words and in vLLM's.

    chat, completions   response_format      {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}
                        structured_outputs   {"json": {…}}, {"regex": …}, {"choice": […]}, {"grammar": …}
    responses           text.format          {"type": "json_schema", "name": …, "schema": {…}}

`strict` is read and changes nothing: a text that is held to a schema is held to it.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.core.validate import MAX_NAME_LENGTH

SchemaName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]


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

    `json` is a schema, or its text; `grammar` is written in Lark, as llguidance reads it, or in GBNF.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
