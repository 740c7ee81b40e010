"""Tiny random models whose chat templates show tools, one for each format: shortened from those of published models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from quire.serve.reasoning import GEMMA4 as GEMMA4_REASONING
from quire.serve.tools.gemma4 import GEMMA4
from quire.serve.tools.harmony import MARKS as HARMONY_MARKS
from quire.serve.tools.lfm2 import LFM2
from support.gemma4_template import LARGE as GEMMA4_TEMPLATE
from support.lfm2_templates import THINKS as LFM2_TEMPLATE
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import CHATML_SETTINGS, byte_level, write_tokenizer

TURN = "<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
CALL = '{{ call.function.name }}", "%s": {{ call.function.arguments | tojson }}}'
BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"


def conversation(before: str, call: str, after: str) -> str:
    calls = "{% for call in message.tool_calls or [] %}" + before + '{"name": "' + call + after + "{% endfor %}"
    return TOOLS + "{% for message in messages %}" + TURN + calls + "<|im_end|>\n{% endfor %}" + BEGIN


def of_tags(before: str, parameter: str, after: str) -> str:
    values = "{% for key, value in call.function.arguments | items %}" + parameter + "{% endfor %}"
    calls = "{% for call in message.tool_calls or [] %}" + before + values + after + "{% endfor %}"
    return TOOLS + "{% for message in messages %}" + TURN + calls + "<|im_end|>\n{% endfor %}" + BEGIN


TEMPLATES: Mapping[str, str] = {
    "hermes": conversation("<tool_call>\n", CALL % "arguments", "\n</tool_call>"),
    "llama3": "{# ipython #}" + conversation("", CALL % "parameters", ""),
    "mistral": conversation("[TOOL_CALLS] [", CALL % "arguments", "]"),
    "mistral_args": TOOLS
    + "{% for message in messages %}"
    + TURN
    + "{% for call in message.tool_calls or [] %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    + "{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    + BEGIN,
    "phi4": "{% for message in messages %}"
    + TURN
    + "{% if 'tools' in message %}<|tool|>{{ message.tools }}<|/tool|>{% endif %}<|im_end|>\n{% endfor %}"
    + BEGIN,
    "qwen3_coder": of_tags(
        "<tool_call>\n<function={{ call.function.name }}>\n",
        "<parameter={{ key }}>\n{{ value }}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "seed": of_tags(
        "<seed:tool_call>\n<function={{ call.function.name }}>\n",
        "<parameter={{ key }}>{{ value }}</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "glm45": of_tags(
        "<tool_call>{{ call.function.name }}",
        "<arg_key>{{ key }}</arg_key><arg_value>{{ value }}</arg_value>",
        "</tool_call>",
    ),
    "granite": "{# <|tool_call|> #}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    + "{% for message in messages %}<|start_of_role|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    + BEGIN,
    "command": conversation("<|START_ACTION|>[", CALL % "parameters", "]<|END_ACTION|>{# tool_name #}"),
    "gemma4": GEMMA4_TEMPLATE,
    "lfm2": LFM2_TEMPLATE,
    "harmony": TOOLS
    + "{% for message in messages %}<|start|>{{ message.role }}"
    + "{% if message.tool_calls %} to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json"
    + "<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>"
    + "{% else %}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
}

# A template of Hermes that begins the reasoning, or ends it.
THINKS = TEMPLATES["hermes"].removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}"
    "{% endif %}"
)
WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""The parameters of a tool that the tests call weather."""
SPECIAL = (
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[CALL_ID]",
    "[ARGS]",
    "<|tool_call|>",
    "<|/tool_call|>",
    "<|tool|>",
    "<|/tool|>",
)
OF_SOME = (
    HARMONY_MARKS,
    ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    (*GEMMA4.marks, *GEMMA4_REASONING.marks),
    LFM2.marks,
)
"""Marks of families whose templates have the first: more tokens would change the random weights of all models."""

ADDED = ("<tool_call>", "</tool_call>", "</think>")
ADDED_TO_SOME = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


def write_tool_model(folder: Path, template: str) -> Path:
    """Write a tiny Qwen3 of random weights with this chat template; the marks of its format are tokens."""
    tokenizer = byte_level()
    special = [*SPECIAL, *(mark for marks in OF_SOME if marks[0] in template for mark in marks)]
    added = [*ADDED, *(mark for mark in ADDED_TO_SOME if mark in template)]
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in special])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in added])
    end = tokenizer.token_to_id("<|im_end|>")
    settings = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": end, "max_position_embeddings": 2048}
    write_tiny_qwen3(folder, settings=settings)
    return write_tokenizer(folder, tokenizer, CHATML_SETTINGS | {"chat_template": template})
