"""Frames of whole engines: put together, they are the engine; and nobody can tell that it was watched.

The engines are those of `support.simulation`: aborts, failures, drafts, beams, swaps, resets, two tenants. The journal
of blocks alone has its oracle in `test_memory_machine`.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.core.request import CacheScope
from quire.engine.records.live import GONE_COLUMNS, MOST_UNSEEN, REQUEST_COLUMNS, LiveJournal, packed, unpacked
from quire.engine.records.stats import EngineStats
from quire.scheduler.journal import EventKind
from support.control import Control
from support.live_picture import LivePicture
from support.simulation import Scenario, Simulation

NUM_SHARDS = 2
SEEDS_PER_SHARD = 15


class WatchedSimulation(Simulation):
    """A simulation that somebody watches from the action `begins` on. How often frames are taken is drawn."""

    def __init__(self, scenario: Scenario, begins: int) -> None:
        super().__init__(scenario)
        self._begins = begins
        self._luck = random.Random(scenario.seed + 2)
        self._pause = self._luck.choice([1, 1, 2, 5])
        self.journal = None if begins else LiveJournal(self.scheduler, began_s=0.0)
        self.picture = LivePicture(self.scheduler)
        self.num_checks = 0

    def _advance(self) -> None:
        if self.journal is None and self.num_actions >= self._begins:
            self.journal = LiveJournal(self.scheduler, began_s=0.0)
        super()._advance()
        if self.journal is not None:
            self.journal.stamp(float(self.num_actions))
            if self.num_actions % self._pause == 0:
                self.take()

    def take(self) -> None:
        assert self.journal is not None
        self.picture.take_in(self.journal.take(float(self.num_actions), EngineStats()))
        self.picture.check()
        self.num_checks += 1

    def _check_nothing_left(self) -> None:
        if self.journal is not None:
            self.take()
            assert self.picture.mirror is not None
            assert not self.picture.mirror.requests
            if self._begins == 0:
                self.picture.check_events(self.requests, self.scheduler.num_preemptions, self.memory.pool.num_evictions)
        super()._check_nothing_left()


@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_frames_add_up_to_the_engine_and_events_to_what_happened(shard: int) -> None:
    num_events = 0
    for seed in range(shard * SEEDS_PER_SHARD, (shard + 1) * SEEDS_PER_SHARD):
        watched = WatchedSimulation(Scenario.draw(seed), begins=0)
        watched.run()
        assert watched.num_checks > 0
        num_events += len(watched.picture.events)
    assert num_events > 100


def test_whoever_begins_to_watch_late_sees_the_same() -> None:
    num_late = 0
    for seed in range(200, 216):
        watched = WatchedSimulation(Scenario.draw(seed), begins=3 + seed % 20)
        watched.run()
        num_late += watched.num_checks > 1
    assert num_late > 5


def test_nobody_can_tell_that_an_engine_was_watched() -> None:
    for seed in range(10):
        alone, watched = Simulation(Scenario.draw(seed)), WatchedSimulation(Scenario.draw(seed), begins=0)
        alone.run(), watched.run()
        assert alone.plans.digest() == watched.plans.digest()


def watched_control(**settings: Any) -> tuple[Control, LiveJournal, LivePicture]:
    control = Control(**settings)
    return control, LiveJournal(control.scheduler, began_s=0.0), LivePicture(control.scheduler)


def test_a_journal_that_is_closed_is_not_told_anything() -> None:
    control, journal, _ = watched_control()
    journal.take(0.0, EngineStats())
    journal.close()
    control.add("a", [1, 2, 3], max_tokens=3)
    control.run()
    assert control.memory.pool.journal is None
    assert not journal.has_news


def test_a_frame_tells_only_what_has_changed() -> None:
    control, journal, picture = watched_control(num_blocks=1 << 12)
    picture.take_in(journal.take(0.0, EngineStats()))
    control.add("a", list(range(10)), max_tokens=20)
    for _ in range(4):
        control.step()
    frame = journal.take(1.0, EngineStats())
    assert len(list(unpacked(frame.blocks, 6))) == 4
    assert len(list(unpacked(frame.requests, 10))) == 1
    assert frame.is_whole and not frame.begins
    idle = journal.take(1.0, EngineStats())
    assert (idle.blocks, idle.gone, idle.events, idle.tenants) == (b"", b"", b"", [])


def test_requests_that_begin_and_end_between_two_frames_are_in_the_second_in_their_order() -> None:
    control, journal, picture = watched_control()
    picture.take_in(journal.take(0.0, EngineStats()))
    finished = control.add("finished", [1, 2, 3], max_tokens=2, scope=CacheScope("a"))
    control.run()
    control.add("aborted", [4, 5], max_tokens=5, scope=CacheScope("b"))
    control.scheduler.abort("aborted")
    control.add("last", [6], max_tokens=1, scope=CacheScope("a"))
    control.run()
    picture.take_in(journal.take(1.0, EngineStats()))
    picture.check()
    shown = [(row.engine_id, row.num_prompt_tokens, row.num_computed, row.num_known) for row in picture.ended]
    assert shown == [("finished", 3, finished.num_computed, 5), ("aborted", 2, 0, 2), ("last", 1, 1, 2)]
    assert [event.request for event in picture.events if event.kind != EventKind.ADMITTED] == [0, 1, 2]
    assert journal.take(2.0, EngineStats()).gone == b""


def test_a_frame_has_the_newest_short_requests_of_each_tenant_and_no_more() -> None:
    control, journal, picture = watched_control()
    picture.take_in(journal.take(0.0, EngineStats()))
    control.add("alone", [1, 2], max_tokens=1, scope=CacheScope("b"))
    control.run()
    sizes = []
    for turn in range(3):
        for number in range(100):
            control.add(f"{turn}-{number}", [number % 50, 3], max_tokens=1, scope=CacheScope("a"))
        control.run()
        frame = journal.take(float(turn), EngineStats())
        sizes.append((len(frame.requests), len(frame.gone), len(frame.ids)))
        picture.take_in(frame)
        picture.check()
    newest = [f"{turn}-{number}" for turn in range(3) for number in range(100 - MOST_UNSEEN, 100)]
    assert [row.engine_id for row in picture.ended] == ["alone", *newest]
    size = 4 * REQUEST_COLUMNS * MOST_UNSEEN, 4 * GONE_COLUMNS * MOST_UNSEEN, MOST_UNSEEN
    assert sizes[1:] == [size, size]
    assert sum(event.kind == EventKind.FINISHED for event in picture.events) == 301


def test_rows_that_are_cut_short_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(unpacked(packed([(1, 2, 3)]), 2))
