"""`quire torture`: starts a server and attacks it in every way known to bring such servers down.

    F1 … F21    faults: a step that fails, a client that disconnects, a process that is killed or frozen
    I1 … I24    inputs that must be refused, with the right answer, at once, and before they reach the engine
    I25 … I28   model folders that must be refused, quickly and with little memory
    I30 … I39   bodies that are cheap to send and expensive to read: the memory held, and the service of others
    I40 … I43   hosts, pages, keys and tenants that must be refused
    I44, I45    bundles of KV blocks that are wrong, truncated, slow or endless
    I46         every path that takes JSON, with bodies that are no requests
    L1 … L9     load: more than the server can serve, thousands of connections, too little memory, expensive grammars
    L10, L11    tenants: one sends large texts or uses all of its limits, while another sends small calls

Bystanders send requests to the same servers throughout, and their tokens must be those of an undisturbed run, to the
bit. A case without an implementation counts as failed.
"""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the command `torture`. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "torture",
        help="attack a server and check that it copes",
        description="Start servers with the built-in guide, attack them in ways known to bring servers down, and count "
        "the attacks that they survive. The outputs of other requests must not change by a bit.",
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
