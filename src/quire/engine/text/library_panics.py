"""Panics of the tokenizers library, as errors.

A panic of Rust is a `BaseException` in Python, so it would pass every `except Exception` and end the task or thread
that runs into it. A model's files can cause one: a regular expression that takes too long, a decoder that strips more
characters than a text has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Raise `RuntimeError` instead of a panic.

    >>> with panics_as_errors():
    ...     raise BaseException("out of range")
    Traceback (most recent call last):
        ...
    RuntimeError: the tokenizer failed: out of range
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise RuntimeError(f"the tokenizer failed: {error}") from error
