"""When a set of engines gets one more, and when one less: bounds, patience, and no change without a reason."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import InvalidConfigError
from quire.routing.router import Router
from quire.routing.scaling import IDLE_FOR_S, MOST_WAIT_S, WAITS_FOR_S, Load, Scaling
from quire.simulate.replica import PagedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.scaled import ScalingPlan
from quire.simulate.simulation import Simulation
from quire.simulate.workload.offered import OfferedRequest, OpenLoop
from support.simulated_engines import SMALL, Answers

RATE = 100
"""Prompt tokens that an engine computes in a second."""


class Model:
    """A set of engines with a queue in front, a second at a time, that does what it is told after a while."""

    def __init__(self, least: int, most: int, start_s: int) -> None:
        self.scaling = Scaling(least, most)
        self.num_engines = self.num_ready = least
        self.start_s = start_s
        self.now_s = 0
        self.changes: list[tuple[int, int]] = []  # when, and by how many
        self.waits: list[float] = []
        self._coming: list[int] = []
        self._num_waiting = self._num_done = 0

    def second(self, num_tokens: int) -> None:
        """Let a second pass in which this many tokens come."""
        self.num_ready += self._coming.count(self.now_s)
        done = min(self._num_waiting + num_tokens, RATE * self.num_ready)
        num_busy = min(self.num_ready, -(-done // RATE))
        self._num_waiting += num_tokens - done
        self._num_done += done
        load = Load(self.num_engines, self.num_ready, num_busy, self._num_waiting, self._num_done)
        change = self.scaling.look(self.now_s, load)
        self.waits.append(self.scaling.wait_s)
        if change:
            self.changes.append((self.now_s, change))
            self.num_engines += change
            if change > 0:
                self._coming.append(self.now_s + self.start_s)
            else:
                self.num_ready -= 1
        self.now_s += 1


BOUNDS = st.tuples(st.integers(1, 4), st.integers(0, 4)).map(lambda drawn: (drawn[0], sum(drawn)))


@settings(deadline=None)
@given(BOUNDS, st.integers(1, 40), st.lists(st.tuples(st.integers(0, 900), st.integers(1, 700)), max_size=8))
def test_each_change_has_its_reason_and_stays_within_bounds(
    bounds: tuple[int, int], start_s: int, loads: list[tuple[int, int]]
) -> None:
    least, most = bounds
    model = Model(least, most, start_s)
    for num_tokens, seconds in loads:
        for _ in range(seconds):
            model.second(num_tokens)
            assert least <= model.num_engines <= most
            assert model.num_engines - model.num_ready in (0, 1), "one change at a time"
    before_s = -1
    for at_s, change in model.changes:
        patience_s = round(WAITS_FOR_S if change > 0 else IDLE_FOR_S)
        assert at_s - before_s > patience_s, "each change is waited for again"
        lately = model.waits[at_s - patience_s : at_s + 1]
        assert all((wait_s > MOST_WAIT_S) == (change > 0) for wait_s in lately)
        before_s = at_s


@settings(deadline=None)
@given(BOUNDS, st.integers(1, 40), st.integers(0, 900), st.integers(0, 900))
def test_under_a_steady_load_the_number_goes_one_way_and_stays(
    bounds: tuple[int, int], start_s: int, first: int, then: int
) -> None:
    """Whatever was before: more and less never take turns."""
    model = Model(*bounds, start_s)
    for _ in range(1000):
        model.second(first)
    for _ in range(1000):  # what has waited is computed, or never will be
        model.second(then)
    num_before = len(model.changes)
    for _ in range(4000):
        model.second(then)
    after = [change for _, change in model.changes[num_before:]]
    assert len(set(after)) <= 1, after
    enough = min(model.scaling.most, max(model.scaling.least, -(-then // RATE)))
    assert model.num_engines >= enough


def test_a_set_that_is_smaller_than_it_should_be_grows_at_once() -> None:
    assert Scaling(2, 4).look(0.0, Load(1, 1, 0, 0, 0)) == 1
    for bounds in ((0, 2), (3, 2)):
        with pytest.raises(InvalidConfigError, match="least is"):
            Scaling(*bounds)


def test_nothing_is_decided_while_an_engine_starts() -> None:
    scaling = Scaling(1, 3)
    for second in range(100):
        assert scaling.look(second, Load(2, 1, 1, 10_000, 0)) == 0
    assert scaling.look(100, Load(2, 2, 2, 10_000, 0)) == 0, "the engine that came has a chance first"


# ---- simulated ------------------------------------------------------------------------------------------------------


def test_replicas_come_with_the_load_and_go_after_it_and_no_text_changes() -> None:
    busy = [OfferedRequest(f"b{n}", 0.5 * n, array("i", [n % 7] * 20), 10) for n in range(240)]
    quiet = [OfferedRequest(f"q{n}", 200.0 + 40.0 * n, array("i", [n] * 8), 3) for n in range(40)]
    whole, scaled, fixed = (Answers([*busy, *quiet]) for _ in range(3))
    Simulation([PagedEngine(SMALL)], whole).run()

    def simulate(source: Answers, least: int) -> SimulationResult:
        engines = [PagedEngine(SMALL) for _ in range(3)]
        plan = ScalingPlan(least, lambda: PagedEngine(SMALL), start_s=20.0)
        return Simulation(engines, source, router=Router(4, b""), plan=plan).run()

    result, all_the_time = simulate(scaled, 1), simulate(fixed, 3)
    assert scaled.texts == fixed.texts == whole.texts
    assert all_the_time.mean_replicas == 3.0
    assert 1.0 < result.mean_replicas < 2.5
    assert [replica.num_requests > 0 for replica in result.replicas] == [True, True, True]
    assert (
        result.latencies["ttft_s"].p99 < Simulation([PagedEngine(SMALL)], Answers(busy)).run().latencies["ttft_s"].p99
    )


def test_plans_that_cannot_be_are_refused() -> None:
    for plan in (ScalingPlan(0, lambda: PagedEngine(SMALL)), ScalingPlan(3, lambda: PagedEngine(SMALL))):
        with pytest.raises(InvalidConfigError, match="least replicas is"):
            Simulation([PagedEngine(SMALL) for _ in range(2)], OpenLoop([]), plan=plan)
    with pytest.raises(InvalidConfigError, match="start time is"):
        Simulation([PagedEngine(SMALL)], OpenLoop([]), plan=replace(plan, least=1, start_s=-1.0))
