"""A plot as a file: SVG, or PNG if the extra `quire[png]` is installed."""

from __future__ import annotations

from pathlib import Path

from quire.cli.simulate.files import write_bytes
from quire.core.errors import InvalidConfigError
from quire.reporting.document.content import Chart
from quire.reporting.document.png import require_png, svg_png
from quire.reporting.document.svg import chart_svg

SVG, PNG = ".svg", ".png"


class PlotFile:
    """A file for one chart. The constructor refuses a file that cannot be written, before anything runs."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        if self._path.suffix.lower() not in (SVG, PNG):
            raise InvalidConfigError("plot", path, "a file that ends in .svg or .png")
        if self._path.suffix.lower() == PNG:
            require_png()

    def write(self, chart: Chart) -> None:
        """Draw the chart, and write it."""
        picture = chart_svg(chart)
        is_png = self._path.suffix.lower() == PNG
        write_bytes(self._path, svg_png(picture) if is_png else picture.encode("utf-8"))
