"""`quire chat`: a conversation in the terminal, or a line of a pipe for each turn.

Ctrl-C stops an answer, Ctrl-D leaves. After each answer a line says how many tokens of the prompt, which is all of the
conversation so far, came from the prefix cache.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from typing import TYPE_CHECKING

from quire.cli.engine_options import add_engine_options, engine_config
from quire.cli.sampling_options import add_sampling_options, sampling_params
from quire.cli.session import describe, load, remark, stderr_terminal, stream_text
from quire.cli.terminal import Terminal, add_color_option
from quire.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from quire.core.sampling_params import SamplingParams
    from quire.engine.llm import LLM
    from quire.engine.outputs import RequestOutput
    from quire.engine.text.prompts import Message

HELP = """/clear          start over
/system TEXT    start over with new instructions; without TEXT, with none
/help           this list
/exit           leave (or Ctrl-D); Ctrl-C stops an answer"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `chat`. Mutates `subparsers`."""
    parser = subparsers.add_parser("chat", help="talk to a model", description="Talk to a model.")
    parser.add_argument("--system", default="", metavar="TEXT", help="system instructions for the conversation")
    parser.add_argument("--quiet", "-q", action="store_true", help="print only the answers and errors")
    add_sampling_options(parser)
    add_engine_options(parser)
    add_color_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk until there is nothing more to say. Returns the exit status."""
    config = engine_config(arguments, os.environ)
    terminal = stderr_terminal(arguments.color)
    with load(config, None if arguments.quiet else terminal) as llm:
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise InvalidRequestError(
                "model", config.model, "a model with a chat template; or use quire generate --raw"
            )
        is_watched = sys.stdin.isatty()
        if not arguments.quiet:
            remark(str(llm.report), terminal)
            if is_watched:
                remark("Ask something; /help lists the commands.", terminal)
        sampling = sampling_params(arguments, llm.get_default_sampling_params())
        conversation = Conversation(llm, sampling, arguments.system, None if arguments.quiet else terminal)
        return _talk(conversation, _reader(is_watched), is_watched)


class Conversation:
    """The turns so far, and the model that answers. `terminal` None: without remarks."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str, terminal: Terminal | None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._system = system
        self._terminal = terminal
        self._turns: list[Message] = []

    def begin(self, system: str | None = None) -> None:
        """Forget the turns; a system text takes the place of the one before. Mutates."""
        self._turns.clear()
        if system is not None:
            self._system = system

    def say(self, text: str) -> None:
        """Print the answer to a message and remember both. Mutates; an interrupt keeps what there is of the answer."""
        before: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        message: Message = {"role": "user", "content": text}
        pieces: list[str] = []

        def write(piece: str) -> None:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()

        output = None
        try:
            with closing(self._llm.stream([*before, *self._turns, message], self._sampling)) as snapshots:
                output = stream_text(snapshots, write)
        finally:
            if output is not None or pieces:
                self._turns += [message, {"role": "assistant", "content": "".join(pieces)}]
                print(flush=True)
        self._remark(output)

    def remark(self, text: str) -> None:
        """Write a remark to stderr, whether or not it was to be quiet."""
        remark(text, self._terminal or Terminal())

    def _remark(self, output: RequestOutput | None) -> None:
        if output is not None and output.error:
            self.remark(f"error: {output.error}")
        elif output is not None and self._terminal is not None:
            remark(describe(output), self._terminal)


def _talk(conversation: Conversation, read: Callable[[], str], is_watched: bool) -> int:
    while True:
        try:
            text = read().strip()
            if text in ("/exit", "/quit"):
                return 0
            if text:
                _take_turn(conversation, text)
        except EOFError:
            if is_watched:
                print()
            return 0
        except KeyboardInterrupt:
            if not is_watched:
                raise
            conversation.remark("\n(stopped; Ctrl-D leaves)")


def _take_turn(conversation: Conversation, text: str) -> None:
    command, _, rest = text.partition(" ")
    if command == "/clear":
        conversation.begin()
    elif command == "/system":
        conversation.begin(rest.strip())
    elif command.startswith("/"):
        conversation.remark(HELP if command == "/help" else f"{command} is not a command; /help lists them")
    else:
        try:
            conversation.say(text)
        except InvalidRequestError as error:
            conversation.remark(f"error: {error}; /clear starts over")


def _reader(is_watched: bool) -> Callable[[], str]:
    """Return what reads a line and raises EOFError at the end."""
    if is_watched:
        with suppress(ImportError):
            import readline  # noqa: F401 - input() has its keys then
        return lambda: input("> ")

    def read() -> str:
        text = sys.stdin.readline()
        if not text:
            raise EOFError
        return text

    return read
