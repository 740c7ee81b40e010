"""Granite 3.1 to 3.3: calls are a list after one mark, and the template does not show earlier calls.

    <|tool_call|>[{"name": "add", "arguments": {"a": 1, "b": 2}}]

An earlier call is shown as its original text. Granite 3.0 has the same calls, but its template leaves out results;
Granite 4 writes calls as Hermes does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.serve.tools.base import Conversation, Message
from quire.serve.tools.json_calls import CallShape
from quire.serve.tools.json_format import JsonFormat
from quire.serve.tools.phi4 import call_as_text
from quire.serve.tools.template_format import with_all_fields, with_calls_as_text

SHAPE: Final = CallShape("<|tool_call|>", is_list=True)


def _with_calls_as_text(messages: Sequence[Message], tools: Sequence[Message] | None) -> Conversation:
    return [with_calls_as_text(message, SHAPE, call_as_text) for message in messages], with_all_fields(tools)


GRANITE: Final = JsonFormat(
    "granite",
    SHAPE,
    signs=("<|tool_call|>", "<|start_of_role|>"),
    others=("assistant_tool_call",),
    adapt=_with_calls_as_text,
)
