"""Phi-4-mini: calls are a list between two marks, and its template reads the tools from the system message.

    <|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}}]<|/tool_call|>

The template supports neither calls nor tool results. An earlier call is shown as its original text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire.serve.tools.base import Conversation, Message
from quire.serve.tools.json_calls import CallShape
from quire.serve.tools.json_format import JsonFormat

SHAPE: Final = CallShape("<|tool_call|>", "<|/tool_call|>", is_list=True)
SYSTEM: Final = "You are a helpful assistant with some tools."


def _with_tools_as_text(messages: Sequence[Message], tools: Sequence[Message] | None) -> Conversation:
    """Put the tools into the system message, and write calls as text."""
    found = [with_calls_as_text(message, SHAPE) for message in messages]
    if tools:
        if found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": SYSTEM})
        found[0] = {**found[0], "tools": _json([tool["function"] for tool in tools])}
    return found, None


def with_calls_as_text(message: Message, shape: CallShape) -> Message:
    """Return a message with its calls in its content, as the model wrote them. Does not mutate."""
    calls = [_call_as_text(call["function"]) for call in message.get("tool_calls", [])]
    if not calls:
        return message
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": f"{message.get('content', '')}{shape.opener}[{', '.join(calls)}]{shape.closer}"}


def _call_as_text(function: Mapping[str, Any]) -> str:
    return f'{{"name": {_json(function["name"])}, "arguments": {_json(function["arguments"])}}}'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


PHI4: Final = JsonFormat("phi4", SHAPE, signs=("<|tool|>", "'tools' in message"), adapt=_with_tools_as_text)
