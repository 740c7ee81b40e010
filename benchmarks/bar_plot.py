"""A plot of bars as SVG, without a library: one panel for each quantity, one bar for each engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.reporting.svg import INK, page, text

COLORS = ("#2f6f9f", "#c98a2b", "#7a9a4d", "#9a5b86", "#6b6b6b", "#b5523b")
PANEL_WIDTH, BAR_HEIGHT, GAP, MARGIN = 300, 22, 6, 16
NAME_WIDTH, VALUE_WIDTH, TITLE_HEIGHT = 110, 70, 40
PANELS_PER_ROW = 2


@dataclass(frozen=True, slots=True)
class Bar:
    """A value with its spread."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars that share a scale."""

    title: str
    bars: Sequence[Bar]


def draw(title: str, panels: Sequence[Panel]) -> str:
    """Return the plot; a name has the same colour in every panel."""
    names = list(dict.fromkeys(bar.name for panel in panels for bar in panel.bars))
    colors = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    most_bars = max((len(panel.bars) for panel in panels), default=0)
    panel_height = TITLE_HEIGHT + most_bars * (BAR_HEIGHT + GAP) + MARGIN
    width = NAME_WIDTH + PANEL_WIDTH + VALUE_WIDTH + MARGIN
    num_rows = -(-len(panels) // PANELS_PER_ROW)
    total_width, total_height = PANELS_PER_ROW * width + MARGIN, TITLE_HEIGHT + num_rows * panel_height + MARGIN
    parts = [text(MARGIN, 26, title, "font-size='16' font-weight='bold'")]
    for index, panel in enumerate(panels):
        left = MARGIN + index % PANELS_PER_ROW * width
        top = TITLE_HEIGHT + index // PANELS_PER_ROW * panel_height
        parts += _panel(panel, colors, left, top)
    return page(total_width, total_height, parts, font_size=13)


def _panel(panel: Panel, colors: dict[str, str], left: int, top: int) -> list[str]:
    longest = max((bar.high for bar in panel.bars), default=0.0) or 1.0
    parts = [text(left, top + 24, panel.title, "font-weight='bold'")]
    start = left + NAME_WIDTH
    for index, bar in enumerate(panel.bars):
        y = top + TITLE_HEIGHT + index * (BAR_HEIGHT + GAP)
        middle, length = y + BAR_HEIGHT / 2, PANEL_WIDTH * bar.value / longest
        low, high = (start + PANEL_WIDTH * value / longest for value in (bar.low, bar.high))
        parts += [
            text(start - 8, y + 16, bar.name, "text-anchor='end'"),
            f'<rect x="{start}" y="{y}" width="{length:.1f}" height="{BAR_HEIGHT}" fill="{colors[bar.name]}"/>',
            f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="{INK}" stroke-width="1.5"/>',
            text(round(max(start + length, high)) + 6, y + 16, f"{bar.value:.3g}"),
        ]
    return parts
