"""Compares the names of models, as clients write them."""

from __future__ import annotations

from typing import Final

LATEST: Final = ":latest"
"""The tag of a name without a tag: Ollama lists names with it, and some of its clients then call /v1."""


def same_model(asked: str, served: str) -> bool:
    """Return whether two names mean the same model: the tag `LATEST` counts as no tag.

    >>> same_model("guide:latest", "guide"), same_model("qwen3", "qwen3:0.6b")
    (True, False)
    """
    return asked.removesuffix(LATEST) == served.removesuffix(LATEST)
