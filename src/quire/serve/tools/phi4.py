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
from quire.serve.tools.template_format import with_calls_as_text

SHAPE: Final = CallShape("<|tool_call|>", "<|/tool_call|>", is_list=True)
SYSTEM: Final = "You are a helpful assistant with some tools."


def _with_tools_as_text(messages: Sequence[Message], tools: Sequence[Message] | None) -> Conversation:
    """Put the tools into the system message, and write calls as text."""
    found = [with_calls_as_text(message, SHAPE, call_as_text) for message in messages]
    if tools:
        if found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": SYSTEM})
        found[0] = {**found[0], "tools": _json([tool["function"] for tool in tools])}
    return found, None


def call_as_text(function: Mapping[str, Any]) -> str:
    """Return a call as the model writes it."""
    return f'{{"name": {_json(function["name"])}, "arguments": {_json(function["arguments"])}}}'


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


PHI4: Final = JsonFormat("phi4", SHAPE, signs=("<|tool|>", "'tools' in message"), adapt=_with_tools_as_text)
