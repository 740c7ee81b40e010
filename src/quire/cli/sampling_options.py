"""The sampling parameters, and the form of a text, as options of a command. Defaults are the model's own settings."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Final

from quire.cli.grammar_options import add_grammar_options, grammar
from quire.core.errors import InvalidRequestError
from quire.core.parameters import Integer
from quire.core.sampling_params import PARAMETERS, SamplingParams
from quire.core.validate import ANY_ENGINE, validate_sampling

FLAGS: Final = tuple(declared for declared in PARAMETERS.values() if declared.has_flag)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the sampling parameters that have a flag. Mutates the parser."""
    group = parser.add_argument_group("sampling", "the defaults are the model's own settings")
    for declared in FLAGS:
        kind, metavar = (int, "N") if isinstance(declared.kind, Integer) else (float, "X")
        name, text = f"--{declared.name.replace('_', '-')}", declared.help
        group.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")
    add_grammar_options(parser)


def check_sampling(sampling: SamplingParams) -> None:
    """Raise for a value that no engine allows: before a model is loaded, which may take minutes."""
    validate_sampling(sampling, ANY_ENGINE)


def require_text(prompt: str) -> None:
    """Raise if a prompt is empty: before a model is loaded."""
    if not prompt:
        raise InvalidRequestError("prompt", prompt, "a text of at least one character, with -p or from stdin")


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Return the defaults, overridden by the given options. Does not mutate."""
    names = [declared.name for declared in FLAGS]
    given: dict[str, Any] = {name: getattr(arguments, name) for name in names if name in vars(arguments)}
    return replace(defaults, stop=tuple(arguments.stop) or defaults.stop, grammar=grammar(arguments), **given)
