"""What `quire generate` and `quire chat` share: loading a model, remarks on stderr, text streamed to stdout."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from quire.cli.terminal import Terminal, detect
from quire.cli.text import FAINT, line, paragraph, span
from quire.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from quire.core.config import EngineConfig
    from quire.engine.llm import LLM
    from quire.engine.outputs import RequestOutput


def load(config: EngineConfig, terminal: Terminal | None) -> LLM:
    """Load a model, with its progress on the terminal of stderr. `terminal` None: show nothing."""
    from quire.core.clock import SystemClock
    from quire.engine.llm import LLM
    from quire.engine.progress import LoadingLine

    if terminal is None or not terminal.interactive:
        return LLM(config)
    clock = SystemClock()
    with closing(LoadingLine(sys.stderr, clock)) as progress:
        return LLM(config, clock=clock, note_loaded=progress.note)


def chosen_adapter(llm: LLM) -> str | None:
    """Return the adapter that a command uses: the first one named. Does not mutate."""
    return next(iter(llm.adapters), None)


def stderr_terminal(color: str) -> Terminal:
    """Return what stderr can show."""
    return detect(sys.stderr, os.environ, color)


def remark(text: str, terminal: Terminal) -> None:
    """Write a remark to stderr, faint where there are colours, wrapped on a terminal. Mutates the stream."""
    sys.stdout.flush()
    for part in text.splitlines():
        fits = not terminal.interactive or len(part) <= terminal.columns
        for each in [line(span(part, FAINT))] if fits else paragraph(part, terminal.columns, FAINT):
            print(terminal.render(each), file=sys.stderr)


def in_utf8(read: Callable[[], str], file: str = "stdin") -> str:
    """Return what `read` returns; raises `InvalidRequestError` if its bytes are not UTF-8."""
    try:
        text = read()
        text.encode()  # in some locales, Python makes half characters of other bytes
    except UnicodeError:
        raise InvalidRequestError("file", file, "a text in UTF-8") from None
    return text


def stream_text(snapshots: Iterable[RequestOutput], write: Callable[[str], object]) -> RequestOutput | None:
    """Write the text of the first output as it grows; return the last snapshot, or None."""
    num_written, last = 0, None
    for last in snapshots:
        text = last.outputs[0].text
        if len(text) > num_written:
            write(text[num_written:])
            num_written = len(text)
    return last


def until_interrupted(snapshots: Iterable[RequestOutput]) -> Generator[RequestOutput, None, None]:
    """Yield snapshots. Ctrl-C ends this between two of them with KeyboardInterrupt, never inside a step of the engine.

    Call it in the main thread: other threads receive no signals.
    """
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        for snapshot in snapshots:
            yield snapshot
            if interrupts:
                raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)


def describe(output: RequestOutput, max_tokens: int | None) -> str:
    """Return the statistics of an answer as one line, and whether a limit cut it off. Does not mutate."""
    metrics = output.metrics
    parts = [f"{metrics.num_generated_tokens} tokens"]
    if metrics.duration_s is not None:
        parts.append(f"{metrics.duration_s:.2f} s")
    if metrics.tokens_per_s is not None:
        parts.append(f"{metrics.tokens_per_s:.0f} tok/s")
    if 0 < metrics.num_steps < metrics.num_generated_tokens:
        parts.append(f"{metrics.tokens_per_step:.1f} tokens a step")
    parts.append(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens from the cache")
    cut = next((each for each in output.outputs if each.finish_reason == "length"), None)
    if cut is not None:
        parts.append("cut off by --max-tokens" if len(cut.token_ids) == max_tokens else "cut off: the context is full")
    return " · ".join(parts)
