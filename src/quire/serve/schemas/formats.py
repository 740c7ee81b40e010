"""Constraints on a text that a client can set, in OpenAI's and vLLM's forms.

    chat, completions   response_format      {"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}
                                             {"type": "json_schema", "schema": {…}}, as for llama-server
                        structured_outputs   {"json": {…}}, {"regex": …}, {"choice": […]}, {"grammar": …}
    responses           text.format          {"type": "json_schema", "name": …, "schema": {…}}

`strict` is accepted and changes nothing: a schema is always enforced.
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
    """Any JSON object, or one that follows a schema."""

    schema: dict[str, Any] | None = None


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A schema with its name. Without a schema: any JSON object."""

    name: SchemaName
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that follows a schema, in chat's form or in llama-server's: exactly one of these."""

    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None


class NamedSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that follows a schema, in the form of responses."""

    name: SchemaName
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat
OutputFormat = TextFormat | JsonObjectFormat | NamedSchemaFormat


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constraint on a text, in vLLM's form: exactly one of these.

    `json` is a schema, or its text; `grammar` is written in llguidance's Lark, or in GBNF.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
