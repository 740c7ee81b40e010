"""The engine's thread: commands before steps, refusals to whom they concern, frames in time, and how it ends."""

from __future__ import annotations

import logging
import queue
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.clock import ManualClock
from quire.core.errors import ExecutionError, InvalidRequestError, QuireError
from quire.core.request import FinishReason
from quire.core.sampling_params import SamplingParams
from quire.engine.client import SequenceUpdate
from quire.engine.commands import Abort, Add, AskDisk, Clear, Survey, Watch
from quire.engine.process.engine_thread import STATS_EVERY_S, EngineCallbacks, EngineThread
from quire.engine.records.stats import EngineStats
from support.waiting import wait_until

UPDATE = SequenceUpdate("r", 0, [1], [], 0)
TIMEOUT_S = 300


class ScriptedClient:
    """An engine whose every step waits for the test to say what comes of it; commands are noted with the step."""

    def __init__(self, clock: ManualClock) -> None:
        self.steps: queue.Queue[Any] = queue.Queue()
        self.heard: queue.Queue[Any] = queue.Queue()
        self.refuses: dict[str, QuireError] = {}
        self.is_idle = True
        self.has_news = False
        self.ask_s: float | None = None
        self.frame_is_whole = True
        self.num_stats = 0
        self.num_to_store = 0
        self.cache_news: list[str | None] = []
        self._clock = clock

    def send(self, command: Any) -> None:
        self.heard.put(command)
        if (error := self.refuses.get(type(command).__name__)) is not None:
            raise error
        if isinstance(command, Add):
            self.is_idle = False
        if isinstance(command, AskDisk):
            self.num_to_store -= 1
            self.ask_s = 0.02 if self.num_to_store > 0 else None

    def receive(self) -> list[SequenceUpdate]:
        self.heard.put("step")
        outcome = self.steps.get(timeout=TIMEOUT_S)
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome == "idle":
            self.is_idle = True
            return []
        return list(outcome)

    def stats(self) -> EngineStats:
        self.num_stats += 1
        return EngineStats(steps_total=self.num_stats)

    def live(self) -> Any:
        self.has_news = not self.frame_is_whole
        return SimpleNamespace(is_whole=self.frame_is_whole)

    @property
    def has_cache_news(self) -> bool:
        return bool(self.cache_news)

    def take_cache_news(self) -> Any:
        return self.cache_news.pop(0) if self.cache_news else None

    def close(self) -> None:
        self.heard.put("close")


@dataclass
class Running:
    """A thread, and what it has called, in order."""

    client: ScriptedClient
    clock: ManualClock
    calls: queue.Queue[Any] = field(default_factory=queue.Queue)
    thread: EngineThread = field(init=False)

    def __post_init__(self) -> None:
        def call(name: str) -> Callable[[Any], None]:
            return lambda value: self.calls.put((name, value))

        callbacks = EngineCallbacks(*map(call, ("deliver", "fail", "tell", "show", "report")))
        self.thread = EngineThread(self.client, callbacks, self.clock)  # type: ignore[arg-type]

    def next_call(self, name: str) -> Any:
        """Return what it is called with next; counters between are left out."""
        while True:
            found, value = self.calls.get(timeout=TIMEOUT_S)
            if found == name:
                return value
            assert found == "tell", (found, value)

    def heard(self) -> Any:
        return self.client.heard.get(timeout=TIMEOUT_S)


@contextmanager
def running() -> Iterator[Running]:
    clock = ManualClock(100.0)
    found = Running(ScriptedClient(clock), clock)
    try:
        yield found
    finally:
        found.client.steps.put("idle")
        found.thread.close()
        assert "quire-engine" not in {thread.name for thread in threading.enumerate()}


def add(name: str = "r", n: int = 1) -> Add:
    return Add(name, array("i", [1, 2]), SamplingParams(n=n))


def test_commands_that_wait_are_carried_out_before_the_next_step() -> None:
    with running() as engine:
        engine.thread.send(add("a"))
        assert engine.heard() == add("a")
        assert engine.heard() == "step"
        for command in (add("b"), Abort("a"), Clear()):  # while the step is under way
            engine.thread.send(command)
        engine.client.steps.put([UPDATE])
        assert [engine.heard() for _ in range(4)] == [add("b"), Abort("a"), Clear(), "step"]
        assert engine.next_call("deliver") == [UPDATE]


def test_a_step_that_brings_nothing_delivers_nothing() -> None:
    with running() as engine:
        engine.thread.send(add())
        engine.client.steps.put([])
        engine.client.steps.put([UPDATE])
        assert engine.next_call("deliver") == [UPDATE]


def test_a_refused_request_ends_with_all_its_texts_and_the_engine_goes_on() -> None:
    with running() as engine:
        engine.client.refuses["Add"] = InvalidRequestError("n", 9, "less")
        engine.thread.send(add("bad", n=2))
        updates = engine.next_call("deliver")
        assert [(update.request_id, update.branch, update.finish_reason, update.error) for update in updates] == [
            ("bad", branch, FinishReason.ERROR, "n is 9; allowed: less") for branch in range(2)
        ]
        engine.client.refuses.clear()
        engine.thread.send(add("good"))
        assert engine.heard() == add("bad", n=2)
        assert engine.heard() == add("good")


@pytest.mark.parametrize("where", ["command", "step"])
def test_an_engine_that_breaks_ends_the_thread_and_says_why(where: str, caplog: pytest.LogCaptureFixture) -> None:
    with running() as engine, caplog.at_level(logging.CRITICAL, "quire.engine"):
        if where == "command":
            engine.client.refuses["Clear"] = ExecutionError("lost")
            engine.thread.send(Clear())
        else:
            engine.thread.send(add())
            engine.client.steps.put(ExecutionError("lost"))
        assert engine.next_call("fail") == "the engine has failed: ExecutionError: lost"
        engine.thread.send(add("late"))  # nobody carries it out, and nobody waits for it
        engine.thread.close()
        heard = []
        while not engine.client.heard.empty():
            heard.append(engine.heard())
        assert heard[-1] == "close"
        assert add("late") not in heard
        assert engine.thread.stack == "its thread has ended"


def test_it_is_asleep_while_there_is_nothing_to_do_and_each_step_is_a_turn() -> None:
    with running() as engine:
        wait_until(lambda: engine.thread.turn is None)
        engine.thread.send(add())
        seen = []
        for _ in range(3):
            while engine.heard() != "step":
                pass
            seen.append(engine.thread.turn)
            assert "in receive" in engine.thread.stack
            engine.client.steps.put([])
        assert None not in seen
        assert seen == sorted(set(seen))  # a watcher sees each step begin
        while engine.heard() != "step":
            pass
        engine.client.steps.put("idle")
        wait_until(lambda: engine.thread.turn is None)
        engine.thread.send(Clear())  # wakes it
        assert engine.heard() == Clear()


def test_counters_are_told_before_it_sleeps_and_now_and_then() -> None:
    with running() as engine:
        assert engine.calls.get(timeout=TIMEOUT_S) == ("tell", EngineStats(steps_total=1))
        engine.thread.send(add())
        assert [engine.heard(), engine.heard()] == [add(), "step"]
        engine.client.steps.put([UPDATE])
        assert engine.calls.get(timeout=TIMEOUT_S)[0] == "deliver"  # no time has passed: no counters
        assert engine.heard() == "step"
        engine.clock.advance(STATS_EVERY_S)
        engine.client.steps.put([UPDATE])
        assert [engine.calls.get(timeout=TIMEOUT_S)[0] for _ in range(2)] == ["deliver", "tell"]
        assert engine.heard() == "step"
        engine.client.steps.put("idle")
        assert engine.calls.get(timeout=TIMEOUT_S)[0] == "tell"


def test_frames_are_shown_when_they_are_due_and_parts_of_one_at_once() -> None:
    with running() as engine:
        client = engine.client
        client.has_news = True
        engine.thread.send(Watch(60.0))
        engine.next_call("show")  # the first at once, and the engine is idle
        engine.thread.send(add())
        assert [engine.heard() for _ in range(3)] == [Watch(60.0), add(), "step"]
        client.has_news = True
        client.steps.put([UPDATE])
        assert engine.next_call("deliver") == [UPDATE]
        assert engine.heard() == "step"
        assert client.has_news, "a frame was taken before its time"
        client.frame_is_whole = False  # what does not fit into one frame comes in several
        engine.clock.advance(60.0)
        for _ in range(2):
            client.steps.put([])
            engine.next_call("show")
            assert engine.heard() == "step"
        engine.thread.send(Watch(None))
        client.steps.put([])
        engine.next_call("show")  # this step was under way
        assert [engine.heard(), engine.heard()] == [Watch(None), "step"]
        client.steps.put([UPDATE])
        engine.next_call("deliver")


def test_what_can_be_hit_is_reported_before_the_updates_of_its_step_and_a_survey_while_the_engine_is_idle() -> None:
    with running() as engine:
        client = engine.client
        client.cache_news = ["begins", None, "more", None, "last"]  # parts of a survey; some have nothing to tell
        engine.thread.send(Survey())
        assert [engine.next_call("report") for _ in range(3)] == ["begins", "more", "last"]
        engine.thread.send(add())
        assert [engine.heard() for _ in range(3)] == [Survey(), add(), "step"]
        client.cache_news = ["published", "of the next step"]
        client.steps.put([UPDATE])
        assert [engine.next_call("report"), engine.next_call("deliver")] == ["published", [UPDATE]]
        client.steps.put([])
        assert engine.next_call("report") == "of the next step"


def test_an_idle_engine_asks_the_disk_until_all_is_stored() -> None:
    with running() as it:
        it.client.num_to_store, it.client.ask_s = 3, 0.02
        it.thread.send(Clear())
        assert [it.heard() for _ in range(4)] == [Clear(), AskDisk(), AskDisk(), AskDisk()]
        wait_until(lambda: it.client.ask_s is None)
    assert it.heard() == "close"
