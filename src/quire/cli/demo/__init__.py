"""`quire demo`: the example of the documentation, on the real engine, drawn step by step; then a server to watch.

On a terminal the demonstration ends by serving the guide with its dashboard, until Ctrl-C. Elsewhere, as in continuous
integration, it ends after the story. `--serve-for` overrides both.

The story is a tuple of chapters. To add one, write a module with a function that yields scenes, and name it here.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from quire.cli.terminal import add_color_option, detect

if TYPE_CHECKING:
    from quire.cli.demo.scene import Chapter
    from quire.cli.demo.stage import Stage

DESCRIPTION = (
    "Show paged KV memory at work: a story on the real engine, drawn step by step, and then a server with the built-in "
    "guide, its dashboard and a small crowd of clients, to watch in a browser."
)
INTRODUCTION = (
    "Nothing here is staged: the real scheduler plans every step, the real memory manager assigns the blocks, and "
    "the pictures show the state afterwards. The last two chapters add a model. Each card is a block: its number, the "
    "sequences that hold it and, below, how many of its 16 slots hold the keys and values of a token. Sizes in bytes "
    "are those of Qwen3-0.6B, except in the last two chapters."
)
CONCLUSION = (
    "The memory manager's bookkeeping was checked after every step. Next: `quire chat` talks to that model, examples/ "
    "has each idea in a few lines of code, `quire bench control` measures scheduler and memory manager, and `quire "
    "doctor` checks what works on this machine."
)
MAX_SERVED_S = 86_400.0
SERVED = (
    "A server with the guide is running now, and a small crowd of clients asks it questions: some share a prefix, "
    "some want several answers, some leave early, and now and then they need more memory than the server has. Open "
    "this address in a browser to watch, or to ask your own questions:"
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `demo`. Mutates `subparsers`."""
    parser = subparsers.add_parser("demo", help="watch paged KV memory at work", description=DESCRIPTION)
    parser.add_argument("--fast", action="store_true", help="print everything at once, without pauses")
    parser.add_argument(
        "--serve-for",
        type=_seconds,
        metavar="SECONDS",
        help="how long to serve the guide and its dashboard after the story; 0: do not (default: until Ctrl-C on a "
        "terminal, otherwise 0)",
    )
    add_color_option(parser)
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= MAX_SERVED_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {MAX_SERVED_S:g}")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Tell the story. Returns the exit status."""
    from quire.cli.demo.block_map import draw_legend
    from quire.cli.demo.stage import Stage
    from quire.cli.text import BOLD, line, span

    terminal = detect(sys.stdout, os.environ, arguments.color)
    stage = Stage(sys.stdout, terminal, None if arguments.fast else time.sleep)
    stage.write([(), line(span("quire: paged memory for the keys and values of language models", BOLD))], 2)
    stage.say(INTRODUCTION)
    stage.write(draw_legend(terminal.columns - 4), 2)
    for number, chapter in enumerate(story(), start=1):
        stage.play(number, chapter)
    stage.say(CONCLUSION)
    if arguments.serve_for != 0 and (terminal.interactive or arguments.serve_for is not None):
        _serve(stage, arguments.serve_for)
    return 0


def _serve(stage: Stage, seconds: float | None) -> None:
    """Serve the guide, and print its address. Returns after an orderly end."""
    from quire.cli.demo.served import serve_guide
    from quire.cli.text import BOLD, line, span

    def say(address: str) -> None:
        stage.say(SERVED)
        stage.write([line(span(f"{address}/", BOLD)), ()], 4)
        stage.say("Ctrl-C stops it." if seconds is None else f"It stops after {seconds:g} seconds.")

    serve_guide(say, seconds)


def story() -> tuple[Chapter, ...]:
    """Return the chapters in their order."""
    from quire.cli.demo.answers import answers
    from quire.cli.demo.copy_on_write import copy_on_write
    from quire.cli.demo.full_pool import full_pool
    from quire.cli.demo.paging import paging
    from quire.cli.demo.restart import restart
    from quire.cli.demo.scene import Chapter
    from quire.cli.demo.sharing import prefix_sharing

    return (
        Chapter("Paging: blocks instead of reservations", paging),
        Chapter("Prefix sharing: equal beginnings are stored once", prefix_sharing),
        Chapter("Copy-on-write: several answers to one prompt", copy_on_write),
        Chapter("A full pool: evict, then preempt", full_pool),
        Chapter("A model on top: four answers at once", answers),
        Chapter("A restart: blocks survive on disk", restart),
    )
