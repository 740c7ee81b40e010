"""Figure: a reproduced figure next to the published one, as one value for terminal, document and JSON.

The paper's part is data (`paper.yaml`): titles, published numbers with their sources, and notes on the differences. A
figure has a simulated number under each of these names, so no published number can be forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.reporting.document.content import Chart, Table

PAPER_FILE = Path(__file__).parent / "paper.yaml"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A published number and the simulated one.

    `published` is one number or the two ends of a range; "up to" is a range from 0. `source` is its place in the paper,
    unless it names another document.

    >>> row = Comparison("vllm / orca_oracle", 2.81, (1.7, 2.7), "×", "section 6.2")
    >>> row.found_text, row.published_text, row.difference
    ('2.81×', '1.7–2.7×', '+4 %')
    """

    what: str
    found: float
    published: tuple[float, ...]
    unit: str
    source: str

    @property
    def found_text(self) -> str:
        """The simulated number, with three significant digits or all digits before the point."""
        return (f"{self.found:,.0f}" if self.found >= 1000 else f"{self.found:.3g}") + self.unit

    @property
    def published_text(self) -> str:
        """The published number, as it was printed."""
        return re.sub("^0–", "up to ", "–".join(f"{bound:,g}" for bound in self.published)) + self.unit

    @property
    def difference(self) -> str:
        """The difference between the simulated number and the published number or range."""
        low, high = self.published[0], self.published[-1]
        if low <= self.found <= high:
            return "within" if low < high else "0 %"
        ratio = self.found / (high if self.found > low else low)
        percent = round(100 * (ratio - 1))
        if ratio >= 3:
            return f"{ratio:.0f}×"
        return f"{percent:+d} %" if percent else "0 %"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: published and simulated numbers, and a note on their differences; `charts` draw the tables."""

    name: str
    title: str
    tables: tuple[Table, ...]
    comparisons: tuple[Comparison, ...]
    note: str
    charts: tuple[Chart, ...] = ()


def make_figure(
    name: str,
    tables: Sequence[Table],
    found: Mapping[str, float],
    charts: Sequence[Chart] = (),
    **values: float,
) -> Figure:
    """Return a figure: `found` has a number for each published one, `values` fill in the note. Reads `paper.yaml`."""
    said = _read_paper()[name]
    comparisons = tuple(
        Comparison(what, found[what], tuple(numbers), unit, source)
        for what, (numbers, unit, source) in said["published"].items()
    )
    return Figure(name, said["title"], tuple(tables), comparisons, said["note"].format(**values), tuple(charts))


def published_numbers(name: str) -> dict[str, float]:
    """Return the published numbers of a figure; for ranges, their lower ends. Reads `paper.yaml`."""
    return {what: numbers[0] for what, (numbers, _, _) in _read_paper()[name]["published"].items()}


def comparison_table(comparisons: Iterable[Comparison], title: str = "") -> Table:
    """Return comparisons as a table."""
    rows = ((row.what, row.found_text, row.published_text, row.difference, row.source) for row in comparisons)
    return Table(("", "here", "published", "difference", "where"), tuple(rows), title)


def _read_paper() -> dict[str, Any]:
    import yaml  # imported late: only figures need it

    content: dict[str, Any] = yaml.safe_load(PAPER_FILE.read_text(encoding="utf-8"))
    return content
