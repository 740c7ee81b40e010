"""Schemas of tools, calls and their results, for the OpenAPI document. Requests are checked elsewhere."""

from __future__ import annotations

from typing import Any, Final

Schema = dict[str, Any]

MAX_TOOLS: Final = 128


def chat_tools() -> Schema:
    """Return the schema of chat's tools."""
    return _tools(_object({"type": {"const": "function"}, "function": _object(_function(), ["name"])}))


def response_tools() -> Schema:
    """Return the schema of the tools of responses."""
    function = _object({"type": {"const": "function"}, **_function()}, ["type", "name"])
    members = {"type": "array", "minItems": 1, "maxItems": 8, "items": function}
    short = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,16}$"}
    namespace = _object({"type": {"const": "namespace"}, "name": short, "tools": members})
    search = {"description": "Accepted next to functions, and left out.", **_object({"type": {"const": "web_search"}})}
    return _tools({"anyOf": [function, namespace, search]})


def tool_choice(*path: str) -> Schema:
    """Return the schema of a tool choice; `path` leads to the name of a function."""
    named: Schema = {"name": _name()}
    for key in path:
        named = {key: _object(named)}
    forced = _object({"type": {"const": "function"}, **named})
    return {"anyOf": [{"enum": ["none", "auto", "required", None]}, forced]}


def tool_messages() -> list[Schema]:
    """Return the schemas of the messages that occur only in chats with tools."""
    function = _object({"name": {"type": "string"}, "arguments": _arguments()})
    call = _object({"id": {"type": "string"}, "type": {"const": "function"}, "function": function}, ["function"])
    calls = {"type": "array", "minItems": 1, "items": call}
    content = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    return [
        _object({"role": {"const": "assistant"}, "tool_calls": calls, "content": content}, ["role", "tool_calls"]),
        _object({"role": {"const": "tool"}, "tool_call_id": _text(), "content": {"type": "string"}}),
    ]


def tool_items() -> list[Schema]:
    """Return the schemas of the items that occur only in responses with tools or reasoning."""
    part = _object({"type": {"const": "reasoning_text"}, "text": {"type": "string"}})
    thought = {"type": "array", "items": part}
    call = {"call_id": _text(), "name": _text(), "arguments": _arguments()}
    items = [
        _object({"type": {"const": "function_call"}, **call}),
        _object({"type": {"const": "function_call_output"}, "call_id": _text(), "output": {"type": "string"}}),
        _object({"type": {"const": "reasoning"}, "content": thought}),
    ]
    return [item | {"additionalProperties": False} for item in items]


def _tools(item: Schema) -> Schema:
    return {"anyOf": [{"type": "array", "maxItems": MAX_TOOLS, "items": item}, {"type": "null"}]}


def _function() -> Schema:
    return {
        "name": _name(),
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"], "description": "A JSON Schema of an object."},
        "strict": {"type": ["boolean", "null"]},
    }


def _name() -> Schema:
    return {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}


def _text() -> Schema:
    return {"type": "string", "minLength": 1}


def _arguments() -> Schema:
    return {"type": "string", "contentMediaType": "application/json"}


def _object(properties: Schema, required: list[str] | None = None) -> Schema:
    return {"type": "object", "properties": properties, "required": required or list(properties)}
