"""Draw the measurements of `quire bench kernels --json FILE` and their bounds, as SVG.

    python benchmarks/roofline_plot.py benchmarks/results/kernels-DATE.json docs/design/cpu-roofline.svg

A panel for each shape: operations per second of all products of a step over its rows, and the roof, which is what
memory and arithmetic allow together: bytes over the bandwidth, or operations over the rate, whichever takes longer.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.reporting.svg import page, text

PREFIX, STEP = "Products: ", "all of a step, "
WIDTH, HEIGHT, LEFT, TOP, GAP = 360, 240, 64, 70, 40
ROOF, MEASURED, GRID = "#c98a2b", "#2f6f9f", "#dddddd"


@dataclass(frozen=True, slots=True)
class Point:
    """Products of a step of this many rows: GFLOP/s as measured, and at most."""

    rows: int
    measured: float
    roof: float

    @classmethod
    def of(cls, rows: int, runs: Sequence[dict[str, float]]) -> Point:
        """Return the medians of runs."""
        measured = statistics.median(run["num_operations"] / run["seconds"] for run in runs)
        roof = statistics.median(
            run["num_operations"] / max(run["num_bytes"] / run["bandwidth"], run["num_operations"] / run["arithmetic"])
            for run in runs
        )
        return cls(rows, measured / 1e9, roof / 1e9)


def points_of(samples: dict[str, Any]) -> dict[str, list[Point]]:
    """Return the points of each shape, by rows."""
    found: dict[str, list[Point]] = {}
    for title, runs_of in samples.items():
        if not title.startswith(PREFIX):
            continue
        steps = {name.removeprefix(STEP): runs for name, runs in runs_of.items() if name.startswith(STEP)}
        found[title.removeprefix(PREFIX)] = [
            Point.of(int(name.split()[0]), runs) for name, runs in steps.items() if runs[0]["arithmetic"]
        ]
    return found


def draw(shapes: dict[str, list[Point]]) -> str:
    """Return the plot; both axes are logarithmic."""
    total_width = LEFT + len(shapes) * (WIDTH + LEFT)
    total_height = TOP + HEIGHT + 2 * GAP
    parts = [
        text(LEFT, 26, "Products of a step: GFLOP/s over rows", "font-size='16' font-weight='bold'"),
        f'<path d="M{LEFT} 42h24" stroke="{ROOF}" stroke-width="2" stroke-dasharray="6 3"/>',
        text(LEFT + 30, 46, "at most: memory, then arithmetic"),
        f'<path d="M{LEFT + 240} 42h24" stroke="{MEASURED}" stroke-width="2"/>',
        text(LEFT + 270, 46, "measured"),
    ]
    for index, (name, points) in enumerate(shapes.items()):
        parts += _panel(name, points, LEFT + index * (WIDTH + LEFT))
    return page(total_width, total_height, parts, font_size=12)


def _panel(name: str, points: list[Point], left: int) -> list[str]:
    lowest = 10 ** math.floor(math.log10(min(point.measured for point in points)))
    highest = 10 ** math.ceil(math.log10(max(point.roof for point in points)))
    most_rows = max(point.rows for point in points)

    def x(rows: float) -> float:
        return left + WIDTH * math.log2(rows) / math.log2(most_rows)

    def y(rate: float) -> float:
        return TOP + HEIGHT * (1 - math.log10(rate / lowest) / math.log10(highest / lowest))

    parts = [text(left, TOP + HEIGHT + GAP + 14, name, "font-weight='bold'")]
    rate = lowest
    while rate <= highest:
        parts.append(f'<path d="M{left} {y(rate):.1f}h{WIDTH}" stroke="{GRID}"/>')
        parts.append(text(left - 6, y(rate) + 4, f"{rate:g}", "text-anchor='end'"))
        rate *= 10
    for point in points:
        parts.append(text(x(point.rows), TOP + HEIGHT + 16, str(point.rows), "text-anchor='middle'"))
    roof = " ".join(f"{x(point.rows):.1f},{y(point.roof):.1f}" for point in points)
    measured = " ".join(f"{x(point.rows):.1f},{y(point.measured):.1f}" for point in points)
    parts.append(f'<polyline points="{roof}" fill="none" stroke="{ROOF}" stroke-width="2" stroke-dasharray="6 3"/>')
    parts.append(f'<polyline points="{measured}" fill="none" stroke="{MEASURED}" stroke-width="2"/>')
    parts += [f'<circle cx="{x(p.rows):.1f}" cy="{y(p.measured):.1f}" r="3" fill="{MEASURED}"/>' for p in points]
    return parts


def main(arguments: Sequence[str]) -> int:
    """Draw a file of results."""
    source, target = map(Path, arguments)
    samples = json.loads(source.read_text(encoding="utf-8"))["samples"]
    target.write_text(draw(points_of(samples)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
