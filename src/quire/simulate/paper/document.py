"""The figures as a document: an overview, then each with its charts, its tables and its differences from the paper."""

from __future__ import annotations

from collections.abc import Sequence

from quire.reporting.document.content import Document, Section, Table
from quire.simulate.paper.figure import Figure, comparison_table
from quire.simulate.paper.runs import OPT_13B, Laboratory

LEAD = (
    "Efficient Memory Management for Large Language Model Serving with PagedAttention (Kwon et al. 2023, "
    "arXiv 2309.06180), simulated: the scheduler and the memory manager of quire, and the systems that the paper "
    "compares, serve random requests on a virtual clock. The use of memory is computed as in a real server; the time "
    "of a step is the roofline of the card. No figure is tuned to match; if one differs, its note explains why."
)


def paper_document(figures: Sequence[Figure], laboratory: Laboratory) -> Document:
    """Return the document of figures. Does not mutate."""
    site = laboratory.sites[OPT_13B]
    facts = (
        ("model", site.shape.name),
        ("card", site.hardware.name),
        ("seed", str(laboratory.seed)),
        ("requests", f"{laboratory.num_requests:,} a run"),
    )
    sections = (Section("At a glance", (glance(figures),)), *map(_section, figures))
    return Document("The PagedAttention paper, again", sections, LEAD, facts)


def glance(figures: Sequence[Figure]) -> Table:
    """Return every published number and the simulated one, for all figures."""
    rows = tuple(
        (row.what, row.found_text, row.published_text, row.difference, row.source, figure.name)
        for figure in figures
        for row in figure.comparisons
    )
    return Table(("what", "here", "published", "difference", "where", "figure here"), rows)


def _section(figure: Figure) -> Section:
    compared = (comparison_table(figure.comparisons, "Compared with the paper"),) if figure.comparisons else ()
    return Section(figure.title, (*compared, *figure.charts, figure.note, *figure.tables))
