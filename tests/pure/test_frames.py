"""Frames: real states of the blocks, at most so many, the same in every run; and a picture says what the blocks are."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.memory.block import BlockState
from quire.simulate.baselines.contiguous import ContiguousEngine, ContiguousSetup
from quire.simulate.cost.linear import LinearCost
from quire.simulate.frames import ALL, FIRST_INTERVAL_S, MAX_CELLS, Frame, Frames, blocks_per_cell, picture_of
from quire.simulate.holders import CACHED, FIRST_OWNER, FREE, SHARED
from quire.simulate.replica import EngineSetup, PagedEngine, SimulatedEngine
from quire.simulate.simulation import Simulation
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.drawn import DrawnPrompts, SharedPrefixes, drawn_requests
from quire.simulate.workload.lengths import UniformLengths
from quire.simulate.workload.offered import OpenLoop

SPECS = {"one": KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),)),
         "window": KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)), KVGroup((1,), window=9)))}  # fmt: skip
SETUP = EngineSetup(
    SPECS["one"],
    MemoryConfig(num_blocks=70, num_host_blocks=20),
    SchedulerConfig(max_num_seqs=6, max_model_len=60, headroom=0.0),
    LinearCost(0.05, 0.01),
)


def requests(seed: int, num_sequences: int = 2) -> OpenLoop:
    """Requests that share a beginning, with samples."""
    prompts = DrawnPrompts(UniformLengths((1, 20), (1, 20)), 60, SharedPrefixes(1, 8), num_sequences)
    return OpenLoop(drawn_requests(Arrivals(3.0), prompts, duration_s=8.0, seed=seed, limit=25))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32), most=st.integers(2, 12), spec=st.sampled_from(sorted(SPECS)))
def test_frames_are_some_of_the_real_states_and_at_most_so_many(seed: int, most: int, spec: str) -> None:
    setup = replace(SETUP, spec=SPECS[spec])
    states: list[Frame] = []
    frames, again = Frames(most), Frames(most)
    watchers = [frames.watch, lambda _, engine: states.append(Frame.of(engine))]
    Simulation([PagedEngine(setup)], requests(seed), watchers=watchers).run()
    assert 1 <= len(frames.frames) <= most
    places = [states.index(frame) for frame in frames.frames]
    assert places == sorted(set(places))
    assert places[0] == 0
    gaps = [after.time_s - before.time_s for before, after in zip(frames.frames, frames.frames[1:], strict=False)]
    assert frames.interval_s / FIRST_INTERVAL_S in {2**power for power in range(20)}
    assert len(frames.frames) > most // 2 or frames.interval_s == FIRST_INTERVAL_S
    assert all(gap > 0 for gap in gaps)
    Simulation([PagedEngine(setup)], requests(seed), watchers=[again.watch]).run()
    assert again.frames == frames.frames


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 1 << 32), spec=st.sampled_from(sorted(SPECS)))
def test_holders_are_what_the_books_say(seed: int, spec: str) -> None:
    engine = PagedEngine(replace(SETUP, spec=SPECS[spec]))
    kinds = set()

    def compare(_: int, watched: SimulatedEngine) -> None:
        scheduler = engine.core.scheduler
        serials = {request.serial + FIRST_OWNER for request in scheduler.running}
        holders, ledger = watched.holders(), watched.ledger()
        for block, holder in zip(scheduler.memory.pool.blocks, holders, strict=True):
            kinds.add(min(holder, FIRST_OWNER))
            assert (holder == CACHED) == (block.state is BlockState.CACHED)
            assert (holder == FREE) == (block.state is BlockState.FREE)
            assert (holder == SHARED) == (block.ref_count > 1)
            assert holder < FIRST_OWNER or holder in serials
        assert (holders.count(CACHED), holders.count(FREE)) == (ledger.cached_blocks, ledger.free_blocks)

    Simulation([engine], requests(seed), watchers=[compare]).run()
    assert kinds == {CACHED, FREE, SHARED, FIRST_OWNER}


@pytest.mark.parametrize("reserves", ["max", "pow2", "oracle"])
def test_engines_before_paging_show_their_runs(reserves: str) -> None:
    setup = ContiguousSetup(500, 1, 64, reserves, max_num_seqs=8, cost=LinearCost(0.05, 0.01))
    seen = []

    def compare(_: int, engine: SimulatedEngine) -> None:
        holders, ledger = engine.holders(), engine.ledger()
        assert holders.count(FREE) == ledger.free_blocks
        assert len(set(holders) - {FREE}) <= engine.num_running
        seen.append(ledger.used_blocks)

    Simulation([ContiguousEngine(setup)], requests(3), watchers=[compare]).run()
    assert max(seen) > 0


@given(st.lists(st.integers(CACHED, 9), min_size=1, max_size=200), st.integers(1, 9))
def test_a_picture_says_who_and_how_much(holders: list[int], size: int) -> None:
    picture = picture_of(array("i", holders), size)
    num_cells = -(-len(holders) // size)
    owners, shares = memoryview(picture)[: 4 * num_cells].cast("I"), picture[4 * num_cells :]
    for index in range(num_cells):
        cell = holders[index * size : (index + 1) * size]
        held = [holder for holder in cell if holder > FREE]
        assert owners[index] == (held[0] if held else 0)
        assert shares[index] == ALL * len(held) // len(cell)
        assert shares[num_cells + index] == ALL * cell.count(CACHED) // len(cell)
    assert len(shares) == 2 * num_cells


@given(st.integers(1, 1 << 24))
def test_large_pools_have_as_many_cells_as_there_may_be(num_blocks: int) -> None:
    size = blocks_per_cell(num_blocks)
    assert -(-num_blocks // size) <= MAX_CELLS
    assert size == 1 or -(-num_blocks // (size - 1)) > MAX_CELLS


def test_only_the_first_replica_is_watched() -> None:
    frames = Frames()
    Simulation([PagedEngine(SETUP), PagedEngine(SETUP)], requests(1), watchers=[frames.watch]).run()
    alone = Frames()
    taken: list[int] = []
    engines = [PagedEngine(SETUP), PagedEngine(SETUP)]
    watchers = [lambda index, _: taken.append(index), lambda index, engine: index or alone.watch(0, engine)]
    Simulation(engines, requests(1), watchers=watchers).run()
    assert set(taken) == {0, 1}
    assert frames.frames == alone.frames
