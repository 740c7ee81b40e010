"""Turns and interrupts: one thread of one process is in an engine at a time, and Ctrl-C comes between its steps."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from quire.core.errors import RequestStateError
from quire.engine.process.interrupts import InterruptsDeferred
from quire.engine.process.ownership import Home, Turn

FORKED = (
    "this engine belongs to process {}, from which this one was forked; "
    "open an engine in each process, or start processes with 'spawn'"
)


def in_another_thread(work: object) -> None:
    thread = threading.Thread(target=work)  # type: ignore[arg-type]
    thread.start()
    thread.join(300)
    assert not thread.is_alive()


# ---- turns ---------------------------------------------------------------------------------------------------------


def test_a_thread_that_comes_while_another_is_in_is_refused_at_once() -> None:
    turn, errors = Turn(), list[Exception]()

    def come_in() -> None:
        try:
            with turn:
                pass
        except RequestStateError as error:
            errors.append(error)

    with turn:
        in_another_thread(come_in)
        come_in()
    assert [str(error) for error in errors] == [
        "this LLM is in use by another thread; use it from one thread, or AsyncLLM for many callers"
    ] * 2
    in_another_thread(come_in)
    assert len(errors) == 2, "who comes after is let in"


def test_a_turn_is_given_back_whatever_happened_in_it() -> None:
    turn = Turn()
    with pytest.raises(LookupError), turn:
        raise LookupError
    assert turn.take()
    assert not turn.take()
    turn.give()
    with turn:
        pass


def test_a_forked_process_has_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, home, parent = Turn(), Home(), os.getpid()
    home.require()
    assert home.is_here
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    assert (home.is_here, turn.take()) == (False, False)
    for refused in (home.require, turn.__enter__):
        with pytest.raises(RequestStateError) as caught:
            refused()
        assert str(caught.value) == FORKED.format(parent)
    monkeypatch.undo()
    with turn:
        pass


# ---- interrupts ----------------------------------------------------------------------------------------------------


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def interrupts_are_ours() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_comes_when_the_step_is_over() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), InterruptsDeferred():
        interrupt()
        interrupt()
        done.append("the step")
    assert done == ["the step"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with InterruptsDeferred():
        done.append("and another one")
    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_an_error_of_the_step_is_told_rather_than_the_interrupt() -> None:
    with pytest.raises(LookupError), InterruptsDeferred():
        interrupt()
        raise LookupError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_handles_interrupts_itself_goes_on_doing_so() -> None:
    seen = []
    handler = lambda number, frame: seen.append(number)  # noqa: E731
    signal.signal(signal.SIGINT, handler)
    with InterruptsDeferred():
        interrupt()
        assert seen == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_thread_beside_the_main_one_leaves_interrupts_alone() -> None:
    found = []

    def step() -> None:
        with InterruptsDeferred():
            found.append(signal.getsignal(signal.SIGINT))

    in_another_thread(step)
    assert found == [signal.default_int_handler]
