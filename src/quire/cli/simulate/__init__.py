"""`quire simulate`: hours of traffic in seconds, on the real scheduler and memory manager.

Settings are those of the engine, so a server can use them as they are. Only the settings of a model are read; step
times come from a roofline model or from recorded steps. `--what-if` runs the same requests once for each choice.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.cli.engine_options import NOT_STARTED, add_engine_options
from quire.core.clock import SystemClock
from quire.routing.router import LEAST_WORK, ROUTERS
from quire.simulate.baselines import SYSTEMS
from quire.simulate.faults import NOTICED_S
from quire.simulate.hardware import known_hardware
from quire.simulate.model_shape import known_models
from quire.simulate.paper import FIGURES
from quire.simulate.workload.arrivals import PATTERNS, POISSON

if TYPE_CHECKING:
    from quire.cli.simulate.plot import PlotFile
    from quire.cli.simulate.progress import ProgressLine
    from quire.cli.simulate.report import Run

DESCRIPTION = (
    "Serve generated requests, or those of a trace, with the real scheduler and memory manager on a virtual "
    "clock, and show how long users wait and how the memory is used. MODEL is a folder, a config.json, a hub id, "
    f"guide, or a known name: {', '.join(known_models())}. Only its settings are read."
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `simulate`. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "simulate", help="simulate hours of traffic in seconds with the real scheduler", description=DESCRIPTION
    )
    _add_machine(parser.add_argument_group("machine"))
    _add_replicas(parser.add_argument_group("replicas"))
    _add_requests(parser.add_argument_group("requests"))
    _add_output(parser.add_argument_group("output"))
    add_engine_options(parser, NOT_STARTED)
    parser.set_defaults(run=run)


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--hardware",
        metavar="NAME",
        default="nvidia-a100-40gb",
        help=f"here (measured), a YAML file, {', '.join(known_hardware())}; default: nvidia-a100-40gb, the paper's",
    )
    group.add_argument("--memory", metavar="SIZE", help="memory of the machine; default: all its memory")
    group.add_argument("--steps", metavar="FILE", help="fit step times to these recorded steps, not to --hardware")
    group.add_argument(
        "--disk-bandwidth",
        metavar="GB/S",
        type=float,
        default=2.0,
        help="speed of the disk, with --disk-cache; default: 2",
    )
    group.add_argument(
        "--system",
        choices=SYSTEMS,
        default="quire",
        help="memory management to simulate, as the paper describes it; default: quire",
    )


def _add_replicas(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--replicas", metavar="N", type=int, default=1, help="number of engines; default: 1")
    group.add_argument(
        "--least-replicas",
        metavar="N",
        type=int,
        default=0,
        help="scale between N and --replicas engines with the load; default: 0, always all",
    )
    group.add_argument(
        "--prompt-replicas",
        metavar="N",
        type=int,
        default=0,
        help="of --replicas, N only compute prompts, and the others generate; default: 0, no such split",
    )
    group.add_argument(
        "--link-bandwidth",
        metavar="GB/S",
        type=float,
        help="speed of the link between accelerators or replicas; default: the machine's own",
    )
    group.add_argument(
        "--router",
        choices=ROUTERS,
        default=LEAST_WORK,
        help=f"how to choose the engine for a request; default: {LEAST_WORK}",
    )
    group.add_argument(
        "--report-delay",
        metavar="S",
        type=float,
        default=0.0,
        help="seconds until the router learns which blocks the engines hold; default: 0",
    )
    group.add_argument(
        "--report-loss",
        metavar="P",
        type=_probability,
        default=0.0,
        help="share of those reports that are lost; default: 0",
    )
    group.add_argument(
        "--fault",
        metavar="S:N:KIND",
        nargs="+",
        action="extend",
        default=[],
        help=f"after S seconds, engine N fails; kinds: {', '.join(NOTICED_S)}",
    )


def _add_requests(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--trace", metavar="FILE", help="CSV or JSONL of Azure or Mooncake, or a step log; -: stdin")
    group.add_argument("--skip-malformed", action="store_true", help="skip and count lines that are not requests")
    group.add_argument(
        "--speed", metavar="X", type=float, default=1.0, help="play the trace X times as fast; default: 1"
    )
    group.add_argument("--rate", metavar="R", type=float, default=1.0, help="requests per second; default: 1")
    group.add_argument("--arrivals", choices=PATTERNS, default=POISSON, help=f"arrival pattern; default: {POISSON}")
    group.add_argument(
        "--variation",
        metavar="X",
        type=float,
        default=2.0,
        help="coefficient of variation of gamma arrivals; default: 2",
    )
    group.add_argument("--users", metavar="N", type=int, help="instead of --rate: N users who ask, wait, and ask again")
    group.add_argument("--turns", metavar="N", type=int, default=1, help="turns per chat; default: 1, no chats")
    group.add_argument(
        "--thinking",
        metavar="S",
        type=float,
        default=10.0,
        help="seconds between an answer and the next turn; default: 10",
    )
    group.add_argument(
        "--duration", metavar="S", type=float, default=600.0, help="seconds during which requests arrive; default: 600"
    )
    group.add_argument("--limit", metavar="N", type=int, help="at most N requests")
    group.add_argument(
        "--lengths",
        choices=("sharegpt", "alpaca"),
        default="sharegpt",
        help="draw lengths like those of this data set; default: sharegpt",
    )
    group.add_argument(
        "--prompt-tokens", metavar="N", help="instead of --lengths: 512, 512±200, or p50/p95 as 400/1500"
    )
    group.add_argument("--output-tokens", metavar="N", help="the same for outputs; default with --prompt-tokens: 128")
    group.add_argument(
        "--shared-tokens", metavar="N", type=int, default=0, help="length of the prefix that prompts share"
    )
    group.add_argument(
        "--prefixes", metavar="N", type=int, default=1, help="number of different shared prefixes; default: 1"
    )
    group.add_argument(
        "--acceptance",
        metavar="P",
        type=_probability,
        default=0.6,
        help="probability that a guess of the next token is right, with --speculation; default: 0.6",
    )
    group.add_argument("--samples", metavar="N", type=int, default=1, help="samples per prompt; default: 1")
    group.add_argument("--beams", metavar="N", type=int, default=1, help="beams per prompt; default: 1")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="random seed; default: 0")


def _probability(text: str) -> float:
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to 1")
    return value


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--what-if",
        metavar="NAME=VALUE,…",
        nargs="+",
        action="extend",
        default=[],
        help="run each value of an engine setting, --system, --router, --replicas, --least-replicas, --prompt-replicas",
    )
    group.add_argument("--json", metavar="FILE", help="write all results as JSON; -: print them instead of the table")
    group.add_argument("--csv", metavar="FILE", help="write memory use and queue length over time")
    group.add_argument("--html", metavar="FILE", help="write an HTML report: blocks over time, plots, runs compared")
    group.add_argument("--plot", metavar="FILE", help="write the main plot: .svg, or .png with the extra quire[png]")
    group.add_argument("--log", metavar="FILE", help="write the step log of the run (one replica only)")
    group.add_argument("--markdown", metavar="FILE", help="with --paper: write the results as a Markdown section")
    group.add_argument(
        "--paper",
        metavar="FIGURE",
        nargs="*",
        choices=tuple(FIGURES),
        help=f"only reproduce figures of the PagedAttention paper (all, or: {', '.join(FIGURES)})",
    )
    group.add_argument("--replay", metavar="FILE", help="only replay a step log and compare every plan")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print the results. Returns the exit status."""
    from quire.cli.simulate.paper import make_paper
    from quire.cli.simulate.progress import ProgressLine

    progress = ProgressLine(sys.stderr, SystemClock())
    try:
        if arguments.replay is not None:
            return _replay(arguments.replay, progress)
        return _simulate(arguments, progress) if arguments.paper is None else make_paper(arguments, progress)
    finally:
        progress.close()


def _replay(path: str, progress: ProgressLine) -> int:
    from quire.cli.simulate.files import named_after, remark_torn
    from quire.engine.records.step_log import PLANNED, replayed
    from quire.simulate.workload.step_log import up_to_tear

    progress.begin(f"replaying {path}")
    with progress.follow(path) as file, named_after(path):
        records = up_to_tear(replayed(file), lambda why: remark_torn(path, why, progress))
        num_plans = sum(record.kind == PLANNED for record in records)
    progress.close()
    print(f"{num_plans:,} plans, all identical byte for byte")
    return 0


def _simulate(arguments: argparse.Namespace, progress: ProgressLine) -> int:
    from quire.cli.simulate.files import show_results, write_text
    from quire.cli.simulate.plot import PlotFile
    from quire.cli.simulate.report import Run, SimulationReport
    from quire.cli.simulate.study import Study
    from quire.simulate.frames import Frames

    plot = None if arguments.plot is None else PlotFile(arguments.plot)
    study, runs = Study(arguments, os.environ, progress), []
    for variant in study.variants:
        frames = Frames()
        watchers = [] if arguments.html is None else [frames.watch]
        runs.append(Run(variant.name, study.simulate(variant, watchers), frames.frames))
    progress.close()
    report = SimulationReport(study.title, arguments.seed, runs)
    show_results(report, report.as_json, arguments.json)
    if arguments.csv is not None:
        write_text(arguments.csv, report.as_csv())
    _draw(study.facts, runs, arguments.html, plot)
    return 0


def _draw(facts: Sequence[tuple[str, str]], runs: Sequence[Run], html: str | None, plot: PlotFile | None) -> None:
    from quire.cli.simulate.document import main_chart, simulation_document
    from quire.cli.simulate.files import write_text
    from quire.reporting.document.html import document_html

    if html is not None:
        command = ("command", shlex.join(["quire", *sys.argv[1:]]))
        document = simulation_document(f"Simulation of {facts[0][1]}", (*facts, command), runs)
        write_text(html, document_html(document))
    if plot is not None:
        chart = main_chart(runs)
        plot.write(replace(chart, title=f"{chart.title}: {facts[0][1]}, seed {facts[-1][1]}"))
