"""Frames of real engines, here and in a process of their own: what they add up to, how often they come, the end."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

from quire import AsyncLLM, EngineConfig, SamplingParams
from quire.engine.records.live import LiveFrame
from quire.engine.replicas.supervised import SupervisedLLM
from quire.scheduler.journal import EventKind
from quire.serve.live_mirror import LiveMirror
from support.live_picture import LivePicture
from support.waiting import run, until

SETTINGS: dict[str, Any] = {"kv_memory": "1MiB", "num_threads": 1, "max_num_seqs": 4}
EVERY_S = 0.05


async def run_some(llm: AsyncLLM | SupervisedLLM) -> None:
    """Prompts that begin alike, two texts of one, and one that is left early."""

    async def run(prompt: str, sampling: SamplingParams, most: int | None = None) -> None:
        deltas, count = llm.deltas(await llm.prepare(prompt, sampling)), 0
        async for _ in deltas:
            count += 1
            if count == most:
                break
        await deltas.aclose()

    text = "A block table maps the positions of a sequence to blocks. " * 3
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    await asyncio.gather(
        *(run(text + str(index), greedy) for index in range(5)),
        run(text, SamplingParams(n=2, max_tokens=20, seed=1, ignore_eos=True)),
        run(text, SamplingParams(temperature=0, max_tokens=400, ignore_eos=True), most=3),
    )


def test_frames_of_an_engine_in_this_process_add_up_to_it() -> None:
    async def test() -> None:
        frames: list[LiveFrame] = []
        async with AsyncLLM("guide", **SETTINGS) as llm:
            scheduler = llm.engine.scheduler
            llm.watch(EVERY_S, frames.append)
            await until(lambda: bool(frames))
            await run_some(llm)
            await until(lambda: not scheduler.requests and not frames[-1].stats.num_running)
            await asyncio.sleep(3 * EVERY_S)
            picture = LivePicture(scheduler)
            for frame in frames:
                picture.take_in(frame)
            picture.check()
            assert picture.mirror is not None and picture.mirror.is_whole and not picture.mirror.requests
            kinds = [EventKind(event.kind) for event in picture.events]
            assert (kinds.count(EventKind.FINISHED), kinds.count(EventKind.ABORTED)) == (7, 1)
            evicted = sum(event.number for event in picture.events if event.kind == EventKind.EVICTED)
            assert evicted == scheduler.memory.pool.num_evictions
            assert kinds.count(EventKind.PREEMPTED) == scheduler.num_preemptions
            assert all(after.at_s - before.at_s >= EVERY_S for before, after in pairwise(frames) if before.is_whole)
            num_frames = len(frames)
            llm.unwatch()
            await run_some(llm)
            assert len(frames) == num_frames
            assert scheduler.memory.pool.journal is None

    run(test)


def test_an_engine_in_a_process_of_its_own_is_watched_before_it_is_there() -> None:
    async def test() -> None:
        frames: list[LiveFrame] = []
        llm = SupervisedLLM(EngineConfig(model="guide", **SETTINGS))
        llm.watch(EVERY_S, frames.append)
        async with llm:
            await run_some(llm)
            await until(lambda: bool(frames) and frames[-1].stats.num_running == 0 and frames[-1].stats.steps_total > 9)
            mirror = LiveMirror(frames[0].num_blocks)
            for frame in frames:
                mirror.take_in(frame)
            assert frames[0].begins and not any(frame.begins for frame in frames[1:])
            assert mirror.is_whole and not mirror.requests
            assert mirror.holdings(None).cached == llm.stats().num_cached_blocks
            llm.watch(EVERY_S, frames.append)
            num_frames = len(frames)
            await until(lambda: len(frames) > num_frames)
            again = LiveMirror(frames[num_frames].num_blocks)
            again.take_in(frames[num_frames])
            assert frames[num_frames].begins
            assert again.holdings(None).cached == mirror.holdings(None).cached

    run(test)
