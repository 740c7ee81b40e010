"""`quire report`: analyses memory and waiting times in a server's step log, and suggests settings.

The scheduler and the memory manager replay the log; then engines with other settings serve its requests again. A log
that ends inside a record is read up to that record; an altered log is refused.
"""

from __future__ import annotations

import argparse
import io
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from quire.cli.report.text import Report
    from quire.cli.simulate.progress import ProgressLine

LEAST_REQUESTS: Final = 100
"""With fewer requests, percentiles are too noisy for advice."""

DESCRIPTION = (
    "Replay the step log of a server (quire serve --step-log FILE), show how it used its memory and how long its "
    "users waited, and try other settings on the same requests. Every plan is recomputed and compared with the "
    "log."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `report`. Mutates `subparsers`."""
    text = "analyse a server's step log and suggest better settings"
    parser = subparsers.add_parser("report", help=text, description=DESCRIPTION)
    parser.add_argument("log", metavar="LOG", help="step log of an engine, which may still be running")
    parser.add_argument("--json", metavar="FILE", help="write all results as JSON; -: print them instead of the text")
    parser.add_argument("--html", metavar="FILE", help="write a self-contained HTML report with charts")
    parser.add_argument(
        "--limit",
        metavar="N",
        type=int,
        help="try settings on the first N requests only; 0: try none; default: all, if there are 100 or more",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read a log and print its analysis. Returns the exit status."""
    from quire.cli.simulate.files import show_results, write_text
    from quire.cli.simulate.progress import ProgressLine
    from quire.core.clock import SystemClock
    from quire.core.setting_checks import require_int

    if arguments.limit is not None:
        require_int("limit", arguments.limit, 0, 1 << 40)
    progress = ProgressLine(sys.stderr, SystemClock())
    try:
        report = make_report(arguments.log, progress, arguments.limit)
    finally:
        progress.close()
    show_results(report, report.as_json, arguments.json)
    if arguments.html is not None:
        from quire.cli.report.document import report_document
        from quire.reporting.document.html import document_html

        write_text(arguments.html, document_html(report_document(report)))
    return 0


def make_report(path: str, progress: ProgressLine | None = None, limit: int | None = None) -> Report:
    """Read a log and try settings on its requests; raises `StepLogError` if the file is not a log, or was altered.

    `progress` None: show no progress.
    """
    from quire.cli.report.advice import finding, trials
    from quire.cli.report.text import Report
    from quire.cli.report.trial import LoggedTraffic, read_run
    from quire.cli.simulate.files import named_after, remark_torn
    from quire.cli.simulate.progress import ProgressLine
    from quire.core.clock import SystemClock
    from quire.core.errors import InvalidValueError
    from quire.simulate.replica import EngineSetup

    progress = progress or ProgressLine(io.StringIO(), SystemClock())
    progress.begin(f"reading {path}")
    with progress.follow(path) as file, named_after(path):
        reader = read_run(file)
    recorded, memory = reader.run, reader.run.scheduler.memory
    if recorded.torn:
        remark_torn(path, recorded.torn, progress)
    traffic = LoggedTraffic(path, recorded.num_records, limit, progress)
    if next(traffic.requests(), None) is None:
        return Report(path, recorded, None, (), "no request received a token" if limit != 0 else "because of --limit")
    if limit is None and recorded.num_requests < LEAST_REQUESTS:
        return Report(path, recorded, None, (), f"fewer than {LEAST_REQUESTS} requests; --limit N tries them anyway")
    try:
        setup = EngineSetup(memory.spec, memory.config, recorded.scheduler.config, reader.cost())
    except InvalidValueError as error:
        return Report(path, recorded, None, (), str(error))
    simulated = traffic.try_on(setup, "the same settings")
    found = [finding(each, simulated, traffic.try_on(each.setup, each.setting)) for each in trials(recorded, setup)]
    # Gains, then gains at a price, then no gain.
    findings = sorted((each for each in found if each.is_told), key=lambda each: each.verdict)
    return Report(path, recorded, simulated, tuple(findings))
