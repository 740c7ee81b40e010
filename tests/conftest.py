"""What all tests share: how hard Hypothesis tries, and what long tests print at the end.

`make test` runs the same examples every time. `make test-long` (QUIRE_TEST_LONG=1) draws new ones, and prints how to
repeat what fails.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts its background jobs deaf to Ctrl-C, and what they start inherits it; tests of Ctrl-C need ears.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where this is set, each of a thousand commands that tests start compiles the whole package again: a fifth of the time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile("short", deadline=None, print_blob=True, derandomize=True, max_examples=40)
settings.register_profile("long", deadline=None, print_blob=True, max_examples=2000)
settings.load_profile("long" if os.environ.get("QUIRE_TEST_LONG") == "1" else "short")


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """Undo what a server did that ran in this process: its log is a stream that ends with the test."""
    loggers = [
        logging.getLogger(name) for name in ("quire", "quire.engine", "uvicorn.error", "asyncio", "opentelemetry")
    ]
    before = [(each.level, each.handlers, each.propagate, each.filters) for each in loggers]
    yield
    for logger, (level, *rest) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers, logger.propagate, logger.filters = rest


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among tens of thousands of tests: not while they are found, and not while they run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many steps the state machines took, all processes together."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    counts = [
        number
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, number in report.user_properties
        if name == "rule_steps"
    ]
    if counts:
        terminalreporter.write_line(f"state machines: {sum(counts):,} rule steps in {len(counts):,} configurations")
