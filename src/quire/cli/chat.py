"""`quire chat`: a conversation in the terminal, a line of a pipe for each turn, or one message of the command line.

Ctrl-C stops an answer, Ctrl-D leaves. Each prompt is the whole conversation so far; a line after the answer reports how
many of its tokens came from the prefix cache. The engine serves one person: its KV memory holds one sequence of the
model's context length, and is claimed from the system as the conversation grows.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from quire.cli import DONE, FAILED
from quire.cli.engine_options import add_engine_options, engine_config
from quire.cli.sampling_options import add_sampling_options, check_sampling, require_text, sampling_params
from quire.cli.session import chosen_adapter, describe, load, remark, stderr_terminal, stream_text, until_interrupted
from quire.cli.terminal import Terminal, add_color_option, detect
from quire.cli.turn_reader import pipe_reader, terminal_reader
from quire.cli.word_wrap import WordWrap
from quire.core.errors import InvalidRequestError, RequestTooLargeError
from quire.core.model_files import path_of
from quire.core.sampling_params import SamplingParams
from quire.engine.images.decoding import opened
from quire.engine.images.parts import SentImage
from quire.engine.near_names import meant_by

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.engine.outputs import RequestOutput
    from quire.engine.text.prompts import Message

HELP: Final = """/clear          start over
/system TEXT    start over with new instructions; without TEXT, with none
/image FILE     show the model an image with your next message
/?              this list (or /help)
/bye            leave (or /exit, Ctrl-D, Ctrl-C twice); Ctrl-C stops an answer"""

COMMANDS: Final = ("/clear", "/system", "/image", "/?", "/help", "/bye", "/exit", "/quit")
LEAVING: Final = ("/bye", "/exit", "/quit")

FOR_ONE: Final = MappingProxyType({"max_num_seqs": 1, "touch_kv_memory": "use"})
"""The default engine settings for one person."""

CALM: Final[Mapping[str, Any]] = MappingProxyType({"temperature": 0.7, "top_p": 0.95})
"""Sampling for a model whose makers recommend none: at temperature 1, small models ramble."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command `chat`. Mutates `subparsers`."""
    parser = subparsers.add_parser("chat", help="talk to a model", description="Talk to a model.")
    parser.add_argument("--system", default="", metavar="TEXT", help="system instructions for the conversation")
    parser.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="show the model an image with the first message"
    )
    talk = parser.add_mutually_exclusive_group()
    talk.add_argument("--quiet", "-q", action="store_true", help="print only the answers and errors")
    talk.add_argument("--verbose", "-v", action="store_true", help="print the model, its settings and memory first")
    add_sampling_options(parser)
    add_engine_options(parser)
    text = "the message: the model answers it and the command ends; none: a conversation"
    parser.add_argument("message", nargs="*", metavar="MESSAGE", help=text)
    add_color_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Talk until the user leaves. Returns the exit status."""
    config = engine_config(arguments, os.environ, FOR_ONE)
    check_sampling(sampling_params(arguments, SamplingParams()))
    message = " ".join(arguments.message)
    if arguments.message:
        require_text(message)
    terminal = stderr_terminal(arguments.color)
    with load(config, None if arguments.quiet else terminal) as llm:
        if llm.config.one_step:
            raise InvalidRequestError("model", config.model, "a model that generates text; quire embed uses this one")
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise InvalidRequestError(
                "model", config.model, "a model with a chat template; or use quire generate --raw"
            )
        is_watched = not message and sys.stdin.isatty()
        sampling, note = _sampling(arguments, llm)
        if not arguments.quiet:
            remark("\n".join([*_greeting(llm, arguments.verbose, is_watched), *note]), terminal)
        conversation = Conversation(llm, sampling, arguments.system, None if arguments.quiet else terminal)
        for file in arguments.image:
            conversation.show(file)
        if message:
            _take_turn(conversation, message, is_watched)
            return FAILED if conversation.has_failed else DONE
        return _talk(conversation, terminal_reader() if is_watched else pipe_reader(), is_watched)


def _greeting(llm: LLM, is_verbose: bool, is_watched: bool) -> list[str]:
    """Return the lines before the first turn."""
    report = llm.report
    lines = [str(report)] if is_verbose else list(report.notices)
    if is_watched:
        context = f"{report.plan.max_model_len:,} tokens of context"
        lines.append(f"{report.model}, {context}. Ask something; /? lists the commands, /bye leaves.")
    return lines


def _sampling(arguments: argparse.Namespace, llm: LLM) -> tuple[SamplingParams, list[str]]:
    """Return the sampling parameters, and a note if neither the model nor the user has set them."""
    defaults = llm.get_default_sampling_params()
    if llm.report.recommends_sampling or not vars(arguments).keys().isdisjoint(CALM):
        return sampling_params(arguments, defaults), []
    calm = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in CALM.items())
    note = f"The model recommends no sampling; quire chat uses {calm}."
    return sampling_params(arguments, replace(defaults, **CALM)), [note]


class Conversation:
    """The turns so far, and the model that answers. `terminal` None: without remarks. `has_failed`: a turn has."""

    def __init__(self, llm: LLM, sampling: SamplingParams, system: str, terminal: Terminal | None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._system = system
        self._terminal = terminal
        self._turns: list[Message] = []
        self._images: list[Message] = []  # for the next message
        self.has_failed = False

    def begin(self, system: str | None = None) -> None:
        """Forget the turns; a system text replaces the previous one. Mutates."""
        self._turns.clear()
        self._images.clear()
        if system is not None:
            self._system = system

    def show(self, file: str) -> None:
        """Read an image for the next message; raises `InvalidRequestError` if that is impossible. Mutates."""
        if not self._llm.report.reads_images:
            raise InvalidRequestError("image", file, "none: this model reads text only")
        content = SentImage("image", path_of(file)).content()
        opened(content, file)  # at once: later, it would cost the message
        self._images.append({"type": "image", "image": content, "where": file})

    def say(self, text: str, is_watched: bool = False) -> None:
        """Print the answer to a message and remember both. Mutates; an interrupt keeps the answer so far.

        `is_watched`: Ctrl-C waits for the end of a step, because the engine is used again afterwards.
        """
        before: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        content = [*self._images, {"type": "text", "text": text}] if self._images else text
        message: Message = {"role": "user", "content": content}
        self._images.clear()
        pieces: list[str] = []
        screen = detect(sys.stdout, os.environ)
        wrap = WordWrap(_print, screen.columns) if screen.interactive else None

        def write(piece: str) -> None:
            pieces.append(piece)
            (wrap.write if wrap is not None else _print)(piece)

        output = None
        try:
            messages = [*before, *self._turns, message]
            snapshots = self._llm.stream(messages, self._sampling, adapter=chosen_adapter(self._llm))
            with closing(snapshots), closing(until_interrupted(snapshots) if is_watched else snapshots) as shown:
                output = stream_text(shown, write)
        finally:
            if wrap is not None:
                wrap.end()
            if output is not None or pieces:
                self._turns += [message, {"role": "assistant", "content": "".join(pieces)}]
                print(flush=True)
        self._remark(output)

    def remark(self, text: str) -> None:
        """Write a remark to stderr, even with --quiet."""
        remark(text, self._terminal or Terminal())

    def fail(self, reason: str) -> None:
        """Say why a turn failed. Mutates."""
        self.has_failed = True
        self.remark(f"error: {reason}")

    def _remark(self, output: RequestOutput | None) -> None:
        if output is not None and output.error:
            self.fail(output.error)
        elif output is not None and self._terminal is not None:
            remark(describe(output, self._sampling.max_tokens), self._terminal)


_print = partial(print, end="", flush=True)


def _talk(conversation: Conversation, read: Callable[[], str], is_watched: bool) -> int:
    """Return the exit status: a user has seen what failed, a script needs to be told."""
    _take_turns(conversation, read, is_watched)
    return FAILED if conversation.has_failed and not is_watched else DONE


def _take_turns(conversation: Conversation, read: Callable[[], str], is_watched: bool) -> None:
    is_leaving = False
    while True:
        try:
            text = read().strip()
        except EOFError:
            if is_watched:
                print()
            return
        except KeyboardInterrupt:
            if not is_watched:
                raise
            print()
            if is_leaving:
                return
            is_leaving = True
            conversation.remark("Ctrl-C again leaves; so do Ctrl-D and /bye.")
            continue
        if not text:
            continue
        if text in LEAVING:
            return
        is_leaving = False
        try:
            _take_turn(conversation, text, is_watched)
        except KeyboardInterrupt:
            if not is_watched:
                raise
            conversation.remark("(stopped)")


def _take_turn(conversation: Conversation, text: str, is_watched: bool) -> None:
    command, _, rest = text.partition(" ")
    if command == "/clear":
        conversation.begin()
    elif command == "/system":
        conversation.begin(rest.strip())
    elif command == "/image":
        try:
            conversation.show(rest.strip())
        except InvalidRequestError as error:
            conversation.fail(str(error))
    elif command in ("/?", "/help"):
        conversation.remark(HELP)
    elif command.startswith("/") and "\n" not in text:
        hint = meant_by(command, COMMANDS)
        conversation.remark(f"{command} is not a command; {hint or '/? lists them'}")
    else:
        try:
            conversation.say(text, is_watched)
        except InvalidRequestError as error:
            advice = "; /clear starts over" if isinstance(error, RequestTooLargeError) else ""
            conversation.fail(f"{str(error).rstrip('.')}{advice}")
