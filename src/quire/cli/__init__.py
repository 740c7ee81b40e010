"""The command line of quire.

A subcommand is a module with `add_parser(subparsers)`, which sets `run`: a function from the parsed arguments to the
exit status, one of `STATUSES`. Only the module of the command that is run is imported, so that `quire --help` answers
at once.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final, NamedTuple, NoReturn

import quire
from quire.core.errors import DoesNotFitError, InvalidValueError, QuireError

AMBIGUOUS: Final = re.compile(r"ambiguous option: (\S+) could match ")
INVALID_CHOICE: Final = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")
DONE, FAILED, MISUSED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
STATUSES: Final = {
    DONE: "done",
    FAILED: "failed",
    MISUSED: "wrong usage, or a value that is not allowed",
    INTERRUPTED: "interrupted",
    PIPE_CLOSED: "the reader of the output closed it early",
}
"""Every exit status of every command."""

FIRST_STEPS: Final = """first steps:
  quire chat                talk to the built-in guide to quire
  quire models              see the models on this machine
  quire models pull ORGANISATION/NAME
  quire serve NAME          then open http://127.0.0.1:8000/"""
"""The end of the help, for new users."""

ASIDE: Final = ("-h", "--help", "--version")


class Command(NamedTuple):
    """A subcommand, and the module that implements it."""

    name: str
    help: str
    module: str


COMMANDS = (
    Command("chat", "talk to a model", "quire.cli.chat"),
    Command("generate", "continue a prompt", "quire.cli.generate"),
    Command("serve", "serve a model over HTTP, to clients of OpenAI, Anthropic and Ollama", "quire.cli.serve"),
    Command("cluster", "join machines to hold the engines of one model", "quire.cli.cluster"),
    Command("embed", "make vectors of texts", "quire.cli.embed"),
    Command("demo", "watch paged KV memory at work, in the terminal", "quire.cli.demo"),
    Command("bench", "measure quire on this machine", "quire.instruments.bench"),
    Command("torture", "attack a server and check that it copes", "quire.instruments.torture"),
    Command("simulate", "simulate hours of traffic in seconds with the real scheduler", "quire.cli.simulate"),
    Command("report", "analyse a server's step log and suggest better settings", "quire.cli.report"),
    Command("models", "list the models on this machine, fetch one, remove one", "quire.cli.models"),
    Command("cache", "list, verify, copy or erase the blocks of a disk cache", "quire.cli.cache"),
    Command("plan", "estimate what fits, how fast, and the best settings", "quire.cli.plan"),
    Command("doctor", "check what works on this machine", "quire.cli.doctor"),
    Command("config", "show the settings quire would use, and where each comes from", "quire.cli.config"),
)


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports wrong arguments in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        choice, begun = INVALID_CHOICE.search(message), AMBIGUOUS.match(message)
        if choice is not None or begun is not None:
            from quire.engine.near_names import counterpart, meant_by

            if choice is not None:
                message += _after(meant_by(choice[1], re.findall(r"'([^']*)'", choice[2])))
            elif begun is not None:  # another program's option can be a prefix of several of ours
                message += _after(counterpart(begun[1], self._flags()))
        self.exit(MISUSED, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments here, where the known ones are at hand for a hint."""
        parsed, unknown = super().parse_known_args(args, namespace)
        names = next((each.dest for each in self._actions if not each.option_strings and each.nargs == "*"), "")
        if names and not any(word.startswith("-") for word in unknown):  # argparse takes none after an option
            setattr(parsed, names, [*(getattr(parsed, names, None) or ()), *unknown])
            return parsed, []
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{_after(self._meant(unknown))}")
        return parsed, unknown

    def _meant(self, unknown: Sequence[str]) -> str:
        from quire.engine.near_names import meant_by

        first = next((word for word in unknown if word.startswith("-")), "")
        if not first and "-p" in self._flags():
            return f"give a text with -p: -p {shlex.quote(' '.join(unknown))}"
        return meant_by(first or unknown[0], self._flags())

    def _flags(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]


def _after(hint: str) -> str:
    return f"; {hint}" if hint else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status. Errors that a user can cause are printed, not raised."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if sys.stdout is None:  # closed by our caller
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        status = _run(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return PIPE_CLOSED
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "quire":
            raise
        package = error.name.partition(".")[0]
        print(f"quire: error: this needs the package {package}: pip install {package}", file=sys.stderr)
        return FAILED
    except (QuireError, OSError) as error:
        print("quire: error:", _in_one_line(error) + _fitting_command(error, arguments), file=sys.stderr)
        _forget_stdout()
        return MISUSED if isinstance(error, InvalidValueError) else FAILED


def _in_one_line(error: QuireError | OSError) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(text.split())


def _fitting_command(error: Exception, arguments: Sequence[str]) -> str:
    """Return the typed command with flags that make the model fit; empty if none are known."""
    flags = error.flags.split() if isinstance(error, DoesNotFitError) else []
    if not flags:
        return ""
    names = flags[::2]
    kept = [
        each
        for before, each in zip(["", *arguments], arguments, strict=False)
        if before not in names and each.partition("=")[0] not in names
    ]
    return f". This fits: {shlex.join(['quire', *kept, *flags])}"


def _run(arguments: list[str]) -> int:
    if arguments and arguments[0] not in ASIDE:
        from quire.cli.habits import as_quire

        arguments, answer = as_quire(arguments)
        if answer:
            print(f"quire: error: {answer}", file=sys.stderr)
            return MISUSED
    parser = _make_parser(arguments)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as request:  # --help, --version, or an error that the parser has printed
        return request.code if isinstance(request.code, int) else 0
    if "run" not in options:
        parser.print_help()
        return MISUSED
    status: int = options.run(options)
    return status


def _make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser. Only the named command gets its options."""
    statuses = "\n".join(f"  {status:<5}{meaning}" for status, meaning in STATUSES.items())
    parser = OneLineParser(
        prog="quire",
        description="Serve large language models from paged KV memory.",
        epilog=f"{FIRST_STEPS}\n\nexit status:\n{statuses}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    named = next((argument for argument in arguments if not argument.startswith("-")), "")
    for command in COMMANDS:
        if command.name == named:
            import_module(command.module).add_parser(subparsers)
        else:
            subparsers.add_parser(command.name, help=command.help)
    return parser


def _forget_stdout() -> None:
    """Redirect stdout to the null device: its reader is gone, and the interpreter flushes stdout at exit."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
