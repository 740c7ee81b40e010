"""A plot of latency and goodput over the offered load, as SVG, without a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.instruments.bench.load_figures import BETWEEN_TOKENS, FIRST_TOKEN, LoadFigures
from quire.reporting.samples import show
from quire.reporting.svg import page, text

WIDTH, HEIGHT, LEFT, TOP, GAP = 300, 220, 70, 84, 90
GRID, COLORS = "#dddddd", ("#2f6f9f", "#c98a2b", "#b5523b")
NUM_STEPS = 4


@dataclass(frozen=True, slots=True)
class Line:
    """Values over the offered rates, in the order of the rates."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines that share an axis."""

    title: str
    lines: Sequence[Line]


def draw_load(title: str, levels: Sequence[LoadFigures]) -> str:
    """Return the plot of the levels of an open loop: time to first token, between tokens, completed and good."""
    ordered = sorted(levels, key=lambda level: level.offered)
    panels = [
        *(Panel(f"{what}, ms", _percentile_lines(ordered, what)) for what in (FIRST_TOKEN, BETWEEN_TOKENS)),
        Panel(
            "requests/s",
            [
                Line("completed", [(level.offered, level.completed) for level in ordered]),
                Line("good", [(level.offered, level.good) for level in ordered]),
            ],
        ),
    ]
    parts = [text(LEFT, 30, title, "font-size='16' font-weight='bold'")]
    for index, panel in enumerate(panels):
        parts += _draw_panel(panel, LEFT + index * (WIDTH + GAP))
    return page(LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 60, parts, font_size=12)


def _percentile_lines(levels: Sequence[LoadFigures], what: str) -> list[Line]:
    found = [(level.offered, level.times_ms[what]) for level in levels if what in level.times_ms]
    return [
        Line("p50", [(offered, times.p50) for offered, times in found]),
        Line("p90", [(offered, times.p90) for offered, times in found]),
        Line("p99", [(offered, times.p99) for offered, times in found]),
    ]


def _draw_panel(panel: Panel, left: int) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    most_x = max((x for x, _ in points), default=0.0) or 1.0
    most_y = max((y for _, y in points), default=0.0) or 1.0
    bottom = TOP + HEIGHT
    parts = [
        text(left, TOP - 28, panel.title, "font-weight='bold'"),
        text(left + WIDTH / 2, bottom + 38, "offered, requests/s", "text-anchor='middle'"),
    ]
    for step in range(NUM_STEPS + 1):
        y, x = bottom - HEIGHT * step / NUM_STEPS, left + WIDTH * step / NUM_STEPS
        parts += [
            f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="{GRID}"/>',
            text(left - 8, y + 4, _label(most_y * step / NUM_STEPS), "text-anchor='end'"),
            text(x, bottom + 18, _label(most_x * step / NUM_STEPS), "text-anchor='middle'"),
        ]
    for index, line in enumerate(panel.lines):
        color = COLORS[index % len(COLORS)]
        places = [(left + WIDTH * x / most_x, bottom - HEIGHT * y / most_y) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        if path:
            parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places]
        parts += [
            f'<path d="M{left + index * 90} {TOP - 12}h16" stroke="{color}" stroke-width="2"/>',
            text(left + index * 90 + 22, TOP - 8, line.name),
        ]
    return parts


def _label(value: float) -> str:
    return show(value) if value else "0"
