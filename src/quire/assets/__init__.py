"""The files that all pages of quire share: uPlot, which draws plots, and the colours (`theme.css`).

The dashboard serves these files with its own; the pages of the simulator contain them. They are
`dist/uPlot.iife.min.js` and `dist/uPlot.min.css` of uPlot 1.6.32, unchanged, from its package in the npm registry, with
its licence, and quire's own style sheet.

>>> sorted(file.name for file in ASSETS_FOLDER.iterdir() if file.suffix in (".css", ".js"))
['theme.css', 'uplot.css', 'uplot.js']
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

ASSETS_FOLDER: Final = Path(__file__).parent
