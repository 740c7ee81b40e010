"""Hermes, Qwen2.5, Qwen3 and the built-in guide: each call is between two marks.

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

Qwen3-Coder and GLM use the same marks around calls that are not JSON: see `tag_calls`.
"""

from __future__ import annotations

from typing import Final

from quire.serve.tools.json_calls import CallShape
from quire.serve.tools.json_format import JsonFormat

SHAPE: Final = CallShape("<tool_call>", "</tool_call>", before=r'"\n"', after=r'"\n"')
HERMES: Final = JsonFormat("hermes", SHAPE, signs=("<tool_call>", "arguments"), others=("<function=", "<arg_key>"))
