"""Elements of SVG plots, without a library: the page, and text on it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

INK = "#222222"


def page(width: int, height: int, parts: Sequence[str], *, font_size: int) -> str:
    """Return a white page with parts on it."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="{font_size}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    return "\n".join([*head, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, attributes: str = "") -> str:
    """Return text that begins at a position, unless the attributes set another anchor."""
    return f'<text x="{x:g}" y="{y:g}" fill="{INK}" {attributes}>{escape(words)}</text>'
