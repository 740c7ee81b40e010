"""The flags that benchmarks share, and the checks of their values."""

from __future__ import annotations

import argparse

from quire.cli.engine_options import add_engine_options
from quire.core.byte_sizes import parse_bytes
from quire.core.errors import InvalidConfigError

SHAPES = ("qwen3-0.6b", "llama-3.2-1b", "qwen3.5-0.8b", "gemma-4-e2b", "smolvlm-256m", "tiny")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for output files. Mutates the parser."""
    parser.add_argument("--json", metavar="FILE", help="write all results as JSON, including every sample")
    parser.add_argument("--markdown", metavar="FILE", help="also write the printed report to a file")
    parser.add_argument(
        "--title", metavar="TEXT", help="title of the report in that file; replaces a report with the same title"
    )


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the settings of an engine, and a shape as an alternative to a model. Mutates the parser."""
    add_engine_options(parser)
    parser.add_argument(
        "--shape",
        metavar="NAME",
        choices=SHAPES,
        help=f"instead of MODEL, random weights in the shape of: {', '.join(SHAPES)}",
    )


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add only the model. Mutates the parser."""
    parser.add_argument("model", nargs="?", default="guide", metavar="MODEL", help="model folder; default: the guide")


def add_count(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    """Add a whole number of 1 or more. Mutates the parser."""
    parser.add_argument(f"--{name}", metavar="N", type=count, default=default, help=f"{text}; default: {default}")


def add_counts(parser: argparse.ArgumentParser, name: str, default: tuple[int, ...], text: str) -> None:
    """Add whole numbers of 1 or more. Mutates the parser."""
    shown = " ".join(map(str, default))
    parser.add_argument(
        f"--{name}", metavar="N", type=count, nargs="+", default=default, help=f"{text}; default: {shown}"
    )


def add_seconds(parser: argparse.ArgumentParser, name: str, default: float, text: str) -> None:
    """Add a time. Mutates the parser."""
    parser.add_argument(f"--{name}", metavar="S", type=seconds, default=default, help=f"{text}; default: {default:g}")


def add_size(parser: argparse.ArgumentParser, name: str, default: str, text: str) -> None:
    """Add a number of bytes. Mutates the parser."""
    parser.add_argument(
        f"--{name}", metavar="SIZE", type=size, default=size(default), help=f"{text}; default: {default}"
    )


def add_choices(
    parser: argparse.ArgumentParser, name: str, choices: tuple[str, ...], default: tuple[str, ...], text: str
) -> None:
    """Add a choice of names. Mutates the parser."""
    shown = ", ".join(choices)
    parser.add_argument(
        f"--{name}", metavar="NAME", nargs="+", choices=choices, default=default, help=f"{text}: {shown}"
    )


def count(text: str) -> int:
    """Return a whole number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def seconds(text: str) -> float:
    """Return a time."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def share(text: str) -> float:
    """Return a share below 1."""
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be 0 or more, and less than 1")
    return value


def size(text: str) -> int:
    """Return a number of bytes, 1 KiB or more."""
    try:
        size = parse_bytes(text)
    except InvalidConfigError as error:
        raise argparse.ArgumentTypeError(f"must be {error.allowed}") from None
    if size < 1 << 10:
        raise argparse.ArgumentTypeError("must be 1KiB or more")
    return size


def decode_load(text: str) -> tuple[int, int]:
    """Return sequences and their tokens, as 8x2048."""
    sequences, _, tokens = text.partition("x")
    return count(sequences), count(tokens)
