"""Tiny tokenizer folders, built with the `tokenizers` library alone: no network, no training data.

Two families stand for nearly all that are served: byte-level BPE with control tokens beside the vocabulary (GPT-2,
Llama 3, Qwen), and SentencePiece-like BPE with "▁", byte fallback and control tokens within the vocabulary (Llama 2).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
CHATML_SETTINGS = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": CHATML}
LLAMA2_SETTINGS = {"bos_token": {"content": "<s>"}, "eos_token": {"content": "</s>"}, "unk_token": "<unk>"}
WORDS = (" the", " and", "ing", "tion", " hello", "lo", "user", "assistant", "system", "\n\n", "  ", "é", "你", "😀")


def merges_for(words: Sequence[str], vocab: dict[str, int]) -> list[tuple[str, str]]:
    """Return merges that build each word from the left; adds what they make to `vocab`."""
    merges: list[tuple[str, str]] = []
    for word in words:
        for length in range(2, len(word) + 1):
            pair = (word[: length - 1], word[length - 1])
            if pair not in merges:
                merges.append(pair)
                vocab.setdefault("".join(pair), len(vocab))
    return merges


def byte_level(words: Sequence[str] = WORDS, control: Sequence[str] = CONTROL) -> Tokenizer:
    """Return a byte-level BPE: 256 bytes, some words, `control` as special tokens, and <think>, not special."""
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
    written = ["".join(part for part, _ in pre_tokenizers.ByteLevel(False, False).pre_tokenize_str(w)) for w in words]
    tokenizer = Tokenizer(models.BPE(vocab, merges_for(written, vocab)))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return tokenizer


def byte_fallback(words: Sequence[str] = ("▁the", "▁and", "ing", "▁hello", "lo", "▁▁")) -> Tokenizer:
    """Return a BPE as Llama 2's: <unk>, <s>, </s>, 256 bytes as "<0xNN>", letters, some words; <s> begins a text."""
    vocab = {text: index for index, text in enumerate(["<unk>", "<s>", "</s>"])}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for letter in "▁abcdefghijklmnopqrstuvwxyzé你[]<>/|_INST":
        vocab.setdefault(letter, len(vocab))
    merges = merges_for(words, vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    control = [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens(control)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> Tokenizer:
    """Return a Unigram with Metaspace and byte fallback, whose control tokens are ordinary pieces of the vocabulary."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -20.0) for byte in range(256))]
    pieces += [("▁", -2.0), ("▁hello", -3.0), ("▁the", -3.0), *((letter, -8.0) for letter in "abcdehlost<>/")]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def word_piece() -> Tokenizer:
    """Return a WordPiece, whose decoder looks at more than one token."""
    vocab = {text: index for index, text in enumerate(["[UNK]", "hello", "##ly", "##o", "the", ".", "you", "'", "s"])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer, settings: Mapping[str, object]) -> Path:
    """Write tokenizer.json and tokenizer_config.json and return the folder; equal arguments give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def write_chatml(folder: Path) -> Path:
    """Write a byte-level BPE with the ChatML template: for any test that needs a model to talk to."""
    return write_tokenizer(folder, byte_level(), CHATML_SETTINGS)


def write_llama2(folder: Path) -> Path:
    """Write a byte-fallback BPE without a template."""
    return write_tokenizer(folder, byte_fallback(), LLAMA2_SETTINGS)


# --- templates like those of published models, shortened, and what is said in them ----------------

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start|>system<|end|>\n\n" }}
{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start|>' + message['role'] + '<|end|>\n\n'+ message['content'] | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at a time") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}<|eot|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start|>ipython<|end|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\n\n' }}{%- endif %}
"""
QWEN3 = """{%- if tools %}
    {{- '<|start|>system\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|end|>\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|start|>system\n' + messages[0].content + '<|end|>\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|start|>' + message.role + '\n' + content + '<|end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}{%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and reasoning_content %}
            {{- '<|start|>' + message.role + '\n<think>\n' + reasoning_content + '\n</think>\n\n' + content }}
        {%- else %}{{- '<|start|>' + message.role + '\n' + content }}{%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' }}{{- tool_call.function.name }}{{- '", "arguments": ' }}
            {%- if tool_call.function.arguments is string %}{{- tool_call.function.arguments }}
            {%- else %}{{- tool_call.function.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + (message['content'] or '') | trim + eos_token }}
{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}
{% else %}{{ '[TOOL]' + message['content'] }}
{% endif %}
{% endfor %}"""
GEMMA = """{{ bos_token }}{% for message in messages -%}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif -%}
{{ '<|start|>' + role + '\n' + (message['content'] or '') | trim + '<|end|>\n' -}}
{% generation %}{{ loop.index }}{% endgeneration %}{% endfor -%}
{% if add_generation_prompt %}{{'<|start|>model\n'}}{% endif %}"""
TOOL = {"type": "function", "function": {"name": "add", "description": "a < b & 'é'", "parameters": {"x": [1, None]}}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "é", "b": [1.5, True]}}}]
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": " hello 😀\n"}],
    [{"role": "system", "content": "the"}, {"role": "user", "content": "{{ hello }}"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>b</think> c"},
        {"role": "user", "content": ""},
    ],
    [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
        {"role": "assistant", "content": "three", "reasoning_content": "adds up"},
    ],
]
