"""`quire simulate --paper`: the figures of the PagedAttention paper on a terminal, as HTML, JSON and Markdown."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime

from quire.cli.model_shapes import find_shape
from quire.cli.simulate.files import write_text
from quire.cli.simulate.plot import PlotFile
from quire.cli.tables import show_table
from quire.core.errors import InvalidConfigError
from quire.engine.progress import StatusLine
from quire.reporting.document.html import document_html
from quire.reporting.report import render_table
from quire.reporting.results import write_part
from quire.simulate.hardware import find_hardware
from quire.simulate.paper import FIGURES
from quire.simulate.paper.document import glance, paper_document
from quire.simulate.paper.figure import Figure, comparison_table
from quire.simulate.paper.runs import Laboratory, paper_sites

NUM_REQUESTS = 1000
WIDTH = 100


def make_paper(arguments: argparse.Namespace, line: StatusLine) -> int:
    """Make the requested figures and write the requested files. Returns the exit status."""
    plot = None if arguments.plot is None else PlotFile(arguments.plot)
    sites = paper_sites(find_shape, find_hardware(arguments.hardware))
    num_requests = NUM_REQUESTS if arguments.limit is None else arguments.limit
    names, figures = arguments.paper or list(FIGURES), list[Figure]()

    def watch(num_runs: int) -> None:
        if line.is_due:
            line.draw(f"figure {len(figures) + 1} of {len(names)}, {names[len(figures)]}: run {num_runs}")

    laboratory = Laboratory(sites, seed=arguments.seed, num_requests=num_requests, watch=watch)
    for name in names:
        figures.append(FIGURES[name](laboratory))
        line.close()
        if arguments.json != "-":
            print("\n\n".join(_show(figures[-1], arguments.seed)) + "\n", flush=True)
    _write(arguments, figures, laboratory)
    charts = [chart for figure in figures for chart in figure.charts]
    if plot is not None:
        if not charts:
            raise InvalidConfigError("plot", arguments.plot, "given with a figure that has a plot, such as latency")
        plot.write(replace(charts[0], title=f"{charts[0].title} (seed {arguments.seed})"))
    return 0


def _show(figure: Figure, seed: int) -> Iterator[str]:
    """Yield the paragraphs of a figure."""
    yield f"{figure.title} (seed {seed})"
    tables = [comparison_table(figure.comparisons)] if figure.comparisons else []
    for table in [*tables, *figure.tables]:
        if table.title:
            yield f"{table.title}:"
        yield show_table([table.header, *table.rows])
    yield textwrap.fill(figure.note, WIDTH)


def _write(arguments: argparse.Namespace, figures: Sequence[Figure], laboratory: Laboratory) -> None:
    content = json.dumps([asdict(figure) for figure in figures], indent=1, ensure_ascii=False)
    if arguments.json == "-":
        print(content)
    elif arguments.json is not None:
        write_text(arguments.json, content + "\n")
    if arguments.html is not None:
        write_text(arguments.html, document_html(paper_document(figures, laboratory)))
    if arguments.markdown is not None:
        write_part(arguments.markdown, _markdown(figures, laboratory))


def _markdown(figures: Sequence[Figure], laboratory: Laboratory) -> str:
    """Return the published and the simulated figures, as a section of a Markdown results file."""
    command, table = shlex.join(["quire", *sys.argv[1:]]), glance(figures)
    head = (
        f"Written by `{command}` on {datetime.now(UTC).isoformat(timespec='minutes')}, seed {laboratory.seed}, "
        f"{laboratory.num_requests:,} requests per run. Simulated, so the same on every machine. `make paper` makes a "
        "page with every figure, its plots, and why it differs from the published one."
    )
    return "\n\n".join(["# The paper, again", head, render_table(table.header, table.rows)])
