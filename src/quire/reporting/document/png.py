"""Pictures as PNG, drawn by resvg (the extra `quire[png]`): a small library that renders SVG without a browser.

`dejavu-sans.ttf` is a part of DejaVu Sans 2.37 without hints: Latin, Greek and Cyrillic letters, arrows, mathematical
signs and boxes, so that text is drawn on a machine without fonts. Other letters come from the system's fonts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quire.core.errors import QuireError

FONT_FILE: Final = Path(__file__).with_name("dejavu-sans.ttf")
SCALE: Final = 2.0


class PngError(QuireError):
    """A picture cannot be drawn as PNG; the message names what is missing."""


def require_png() -> None:
    """Raise `PngError` unless pictures can be drawn. Does not mutate."""
    try:
        import resvg_py  # noqa: F401
    except ImportError:
        raise PngError("PNG needs the extra quire[png]: pip install 'quire[png]'; SVG needs nothing") from None


def svg_png(svg: str) -> bytes:
    """Return a picture as PNG, at twice its size. Does not mutate."""
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=SCALE, font_files=[str(FONT_FILE)]))
