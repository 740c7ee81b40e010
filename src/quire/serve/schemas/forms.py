"""Schemas of prompts, messages, tools and calls, for the OpenAPI document. Requests are checked elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

Schema = dict[str, Any]

MAX_TOOLS: Final = 128

OBJECT: Final[Schema] = {"type": "object"}
STRING: Final[Schema] = {"type": "string"}
JSON_TEXT: Final[Schema] = {"type": "string", "contentMediaType": "application/json"}
TEXT: Final[Schema] = {"type": "string", "minLength": 1}
NULL: Final[Schema] = {"type": "null"}


def any_of(*forms: Schema) -> Schema:
    """Return the schema of a value that has one of these forms."""
    return {"anyOf": list(forms)}


def list_of(items: Schema, **limits: int) -> Schema:
    """Return the schema of a list, with limits of its length."""
    return {"type": "array", **limits, "items": items}


def object_of(properties: Schema, required: Sequence[str] | None = None) -> Schema:
    """Return the schema of an object. By default, all properties are required."""
    return {"type": "object", "properties": properties, "required": list(properties if required is None else required)}


def tagged(kind: str, properties: Schema, required: Sequence[str] | None = None) -> Schema:
    """Return the schema of an object with this `type`."""
    return object_of({"type": {"const": kind}, **properties}, required)


def message(role: Schema, part: Schema) -> Schema:
    """Return the schema of a message: a text, or parts."""
    return object_of({"role": role, "content": any_of(STRING, list_of(part))})


# prompts
TOKEN_IDS: Final = list_of({"type": "integer", "minimum": 0}, minItems=1)
ONE_PROMPT: Final = any_of(TEXT, TOKEN_IDS, *(list_of(each, minItems=1, maxItems=1) for each in (TEXT, TOKEN_IDS)))
PROMPT: Final[Schema] = {
    "description": "A text, token ids, or a list of either.",
    **any_of(TEXT, TOKEN_IDS, list_of(TEXT, minItems=1), list_of(TOKEN_IDS, minItems=1)),
}

# tools
TOOL_NAME: Final[Schema] = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"}
TOOL: Final[Schema] = {
    "name": TOOL_NAME,
    "description": {"type": ["string", "null"]},
    "parameters": {"type": ["object", "null"], "description": "A JSON Schema of an object."},
    "strict": {"type": ["boolean", "null"]},
}
CHAT_TOOL: Final = tagged("function", {"function": object_of(TOOL, ["name"])})
FUNCTION: Final = tagged("function", TOOL, ["type", "name"])
NAMESPACE: Final[Schema] = {
    "name": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,16}$"},
    "tools": list_of(FUNCTION, minItems=1, maxItems=8),
}
SEARCH: Final = {"description": "Accepted next to functions, and left out.", **tagged("web_search", {})}
RESPONSE_TOOL: Final = any_of(FUNCTION, tagged("namespace", NAMESPACE), SEARCH)
MESSAGES_TOOL: Final[Schema] = {
    "type": {"enum": ["custom", None]},
    "name": TOOL_NAME,
    "description": {"type": ["string", "null"]},
    "input_schema": {"type": "object", "description": "A JSON Schema of an object."},
    "strict": {"type": ["boolean", "null"]},
}


def tools(tool: Schema, name: Schema) -> Schema:
    """Return the schemas of OpenAI's fields for tools; `name`: the properties that name a function."""
    choice = any_of({"enum": ["none", "auto", "required", None]}, tagged("function", name))
    return {"tools": any_of(list_of(tool, maxItems=MAX_TOOLS), NULL), "tool_choice": choice}


# conversations of OpenAI: a model's chat template decides which roles and orders it accepts
ROLE: Final[Schema] = {"enum": ["system", "developer", "user", "assistant"]}
CALL: Final = tagged(
    "function", {"id": STRING, "function": object_of({"name": STRING, "arguments": JSON_TEXT})}, ["function"]
)
CHAT_MESSAGE: Final = any_of(
    message(ROLE, tagged("text", {"text": STRING})),
    object_of(
        {"role": {"const": "assistant"}, "tool_calls": list_of(CALL), "content": any_of(STRING, NULL)},
        ["role"],
    ),
    object_of({"role": {"const": "tool"}, "tool_call_id": TEXT, "content": STRING}),
)
ITEMS: Final = (
    message(ROLE, tagged("input_text", {"text": STRING})),
    tagged("function_call", {"call_id": TEXT, "name": TEXT, "arguments": JSON_TEXT}),
    tagged("function_call_output", {"call_id": TEXT, "output": STRING}),
    tagged("reasoning", {"content": list_of(tagged("reasoning_text", {"text": STRING}))}),
)
RESPONSE_ITEM: Final = any_of(*(item | {"additionalProperties": False} for item in ITEMS))

# conversations of Anthropic
BLOCK: Final = tagged("text", {"text": STRING})
RESULT: Final = list_of(any_of(BLOCK, tagged("tool_reference", {"tool_name": TEXT})))
RESULTS: Final = tagged(
    "tool_result", {"tool_use_id": TEXT, "content": any_of(STRING, NULL, RESULT)}, ["type", "tool_use_id"]
)
THOUGHTS: Final = (tagged("thinking", {"thinking": STRING}), tagged("redacted_thinking", {}))
USE: Final = tagged("tool_use", {"id": TEXT, "name": TEXT, "input": OBJECT})
MESSAGE: Final = any_of(
    message({"const": "user"}, any_of(BLOCK, RESULTS)),
    message({"const": "assistant"}, any_of(BLOCK, *THOUGHTS, USE)),
    message({"const": "system"}, any_of(BLOCK)),
)
CONVERSATION: Final[Schema] = {
    "messages": list_of(MESSAGE, minItems=1)
    | {"description": "Ends with a message of the user. A tool_result follows its tool_use."},
    "system": any_of(STRING, NULL, list_of(BLOCK)),
    "tools": any_of(list_of(object_of(MESSAGES_TOOL, ["name", "input_schema"])), NULL),
}

FORMS: Final[dict[str, Schema]] = {
    "CompletionRequest": {"prompt": PROMPT},
    "CacheWarmRequest": {"prompt": PROMPT},
    "CacheExportRequest": {"prompt": PROMPT},
    "EmbeddingRequest": {"input": PROMPT},
    "LlamaCompletionRequest": {"prompt": ONE_PROMPT},
    "ChatRequest": {
        "messages": list_of(CHAT_MESSAGE, minItems=1, maxItems=4096),
        **tools(CHAT_TOOL, {"function": object_of({"name": TOOL_NAME})}),
    },
    "ResponseRequest": {
        "input": any_of(STRING, list_of(RESPONSE_ITEM, minItems=1, maxItems=4096)),
        **tools(RESPONSE_TOOL, {"name": TOOL_NAME}),
    },
    "CountTokensRequest": CONVERSATION,
    "MessagesRequest": CONVERSATION,
}
"""Requests by name → the schemas of their fields that a struct cannot express."""
