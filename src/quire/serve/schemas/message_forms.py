"""Schemas of the messages and tools of /v1/messages, for the OpenAPI document. Requests are checked elsewhere."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

STRING: Final[Schema] = {"type": "string"}
NAME: Final[Schema] = {"type": "string", "minLength": 1}


def message_list() -> Schema:
    """Return the schema of a conversation."""
    part = {"anyOf": [_text(), _block("tool_reference", {"tool_name": NAME})]}
    result = {"tool_use_id": NAME, "content": {"anyOf": [STRING, {"type": "null"}, _list(part)]}}
    user = _message("user", [_text(), _block("tool_result", result, ["tool_use_id"])])
    call = _block("tool_use", {"id": NAME, "name": NAME, "input": {"type": "object"}})
    thought = _block("thinking", {"thinking": STRING})
    assistant = _message("assistant", [_text(), thought, _block("redacted_thinking", {}), call])
    return {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [user, assistant, _message("system", [_text()])]},
        "description": "Ends with a message of the user. A tool_result follows its tool_use.",
    }


def system_prompt() -> Schema:
    """Return the schema of a system prompt."""
    return {"anyOf": [STRING, {"type": "null"}, _list(_text())]}


def tool_list() -> Schema:
    """Return the schema of tools."""
    properties = {
        "type": {"enum": ["custom", None]},
        "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"},
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object", "description": "A JSON Schema of an object."},
        "strict": {"type": ["boolean", "null"]},
    }
    tool = {"type": "object", "required": ["name", "input_schema"], "properties": properties}
    return {"anyOf": [_list(tool), {"type": "null"}]}


def _message(role: str, blocks: list[Schema]) -> Schema:
    content = {"anyOf": [STRING, _list({"anyOf": blocks})]}
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {"role": {"const": role}, "content": content},
    }


def _text() -> Schema:
    return _block("text", {"text": STRING})


def _block(kind: str, properties: Schema, required: list[str] | None = None) -> Schema:
    names = ["type", *(properties if required is None else required)]
    return {"type": "object", "required": names, "properties": {"type": {"const": kind}, **properties}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}
