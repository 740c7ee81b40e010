"""Files: writing one, and errors that name the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quire.cli.simulate.progress import ProgressLine
from quire.core.errors import StepLogError


def write_text(path: str, text: str) -> None:
    """Write a text to a file, in UTF-8."""
    write_bytes(Path(path), text.encode("utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, and create its folder: a long run must not end with an error about a missing folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def show_results(results: object, as_json: Callable[[], str], file: str | None) -> None:
    """Print results, or their JSON if `file` is "-"; write their JSON to any other file."""
    print(as_json() if file == "-" else results)
    if file is not None and file != "-":
        write_text(file, as_json() + "\n")


def remark_torn(path: str, why: str, progress: ProgressLine) -> None:
    """Report that the end of a step log is missing."""
    progress.remark(f"{path}: {why}; everything before that was read")


@contextmanager
def named_after(path: str) -> Iterator[None]:
    """Add the name of the file to errors about a step log."""
    try:
        yield
    except StepLogError as error:
        raise type(error)(f"{path}: {error}") from error
