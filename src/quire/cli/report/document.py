"""The HTML document of a report: suggested changes, memory and queue over time, and the tables of the text."""

from __future__ import annotations

from quire.cli.report.advice import Finding
from quire.cli.report.text import Report
from quire.cli.simulate.document import MEMORY
from quire.reporting.document.content import AREAS, Axis, Chart, Document, Section, Series, Table

GROUP = "time"


def report_document(report: Report) -> Document:
    """Return the document. Does not mutate."""
    first, *notes = report.head()
    figures = tuple(Table(tuple(rows[0]), tuple(map(tuple, rows[1:]))) for rows in report.tables())
    return Document(
        title="What a server did, and what to change",
        lead=" ".join(notes),
        facts=tuple(zip(("log", "replayed", "engine"), first.splitlines(), strict=True)),
        sections=(
            Section("What to change", (_findings(report),)),
            Section("Over time", (_memory(report), _queue(report))),
            Section("Figures", figures),
        ),
    )


def _findings(report: Report) -> str | Table:
    if report.simulated is None:
        return f"No settings were tried: {report.untried}."
    rows = tuple(
        (f"`{each.setting}`", each.verdict, each.evidence, ", ".join([each.goal, *each.others]), _but(each))
        for each in report.findings
    )
    note = f"Before and after, from simulating {report.simulated.num_requests:,} requests of the log again."
    return Table(("setting", "verdict", "because", "with it", "but"), rows, note=note)


def _but(found: Finding) -> str:
    return "; ".join(filter(None, (", ".join(found.prices), found.caveat)))


def _memory(report: Report) -> Chart:
    run = report.recorded
    size = run.scheduler.memory.spec.block_size
    series = [
        Series(
            name,
            tuple(getattr(point, count) / (size if count.endswith("_slots") else 1) for point in run.timeline.points),
            colour,
        )
        for name, count, colour in MEMORY
    ]
    axes = Axis("time", "s"), Axis("blocks")
    return Chart("Where the memory was", _times(report), tuple(series), *axes, AREAS, group=GROUP)


def _queue(report: Report) -> Chart:
    points = report.recorded.timeline.points
    series = tuple(Series(name, tuple(getattr(point, name) for point in points)) for name in ("running", "waiting"))
    return Chart("Who ran and who waited", _times(report), series, Axis("time", "s"), Axis("sequences"), group=GROUP)


def _times(report: Report) -> tuple[float, ...]:
    return tuple(point.time_s for point in report.recorded.timeline.points)
