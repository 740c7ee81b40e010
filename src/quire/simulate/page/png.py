"""Pictures as PNG, by resvg, which is the extra `quire[png]`: a small library that draws SVG, with no browser."""

from __future__ import annotations

from quire.core.errors import QuireError

SCALE = 2.0
PROBE = "<svg xmlns='http://www.w3.org/2000/svg' width='20' height='20'><text y='15'>x</text></svg>"


class PngError(QuireError):
    """A picture cannot be drawn as PNG here; the message says what is missing."""


def require_png() -> None:
    """Raise `PngError` unless pictures can be drawn, with words in them. Does not mutate."""
    try:
        import resvg_py
    except ImportError:
        raise PngError("PNG needs the extra quire[png]: pip install 'quire[png]'; SVG needs nothing") from None
    if resvg_py.svg_to_bytes(svg_string=PROBE) == resvg_py.svg_to_bytes(svg_string=PROBE, skip_system_fonts=True):
        raise PngError("PNG needs a font, and the system has none (on Debian: fonts-dejavu-core); SVG needs nothing")


def svg_png(svg: str) -> bytes:
    """Return a picture as PNG, of twice its size. Does not mutate."""
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=SCALE))
