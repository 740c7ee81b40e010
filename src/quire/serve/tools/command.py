"""Command R7B and Command A: marks around reasoning, answer and calls; a call has a number, and its own keys.

    <|START_THINKING|>Rome, then.<|END_THINKING|><|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}
    ]<|END_ACTION|>
    <|START_RESPONSE|>It is 19 degrees.<|END_RESPONSE|>

The template shows the reasoning before a call from the field `tool_plan` of a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.serve.tools.base import Conversation, Message
from quire.serve.tools.json_calls import CallShape
from quire.serve.tools.json_format import JsonFormat
from quire.serve.tools.template_format import with_all_fields

SHAPE: Final = CallShape(
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    key="parameters",
    is_list=True,
    separator=",\n    ",
    id_key="tool_call_id",
    name_key="tool_name",
    brackets=("[\n    ", "\n]"),
)


def _with_plans(messages: Sequence[Message], tools: Sequence[Message] | None) -> Conversation:
    return [_with_plan(message) for message in messages], with_all_fields(tools)


def _with_plan(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    return {"tool_plan": message.get("reasoning_content") or message.get("content", ""), **message}


COMMAND: Final = JsonFormat("command", SHAPE, signs=("<|START_ACTION|>", "tool_name"), adapt=_with_plans)
