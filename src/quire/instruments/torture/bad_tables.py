"""Bad inputs in tables: fields and bodies that must be refused, with the expected status and error code."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

from quire.instruments.torture.refusals import Probe, bad, bad_chat

MEGABYTE = 1 << 20
FORM = {"Content-Type": "application/x-www-form-urlencoded"}
UNSUPPORTED = "unsupported_parameter"
NO_PROMPTS: tuple[Any, ...] = (
    *([-1], [2048], [1 << 31], [1 << 70], [1.5], [True], ["a", 1], [1, "a"]),
    *([], [[]], [[1], []], "", [""], 5, {"text": "a"}, [[1], "a"], [[[1]]], None),
)
NO_TEMPLATES: tuple[Any, ...] = (
    *("{% for i in range(10**9) %}{% endfor %}", "{{ 'a' * 10**9 }}", "{{ ''.__class__.__mro__ }}"),
    *({"tokenize": True}, {"chat_template": "x"}, {"messages": []}, {"a": {"b": []}}, 5),
)
BODY = json.dumps({"prompt": "A block is", "max_tokens": 4}).encode()


def status(number: int, name: str, **more: Any) -> Probe:
    """Return a probe: a valid completion with these changes, which must get this status."""
    return Probe(name, frozenset({number}), **{"body": BODY, **more})


TABLES: dict[str, tuple[str, Callable[[], tuple[Probe, ...]]]] = {
    "I1": (
        "bodies that are no JSON",
        lambda: (
            bad(b"{", code="invalid_json"),
            bad(b"[]"),
            bad(b"null"),
            bad(b'"text"'),
            bad(b""),
            bad(b"\xff\xfe{}"),
            status(415, "a text", headers={"Content-Type": "text/plain"}),
            status(415, "a form of a page", headers={**FORM, "Referer": "http://evil.example/"}),
            bad(b"prompt=a", code="invalid_json", headers=FORM),
        ),
    ),
    "I3": (
        "JSON that is meant to hurt",
        lambda: (
            bad(b'{"prompt": ' + b"[" * 100_000, large=True),
            bad(b'{"prompt": ' + b'{"a":' * 100_000, large=True),
            bad(b'{"prompt": "a", "prompt": "b"}', code="invalid_json"),
            bad(b'{"prompt": "\\ud800"}', param="prompt"),
            bad(b'{"prompt": "a\\u0000b"}', param="prompt"),
            bad(b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}"),
        ),
    ),
    "I4": (
        "bodies that are packed",
        lambda: (
            status(415, "a bomb", headers={"Content-Encoding": "gzip"}, body=gzip.compress(bytes(10 * MEGABYTE))),
            status(415, "brotli", headers={"Content-Encoding": "br"}),
        ),
    ),
    "I7": ("n", lambda: tuple(bad({"n": value}, param="n") for value in (0, -1, 1_000_000, 1.5, "2", True, [1]))),
    "I8": (
        "too many texts",
        lambda: (
            bad({"n": 3, "best_of": 2}, param="best_of"),
            bad({"n": 40, "prompt": ["a"] * 40}, param="n"),
            bad({"prompt": ["a"] * 5000}, param="prompt"),
            bad({"best_of": 1_000_000}, param="best_of"),
        ),
    ),
    "I9": (
        "lengths",
        lambda: (
            bad({"max_tokens": 0}, param="max_tokens"),
            bad({"max_tokens": -1}, param="max_tokens"),
            bad({"max_tokens": 1 << 63}, param="max_tokens"),
            bad({"max_tokens": "5"}, param="max_tokens"),
            bad({"max_tokens": 5.0}, param="max_tokens"),
            bad({"min_tokens": 5}, param="min_tokens"),
            bad({"min_tokens": 1_000_000, "max_tokens": None}, param="min_tokens"),
            bad({"min_tokens": -1}, param="min_tokens"),
        ),
    ),
    "I10": (
        "numbers of sampling",
        lambda: (
            *(
                bad({name: value}, param=name)
                for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")
                for value in (-3, 1e308, "1", True)
            ),
            *(
                bad(f'{{"prompt": "a", "{name}": {value}}}'.encode())
                for name in ("temperature", "top_p", "presence_penalty", "min_p")
                for value in ("NaN", "Infinity", "-Infinity", "1e999")
            ),
            bad({"top_p": 0}, param="top_p"),
        ),
    ),
    "I11": (
        "filters",
        lambda: (
            bad({"top_k": -2}, param="top_k"),
            bad({"top_k": 1.5}, param="top_k"),
            bad({"min_p": 2}, param="min_p"),
            bad({"min_p": -0.1}, param="min_p"),
            bad({"repetition_penalty": 0}, param="repetition_penalty"),
            bad({"repetition_penalty": -1}, param="repetition_penalty"),
        ),
    ),
    "I12": (
        "log-probabilities",
        lambda: (
            bad({"logprobs": -2}, param="logprobs"),
            bad({"logprobs": "5"}, param="logprobs"),
            bad({"logprobs": 1000}, param="logprobs"),
            bad({"prompt_logprobs": 1000}, param="prompt_logprobs"),
            bad_chat({"top_logprobs": 5}, param="top_logprobs"),
            bad_chat({"logprobs": True, "top_logprobs": 1000}, param="top_logprobs"),
            bad_chat({"logprobs": 5}, param="logprobs"),
        ),
    ),
    "I13": (
        "prompts that are none",
        lambda: tuple(bad({"prompt": value}, param="prompt") for value in NO_PROMPTS),
    ),
    "I14": (
        "biases and bans",
        lambda: (
            bad({"logit_bias": {"999999": 1}}, param="logit_bias"),
            bad({"logit_bias": {"x": 1}}, param="logit_bias"),
            bad({"logit_bias": {"-1": 1}}, param="logit_bias"),
            bad({"logit_bias": {"5": "1"}}, param="logit_bias"),
            bad(b'{"prompt": "a", "logit_bias": {"5": NaN}}'),
            bad({"logit_bias": {str(token): 1 for token in range(100_000)}}, param="logit_bias", large=True),
            bad({"allowed_token_ids": []}, param="allowed_token_ids"),
            bad({"allowed_token_ids": [1_000_000]}, param="allowed_token_ids"),
            bad({"allowed_token_ids": [-1]}, param="allowed_token_ids"),
            bad({"bad_words": [""]}, param="bad_words"),
            bad({"bad_words": ["word"] * 100_000}, param="bad_words", large=True),
            bad({"stop_token_ids": [1_000_000]}, param="stop_token_ids"),
        ),
    ),
    "I15": (
        "stop strings",
        lambda: (
            bad({"stop": ["a"] * 65}, param="stop"),
            bad({"stop": [""]}, param="stop"),
            bad({"stop": ""}, param="stop"),
            bad({"stop": "x" * MEGABYTE}, param="stop", large=True),
            bad({"stop": [5]}, param="stop"),
            bad(b'{"prompt": "a", "stop": "\\ud83d"}', param="stop"),
        ),
    ),
    "I16": (
        "more than the context holds",
        lambda: (
            bad({"prompt": [5] * 100_000}, code="context_length_exceeded", large=True),
            bad({"prompt": [5] * 10, "max_tokens": 1_000_000}, code="context_length_exceeded"),
            bad_chat(
                {"messages": [{"role": "user", "content": "word " * 20_000}]},
                code="context_length_exceeded",
                large=True,
            ),
        ),
    ),
    "I18": (
        "templates from outside",
        lambda: tuple(
            bad_chat({name: template}, param=name)
            for name in ("chat_template", "chat_template_kwargs")
            for template in NO_TEMPLATES
        ),
    ),
    "I21": (
        "what is not supported",
        lambda: (
            bad({"stream_options": {"include_usage": True}}, param="stream_options"),
            bad({"suffix": "end"}, param="suffix", code=UNSUPPORTED),
            bad_chat({"audio": {"voice": "x", "format": "wav"}}, param="audio", code=UNSUPPORTED),
            bad_chat({"modalities": ["audio"]}, param="modalities", code=UNSUPPORTED),
            *(
                bad_chat({"messages": [{"role": "user", "content": [part]}]}, param="messages")
                for part in (
                    {"type": "image_url", "image_url": {"url": "http://127.0.0.1/"}},
                    {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
                    {"type": "file", "file": {"file_id": "x"}},
                    {"type": "nothing"},
                )
            ),
            bad({"no_such_field": 1}, param="no_such_field"),
        ),
    ),
}
