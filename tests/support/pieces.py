"""Texts cut into pieces anywhere, as a stream brings them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st


def cut(draw: Any, text: str) -> list[str]:
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
