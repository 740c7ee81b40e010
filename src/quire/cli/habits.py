"""Commands as users of Ollama, llama-server and vLLM type them: a few are accepted, others get a hint.

A command is accepted if it is a strong habit and means the same here. Others get one line with quire's equivalent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

ALIASES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "run": ("chat",),
        "list": ("models",),
        "ls": ("models",),
        "pull": ("models", "pull"),
        "download": ("models", "pull"),
        "rm": ("models", "rm"),
        "version": ("--version",),
    }
)
"""A command of another program → quire's command, which gets the remaining arguments."""

ANSWERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "ps": "a server shows its models and requests on its dashboard, at /, and its models at /api/ps",
        "show": "type quire doctor MODEL to check a model, and quire plan MODEL to see what it needs",
        "stop": "stop a server with Ctrl-C, or with SIGTERM",
        "create": "quire takes model folders and GGUF files as they are: quire chat PATH",
        "push": "quire publishes no models",
        "cp": "quire copies no models; a path is a name as well: quire chat PATH",
        "complete": "type quire generate MODEL --prompt TEXT --raw",
        "run-batch": "type quire generate MODEL --prompt TEXT, repeated, with --json",
        "collect-env": "type quire doctor",
        "env": "type quire doctor",
    }
)
"""A command that quire lacks → what to do instead."""

MODEL_FLAGS: Final = ("-m", "--model", "-hf", "-hfr", "--hf-repo")
"""Flags of llama-server that name a model. argparse would read -hf as -h."""


def as_quire(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Return the arguments in quire's form, and a hint if quire has no such command. Pure.

    >>> as_quire(["run", "smollm2"]), as_quire(["help", "serve"])
    ((['chat', 'smollm2'], ''), (['serve', '--help'], ''))
    >>> as_quire(["-m", "a.gguf"])[1]
    'quire takes a command first, and the model without a flag: quire serve a.gguf'
    >>> as_quire(["chat", "-hf", "a/b"])[1]
    'quire takes the model without a flag: quire chat a/b'
    """
    first, rest = arguments[0], list(arguments[1:])
    flag = next((index for index, each in enumerate(arguments) if each in MODEL_FLAGS), None)
    if first in MODEL_FLAGS or (flag is not None and arguments[flag].startswith("-hf")):
        model = next(iter(arguments[(flag or 0) + 1 :]), "MODEL")
        if not first.startswith("-"):
            return [], f"quire takes the model without a flag: quire {' '.join(ALIASES.get(first, (first,)))} {model}"
        return [], f"quire takes a command first, and the model without a flag: quire serve {model}"
    if first == "help":
        return [*rest, "--help"], ""
    if first in ANSWERS:
        return [], f"quire has no command {first}: {ANSWERS[first]}"
    return [*ALIASES.get(first, (first,)), *rest], ""
