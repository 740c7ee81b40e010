"""The sampling parameters as options of a command; what is not given comes from the model's own settings."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from quire.core.sampling_params import SamplingParams

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
NAMES = ("max_tokens", "temperature", "top_p", "top_k", "min_p", *PENALTIES, "seed")


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Give a command the sampling parameters. Mutates the parser."""
    group = parser.add_argument_group("sampling", "where nothing is said, as the makers of the model want it")
    for name, kind, text in (
        ("max-tokens", int, "tokens to generate at most (default: as many as fit)"),
        ("temperature", float, "0: always the likeliest token"),
        ("top-p", float, "of the likeliest tokens, as many as have this probability together"),
        ("top-k", int, "so many of the likeliest tokens; 0: all"),
        ("min-p", float, "tokens at least so likely, compared with the likeliest"),
        ("repetition-penalty", float, "above 1: tokens of prompt and text become less likely; 1: off"),
        ("presence-penalty", float, "above 0: tokens of the text become less likely; 0: off"),
        ("frequency-penalty", float, "above 0: the less likely, the more often they stand there; 0: off"),
        ("seed", int, "where random numbers come from: the same seed, the same text"),
    ):
        metavar = "N" if kind is int else "X"
        group.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def sampling_params(arguments: argparse.Namespace, defaults: SamplingParams) -> SamplingParams:
    """Return the defaults with what was given put in. Does not mutate."""
    given: dict[str, Any] = {name: getattr(arguments, name) for name in NAMES if name in vars(arguments)}
    return replace(defaults, stop=tuple(arguments.stop), **given)
