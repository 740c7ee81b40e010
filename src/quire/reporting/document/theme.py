"""The colours of a document, read from `assets/theme.css`, for pictures without a style sheet."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.assets import ASSETS_FOLDER
from quire.core.errors import InvariantError
from quire.reporting.document.content import Chart

NUM_OWNERS = 8
_COLOUR = re.compile(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\);")


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours by name, for a light and for a dark background.

    >>> Theme.read().light["accent"]
    '#1f66c7'
    """

    light: dict[str, str]
    dark: dict[str, str]

    @classmethod
    def read(cls) -> Theme:
        """Return the colours of the style sheet."""
        found = _COLOUR.findall((ASSETS_FOLDER / "theme.css").read_text(encoding="utf-8"))
        return cls({name: light for name, light, _ in found}, {name: dark for name, _, dark in found})


def colour_names(chart: Chart) -> list[str]:
    """Return the colour name of each series: its own, or the next of the owners' colours."""
    names = [one.colour or f"owner-{index % NUM_OWNERS}" for index, one in enumerate(chart.series)]
    unknown = set(names) - set(Theme.read().light)
    if unknown:
        raise InvariantError(f"chart {chart.title!r}: no colour is called {', '.join(sorted(unknown))}")
    return names
