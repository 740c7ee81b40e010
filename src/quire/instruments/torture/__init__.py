"""`quire torture`: attacks a server of our own in every way known to bring such servers down.

    F1 … F21    faults: a forward that fails, a client that leaves, a process that is killed or stands still
    I1 … I24    inputs that must be refused, with the right answer, at once, and before anything is enqueued
    I25 … I28   model folders that must be refused, soon and with little memory
    I30 … I39   bodies that cost more than their sender: what is held meanwhile, and who else is served
    I40 … I43   hosts, pages, keys and tenants that must be refused
    L1 … L9     load: more than can be served, thousands of connections, memory that is too small, dear grammars
    L10, L11    tenants: large texts of one, and one at its limits, next to small calls of another

A set of bystanders asks the same servers throughout, and their tokens must be those of a run in which nothing happened,
to the bit. A case whose part is not built counts as failed.
"""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command `torture`. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "torture",
        help="attack a server and check that it copes",
        description="Start servers of the built-in guide, attack them in ways known to bring servers down, and count "
        "what they survive. The outputs of other requests must not change by a bit.",
    )
    parser.add_argument(
        "--only", metavar="CASE", nargs="+", default=(), help="only these cases, such as F1 I7 L4, or F"
    )
    parser.add_argument("--quick", action="store_true", help="shorten the long cases: minutes instead of hours")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="random seed; default: 0")
    parser.add_argument("--json", metavar="FILE", help="write the result of each case")
    parser.add_argument(
        "--markdown", metavar="FILE", help="write the score and every case as a section of a Markdown results file"
    )
    parser.add_argument("--title", metavar="TEXT", help="heading of that section (default: Torture)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from quire.instruments.torture.runner import run

    return run(options)
