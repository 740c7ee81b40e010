"""Chat templates with the parts that matter here of those of LFM2, which differ in what they show of earlier turns."""

from __future__ import annotations

_SYSTEM = """{{ bos_token }}{% set found = namespace(system='') %}
{%- if messages[0]['role'] == 'system' %}{% set found.system = messages[0]['content'] + '\\n' %}{% endif %}
{%- if tools %}{% set found.system = found.system + 'List of tools: BEGIN' %}{% for tool in tools %}
{%- set found.system = found.system + (', ' if not loop.first else '') + tool | tojson %}{% endfor %}
{%- set found.system = found.system + 'END' %}{% endif %}
{%- if found.system %}<|im_start|>system\n{{ found.system }}<|im_end|>\n{% endif %}
{%- for message in messages if message['role'] != 'system' %}<|im_start|>{{ message['role'] }}\n"""
_END = """<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""

FIRST = (
    _SYSTEM.replace("BEGIN", "<|tool_list_start|>[").replace("END", "]<|tool_list_end|>")
    + """{% set content = message['content'] %}
{%- if content is not string %}{% set content = content | tojson %}{% endif %}
{%- if message['role'] == 'tool' %}
{%- set content = '<|tool_response_start|>' + content + '<|tool_response_end|>' %}{% endif %}{{ content }}"""
    + _END
)
"""LFM2: marks around tools and results, and only the contents of messages."""

THINKS = (
    _SYSTEM.replace("BEGIN", "[").replace("END", "]")
    + """{% if message.role == 'assistant' %}{% generation %}{% if message.thinking is defined %}
{{- '<think>' + message.thinking + '</think>' }}{% endif %}{{ message.content }}{% if message.tool_calls is defined %}
{%- for call in message.tool_calls %}<|tool_call_start|>[{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %})]<|tool_call_end|>{% endfor %}
{%- endif %}{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}"""
    + _END
)
"""LFM2.5, which reasons: no marks around tools, and earlier calls, without quotes in texts that have some."""
