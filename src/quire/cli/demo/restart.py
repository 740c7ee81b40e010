"""Chapter 6: an engine ends, and the next one reads computed blocks from disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from tempfile import TemporaryDirectory

from quire.cli.demo.answers import QUESTIONS, STEPS_TOGETHER, AnsweringEngine
from quire.cli.demo.scene import Scene
from quire.core.clock import SystemClock


def restart() -> Iterator[Scene]:
    """Two questions to one engine, one to the next, with a disk cache in a temporary folder."""
    first, second, third, _ = QUESTIONS
    with TemporaryDirectory(prefix="quire-demo-") as folder:
        with closing(AnsweringEngine(SystemClock(), folder)) as engine:
            engine.ask(*first)
            engine.steps()
            request = engine.ask(*second)
            pictures = engine.steps()[-1:]
            yield Scene(
                "With --disk-cache, blocks that were hit are also written to a file",
                f"B hit {request.num_cached_tokens} tokens of A, its system prompt. So these blocks are worth keeping: "
                "they are written in the background. Then the engine ends, and its memory is gone.",
                pictures,
            )
        with closing(AnsweringEngine(SystemClock(), folder)) as engine:
            request = engine.ask(*third)
            pictures = engine.steps(STEPS_TOGETHER)[-1:]
            yield Scene(
                "A new engine: its memory is empty, the file is not",
                f"C has the same system prompt. {request.num_disk_tokens} of the {request.num_prompt_tokens} tokens of "
                "its prompt came from disk, with the same bits as if computed, and only the others were computed. "
                "A block from disk has a d after its number, and its own colour.",
                pictures,
            )
