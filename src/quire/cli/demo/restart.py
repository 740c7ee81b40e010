"""Chapter 6: an engine is ended and started again, and finds on the disk what it has computed before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from tempfile import TemporaryDirectory

from quire.cli.demo.answers import QUESTIONS, STEPS_TOGETHER, AnsweringEngine
from quire.cli.demo.scene import Scene
from quire.core.clock import SystemClock


def restart() -> Iterator[Scene]:
    """Two questions to one engine, one to the next, with a disk cache in a folder that is removed afterwards."""
    first, second, third, _ = QUESTIONS
    with TemporaryDirectory(prefix="quire-demo-") as folder:
        with closing(AnsweringEngine(SystemClock(), folder)) as engine:
            engine.ask(*first)
            engine.steps()
            request = engine.ask(*second)
            pictures = engine.steps()[-1:]
            yield Scene(
                "With --disk-cache, what is hit is also written to a file",
                f"B hit {request.num_cached_tokens} tokens of A, its system prompt. So these blocks are worth keeping: "
                "they are written behind the answers. Then the engine ends, and its memory is gone.",
                pictures,
            )
        with closing(AnsweringEngine(SystemClock(), folder)) as engine:
            request = engine.ask(*third)
            pictures = engine.steps(STEPS_TOGETHER)[-1:]
            yield Scene(
                "A new engine: its memory is empty, the file is not",
                f"C has the same system prompt. {request.num_disk_tokens} of the {request.num_prompt_tokens} tokens of "
                "its prompt came from disk, compared like any hit and with the same bits, and only the others were "
                "computed. A block that came from disk has a d behind its number, and a colour of its own.",
                pictures,
            )
