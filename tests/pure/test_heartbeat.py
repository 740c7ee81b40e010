"""Who is silent, who only idles, and who was not looked at: on a clock of the test."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.core.clock import ManualClock
from quire.engine.process import engine_host, heartbeat
from quire.engine.process.engine_host import FAILED, ORPHANED, EngineHost, MessageSocket
from quire.engine.process.engine_thread import EngineThread
from quire.engine.process.heartbeat import QUIET_S, Heart, Patience, Standstill
from quire.engine.process.messages import Beat, Failed, Message
from quire.engine.records.stats import ModelState
from quire.engine.replicas.replica import Replica
from quire.engine.replicas.settings import LOST_S, ReplicaSettings

HOUR_S = 3600


class EndedError(Exception):
    """Takes the place of the end of the process."""


@dataclass
class Connection:
    """What the heart of the engine needs of a connection."""

    num_received: int = 0
    sent: list[Message] = field(default_factory=list)
    is_closed: bool = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


@dataclass
class Engine:
    """An engine process whose heart the test beats."""

    clock: ManualClock
    connection: Connection
    host: EngineHost
    thread: SimpleNamespace

    def live(self, seconds: int, *, turns: bool = False, server: bool = True) -> None:
        for _ in range(seconds):
            self.clock.advance(1.0)
            self.connection.num_received += server
            if turns:
                self.thread.turn += 1
            self.host._beat()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr(engine_host.os, "_exit", end)
    clock, connection = ManualClock(), Connection()
    host = EngineHost(cast(MessageSocket, connection), clock)
    host._patience = Patience(max_step_s=300.0, max_silence_s=60.0)
    thread = SimpleNamespace(turn=None, stack="")
    host._thread = cast(EngineThread, thread)
    return Engine(clock, connection, host, thread)


def test_an_idle_engine_beats_for_ever(engine: Engine) -> None:
    engine.live(HOUR_S)
    assert engine.connection.sent == [Beat()] * HOUR_S
    engine.thread.turn = 1
    engine.live(299)  # and its first step may last as long as any


def test_steps_that_go_on_are_no_hang_however_long_it_takes(engine: Engine) -> None:
    engine.thread.turn = 0
    engine.live(HOUR_S, turns=True)


def test_a_step_that_does_not_end_is_told_and_ends_the_engine(engine: Engine) -> None:
    engine.thread.turn = 5
    with pytest.raises(EndedError, match=str(FAILED)):
        engine.live(HOUR_S)
    assert 300 < engine.clock.now() < 310
    assert engine.connection.sent[-1] == Failed("a step took more than 300 s (max_step_s)")
    assert engine.connection.is_closed


def test_a_server_that_is_silent_is_left(engine: Engine) -> None:
    engine.live(5)
    with pytest.raises(EndedError, match=str(ORPHANED)):
        engine.live(HOUR_S, server=False)
    assert 60 < engine.clock.now() < 70


def test_a_server_that_has_died_is_left(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.live(5)
    another = engine.host._parent + 1  # not 1: in a container that may be who started these tests
    monkeypatch.setattr(engine_host.os, "getppid", lambda: another)
    engine.live(1)  # its connection is given time to end
    with pytest.raises(EndedError, match=str(ORPHANED)):
        engine.live(1)


def test_while_it_is_built_nobody_reads_and_that_is_no_silence(engine: Engine) -> None:
    engine.host._thread = None
    engine.live(HOUR_S, server=False)


def test_no_limits(engine: Engine) -> None:
    engine.host._patience = Patience(None, None)
    engine.thread.turn = 5
    engine.live(HOUR_S, server=False)


@pytest.mark.parametrize("away_s", [120.0, 1e6])
def test_a_time_in_which_nobody_ran_accuses_nobody(engine: Engine, away_s: float) -> None:
    """A machine that slept, a container that was frozen: both sides come back, in whatever order."""
    engine.thread.turn = 5
    engine.live(2)
    engine.clock.advance(away_s)
    engine.live(3, server=False)
    engine.live(HOUR_S, turns=True)


# ---- the side of the server -----------------------------------------------------------------------------------------


class Judged:
    """What the judge needs of a connection."""

    process_id = 1

    def __init__(self) -> None:
        self.num_kills = 0

    def kill(self) -> None:
        self.num_kills += 1


class Owner:
    """Notes when a replica has changed."""

    def __init__(self) -> None:
        self.states: list[ModelState] = []

    def replica_changed(self, replica: Replica) -> None:
        self.states.append(replica.state)


def judged(silence_s: float | None) -> tuple[Replica, Judged, Owner]:
    owner, connection = Owner(), Judged()
    replica = Replica(0, cast(Any, None), cast(Any, owner), ManualClock(), silence_s)
    replica._connection, replica.state = cast(Any, connection), ModelState.READY
    return replica, connection, owner


def test_a_silent_engine_is_first_not_ready_and_then_killed() -> None:
    replica, connection, owner = judged(60.0)
    for silent_s, state, num_kills in (
        (QUIET_S - 1, ModelState.READY, 0),
        (QUIET_S, ModelState.UNRESPONSIVE, 0),
        (60.0, ModelState.UNRESPONSIVE, 0),
        (61.0, ModelState.UNRESPONSIVE, 1),
    ):
        replica.judge(silent_s)
        assert (replica.state, connection.num_kills) == (state, num_kills)
    assert replica.state.has_engine
    assert "silent" in replica.failure
    assert owner.states == [ModelState.UNRESPONSIVE]


def test_an_engine_that_is_being_built_is_not_judged() -> None:
    replica, connection, _ = judged(60.0)
    replica.state = ModelState.STARTING
    replica.judge(1e6)
    assert (replica.state, connection.num_kills) == (ModelState.STARTING, 0)


def test_without_a_limit_a_silent_engine_is_not_ready_and_lives() -> None:
    replica, connection, _ = judged(None)
    replica.judge(1e6)
    assert (replica.state, connection.num_kills) == (ModelState.UNRESPONSIVE, 0)


def test_where_others_can_go_on_a_silent_engine_is_lost_sooner() -> None:
    assert ReplicaSettings(patience=Patience(max_silence_s=60.0)).silence_s == 60.0
    assert ReplicaSettings(3, patience=Patience(max_silence_s=60.0)).silence_s == LOST_S
    assert ReplicaSettings(3, patience=Patience(max_silence_s=6.0)).silence_s == 6.0
    assert ReplicaSettings(3, patience=Patience(max_silence_s=None)).silence_s is None


def test_a_look_counts_for_two_beats_at_most() -> None:
    clock = ManualClock()
    still = Standstill(clock)
    still.look(1)
    for _ in range(3):
        clock.advance(1000.0)
        seconds = still.look(1)
    assert seconds == 6.0
    assert still.look(None) == still.look(1) == 0.0


def test_a_heart_beats_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.001)
    beats = threading.Semaphore(0)
    heart = Heart(beats.release)
    for _ in range(3):
        assert beats.acquire(timeout=300)
    heart.stop()
    heart.stop()
