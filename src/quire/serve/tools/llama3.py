"""Llama 3.1, 3.2 and 3.3: the whole answer is the call, with or without a leading mark.

    {"name": "add", "parameters": {"a": 1, "b": 2}}
    <|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}

These models were trained on one call at a time. A semicolon separates several calls, as in other servers, but the
models' template refuses a conversation with two calls in one message.
"""

from __future__ import annotations

from typing import Final

from quire.serve.tools.json_calls import CallShape
from quire.serve.tools.json_format import JsonFormat

SHAPE: Final = CallShape("<|python_tag|>", key="parameters", separator="; ", bare="{")
LLAMA3: Final = JsonFormat("llama3", SHAPE, signs=('"parameters": ', "ipython"), others=("<tool_call>",))
