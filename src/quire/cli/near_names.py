"""Hints for a name that quire does not know: a similar name, or quire's name for another program's option.

>>> meant_by("--kv-memry", ["--kv-memory", "--kv-dtype"]), meant_by("--ctx-size", ["--max-model-len"])
('did you mean --kv-memory?', 'quire calls it --max-model-len')
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

ELSEWHERE: Final = MappingProxyType(
    {
        # llama-server
        "--model": "MODEL, without a flag",
        "-m": "MODEL, without a flag",
        "--ctx-size": "--max-model-len",
        "-c": "--max-model-len",
        "--threads": "--num-threads",
        "-t": "--num-threads",
        "--parallel": "--max-num-seqs",
        "-np": "--max-num-seqs",
        "--batch-size": "--max-num-batched-tokens",
        "-b": "--max-num-batched-tokens",
        "--alias": "--served-model-name",
        "-a": "--served-model-name",
        "--cache-type-k": "--kv-dtype",
        "--cache-type-v": "--kv-dtype",
        "-ctk": "--kv-dtype",
        "-ctv": "--kv-dtype",
        "-ngl": "--device",
        "--n-gpu-layers": "--device",
        # vLLM
        "--quantization": "--weights",
        "-q": "--weights",
        "--kv-cache-dtype": "--kv-dtype",
        "--kv-cache-memory-bytes": "--kv-memory",
        "--gpu-memory-utilization": "--kv-memory",
        "--num-gpu-blocks-override": "--kv-memory",
        "--disable-log-requests": "--no-access-log",
        "--revision": "MODEL@REVISION",
        "--tool-call-parser": "--tool-format",
        "--enable-auto-tool-choice": "--tool-format",
        "--lora-modules": "--adapter",
        "--enable-lora": "--adapter",
    }
)
"""Flags of llama-server and vLLM that quire has under another name."""

NEEDLESS: Final = MappingProxyType(
    {
        "--chat-template": "quire takes the model's chat template, or that of --tokenizer FOLDER",
        "--trust-remote-code": "quire never runs code that comes with a model",
        "--load-format": "quire tells the format from the files",
    }
)
"""Flags of vLLM that quire does not have, and why."""


def meant_by(name: str, known: Iterable[str]) -> str:
    """Return a hint; empty if there is none."""
    name = name.partition("=")[0]
    if name in ELSEWHERE:
        return f"quire calls it {ELSEWHERE[name]}"
    if name in NEEDLESS:
        return NEEDLESS[name]
    near = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else ""
