"""Hints for a name that quire does not know: a similar name, or quire's name for another program's option.

>>> meant_by("--kv-memry", ["--kv-memory", "--kv-dtype"]), meant_by("--ctx-size", ["--max-model-len"])
('did you mean --kv-memory?', 'quire calls it --max-model-len')
>>> keyword_meant_by("enforce_eager", ["cuda_graphs"]), keyword_meant_by("temprature", ["temperature"])
('quire calls it cuda_graphs=False', 'did you mean temperature?')
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

MODEL: Final = "MODEL, without a flag"
OFF: Final = "--no-"

ELSEWHERE: Final = MappingProxyType(
    {
        # llama-server and llama-cpp-python
        "--model": MODEL,
        "-m": MODEL,
        "--model-path": MODEL,
        "--ctx-size": "--max-model-len",
        "-c": "--max-model-len",
        "--n-ctx": "--max-model-len",
        "--threads": "--num-threads",
        "-t": "--num-threads",
        "--n-threads": "--num-threads",
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
        "--gpu-layers": "--device",
        "--n-gpu-layers": "--device",
        "--tensor-split": "--tensor-parallel",
        "-ts": "--tensor-parallel",
        "--model-draft": "--speculation",
        "-md": "--speculation",
        "--draft-model": "--speculation",
        "--embedding": "--pooling",
        "--embeddings": "--pooling",
        "--lora": "--adapter",
        "-mm": "--mmproj",
        "--clip-model-path": "--mmproj",
        "--models-dir": "--model-dir",
        "--models-max": "--models-at-once",
        "--ssl-cert-file": "--tls-cert",
        "--ssl-key-file": "--tls-key",
        "--webui": "--dashboard",
        "--no-webui": "--no-dashboard",
        "--n-predict": "--max-tokens",
        "--predict": "--max-tokens",
        "--num-predict": "--max-tokens",
        "--repeat-penalty": "--repetition-penalty",
        "--repeat-last-n": "--penalty-window",
        "--reverse-prompt": "--stop",
        "--system-prompt": "--system",
        "-sys": "--system",
        # vLLM
        "--quantization": "--weights",
        "-q": "--weights",
        "--kv-cache-dtype": "--kv-dtype",
        "--kv-cache-memory-bytes": "--kv-memory",
        "--gpu-memory-utilization": "--kv-memory",
        "--num-gpu-blocks-override": "--kv-memory",
        "--disable-log-requests": "--no-access-log",
        "--disable-uvicorn-access-log": "--no-access-log",
        "--revision": "MODEL@REVISION",
        "--tool-call-parser": "--tool-format",
        "--enable-auto-tool-choice": "--tool-format",
        "--reasoning-parser": "--reasoning-format",
        "--lora-modules": "--adapter",
        "--enable-lora": "--adapter",
        "--max-lora-rank": "--max-adapter-rank",
        "--allowed-origins": "--cors-origin",
        "--ssl-certfile": "--tls-cert",
        "--ssl-keyfile": "--tls-key",
        "--tensor-parallel-size": "--tensor-parallel",
        "-tp": "--tensor-parallel",
        "--data-parallel-size": "--replicas",
        "-dp": "--replicas",
        "--scheduling-policy": "--policy",
        "--override-generation-config": "--default-sampling",
        "--enforce-eager": "--no-cuda-graphs",
        "--speculative-config": "--speculation",
        "--speculative-model": "--speculation",
        "--runner": "--pooling",
        "--task": "--pooling",
        "--pooler-config": "--pooling",
        "--override-pooler-config": "--pooling",
        "--kv-offloading-size": "--host-cache",
        # transformers
        "--torch-dtype": "--dtype",
        "--device-map": "--device",
    }
)
"""Options of other programs that quire has under another name."""

NEEDLESS: Final = MappingProxyType(
    {
        "--chat-template": "quire takes the model's chat template, or that of --tokenizer FOLDER",
        "--mmproj-auto": "quire looks for the image encoder next to a GGUF model unless --mmproj names one",
        "--mmproj-url": "quire fetches the image encoder with a model of the hub; --mmproj names a file",
        "--no-mmproj": "quire calls it --mmproj none",
        "--image-max-tokens": "quire limits the patches of an image, four for a token of most models: "
        "--max-image-patches",
        "--limit-mm-per-prompt": "quire takes up to 64 images in a request, as far as they fit the context",
        "--mm-processor-kwargs": "quire prepares images as the model's folder says, and has --max-image-patches",
        "--jinja": "quire always applies the model's chat template",
        "--trust-remote-code": "quire never runs code that comes with a model",
        "--load-format": "quire tells the format from the files",
        "--enable-chunked-prefill": "quire always computes long prompts in chunks",
        "--cont-batching": "quire always batches continuously",
        "--pipeline-parallel-size": "quire divides a model with --tensor-parallel only",
    }
)
"""Options of other programs that quire does not have, and why."""


def meant_by(name: str, known: Iterable[str]) -> str:
    """Return a hint for a flag or a command, of which `known` are allowed here; empty if there is none."""
    name, known = name.partition("=")[0], list(known)
    return counterpart(name, known) or _near(name, known)


def counterpart(name: str, known: Iterable[str]) -> str:
    """Return a hint if a flag belongs to another program; `known`: the flags that are allowed here."""
    name = name.partition("=")[0]
    ours = ELSEWHERE.get(name)
    if ours is None:
        return NEEDLESS.get(name, "")
    is_here = not ours.startswith("--") or ours in known
    return f"quire calls it {ours}" + ("" if is_here else ", an option of other commands")


def keyword_meant_by(name: str, known: Iterable[str]) -> str:
    """Return a hint for a keyword in Python, of which `known` are allowed here; empty if there is none."""
    flag, known = f"--{name.replace('_', '-')}", list(known)
    ours = ELSEWHERE.get(flag, "")
    keyword = "model" if ours == MODEL else ours.removeprefix(OFF).removeprefix("--").replace("-", "_")
    if keyword in known:
        return f"quire calls it {keyword}" + ("=False" if ours.startswith(OFF) else "")
    if ours and not ours.startswith("--"):
        return f"quire calls it {ours}"
    return NEEDLESS.get(flag, "") or _near(name, known)


def _near(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else ""
