"""Report: measurements as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.reporting.samples import Summary, show


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound for a measured median: at most `bound`, or at least `bound` if `at_least` is set."""

    text: str
    measured: float
    bound: float
    at_least: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the measured value is within the bound."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a benchmark: a table, its explanation, its goals, and all samples."""

    title: str
    text: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    samples: dict[str, object]
    goals: list[Goal] = field(default_factory=list)


def cell(summary: Summary | None, unit: str = "") -> str:
    """Return a median with its spread.

    >>> cell(Summary(2.0, 1.0, 3.0), " µs"), cell(None)
    ('2.00 µs (1.00–3.00)', '–')
    """
    if summary is None:
        return "–"
    return f"{show(summary.median)}{unit} ({show(summary.low)}–{show(summary.high)})"


def render_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table that is also readable as plain text.

    >>> print(render_table(("what", "µs"), [("a step", "5")]))
    | what   | µs |
    | ------ | -- |
    | a step | 5  |
    """
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def render_section(section: Section) -> str:
    """Return a section as Markdown."""
    return f"## {section.title}\n\n{section.text}\n\n{render_table(section.header, section.rows)}"


def render_goals(goals: Sequence[Goal], *, is_busy: bool) -> str:
    """Return all goals with the measured values; on a busy machine they are marked as not claimed."""
    rows = []
    for goal in goals:
        verdict = "yes" if goal.is_met else "**no**"
        bound = f"{'≥' if goal.at_least else '≤'} {show(goal.bound)}"
        rows.append((goal.text, bound, show(goal.measured), f"{verdict}, not claimed" if is_busy else verdict))
    return "## Goals\n\n" + render_table(("what", "goal", "measured", "met"), rows)
