"""Two engines, each with its cache and its disk: what one holds comes to the other, bit for bit, or is computed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire import EngineConfig, SamplingParams
from quire.core.request import CacheScope
from quire.engine.commands import Clear
from quire.engine.door import Ticket
from quire.engine.replicas import fetches
from quire.engine.replicas.fetches import Errand, StoredBlocks, StoringEngines
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.supervised import SupervisedLLM
from quire.serve.replicas.store_courier import StoreCourier
from support.waiting import until

NUM_TOKENS, NUM_BLOCKS = 200, 12
CONFIG = EngineConfig(model="guide", kv_memory="8MiB", num_threads=1, max_num_seqs=4)
HELD = CacheScope("ada", salt="of ada", persist=True)
PRIVATE = CacheScope("eve", salt="of eve", persist=False)


class Meddler(StoreCourier):
    """A courier to whom something happens on the way: `meddle` is called before it moves blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.meddle: Callable[[], Awaitable[None]] | None = None

    async def move(self, engines: StoringEngines, errand: Errand, stored: StoredBlocks) -> int:
        if self.meddle is not None:
            await self.meddle()
        return await super().move(engines, errand, stored)


class Pair:
    """Two engines, of which the first one has computed what the second one is asked."""

    def __init__(self, llm: SupervisedLLM, courier: Meddler) -> None:
        self.llm, self.courier, self.set = llm, courier, llm.replicas
        self.num_prompts = 0

    def prompt(self) -> list[int]:
        self.num_prompts += 1
        return [5 + (self.num_prompts + index * index) % 200 for index in range(NUM_TOKENS)]

    async def ask(self, prompt: list[int], index: int, scope: CacheScope = HELD) -> list[Any]:
        """Return what one engine answers, bit for bit."""
        sampling = SamplingParams(max_tokens=6, seed=3, logprobs=2, ignore_eos=True)
        prepared = await self.llm.prepare(prompt, sampling, Ticket(scope=scope))
        for each in self.set.replicas:
            (self.set.open_to_requests if each.index == index else self.set.close_to_requests)(each)
        parts = [part async for delta in self.llm.deltas(prepared) for part in delta.outputs]
        return [each for part in parts for each in zip(part.token_ids, part.logprobs or (), strict=True)]

    async def both(self, scope: CacheScope = HELD) -> None:
        """Have the second engine asked what the first one has computed; the answers must be the same."""
        prompt = self.prompt()
        first = await self.ask(prompt, 0, scope)
        await until(lambda: self.llm.stats().num_running == 0)
        assert await self.ask(prompt, 1, scope) == first

    @property
    def counts(self) -> dict[str, int]:
        return self.llm.stats().fetches

    def kill(self, index: int, how: signal.Signals) -> None:
        process_id = self.set.replicas[index].process_id
        assert process_id is not None
        os.kill(process_id, how)

    async def ready(self) -> None:
        await until(lambda: all(each.is_ready and each.stats.disk_store for each in self.set.replicas))


def run(folder: Path, test: Callable[[Pair], Awaitable[None]]) -> None:
    async def limited() -> None:
        config, courier = replace(CONFIG, disk_cache=str(folder)), Meddler()
        async with asyncio.timeout(300), SupervisedLLM(config, replicas=ReplicaSettings(2, courier=courier)) as llm:
            pair = Pair(llm, courier)
            await pair.ready()
            await test(pair)
        assert not list(folder.glob("incoming-*"))

    asyncio.run(limited())


def test_a_prefix_is_fetched_or_computed_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = 300.0  # what these engines compute takes less than asking them
    monkeypatch.setattr(fetches.Fetches, "_limit_s", lambda *_: limit_s)

    async def test(pair: Pair) -> None:
        nonlocal limit_s
        await pair.both()
        target, stats = pair.set.replicas[1], pair.llm.stats()
        assert (pair.counts, stats.fetched_blocks_total) == ({"done": 1}, NUM_BLOCKS)
        await until(lambda: target.stats.disk_hit_tokens_total == NUM_BLOCKS * 16)

        await pair.both(PRIVATE)
        assert pair.counts == {"done": 1}, "what may not be on a disk is computed"

        prompt = pair.prompt()
        first = await pair.ask(prompt, 0)
        pair.courier.meddle = asyncio.Event().wait  # for ever
        left = [asyncio.create_task(pair.ask(prompt, 1)) for _ in range(2)]
        await until(lambda: pair.set.book.num_at(target) == 2)
        for each in left:
            each.cancel()
        await until(lambda: pair.counts == {"done": 1, "left": 1})
        pair.courier.meddle = None
        answers = await asyncio.gather(*(pair.ask(prompt, 1) for _ in range(3)))
        assert (answers, pair.counts) == ([first] * 3, {"done": 2, "left": 1}), "three requests wait for one fetch"

        store = Path(pair.set.replicas[0].stats.disk_store)

        async def evict() -> None:
            pair.llm.send_to(0, Clear())
            await until(lambda: not any((store / "slots.idx").read_bytes()))

        pair.courier.meddle = evict
        await pair.both()
        assert pair.counts["damaged"] == 1, "its slots are void by then"

        pair.courier.meddle, limit_s = None, 0.05
        prompt = pair.prompt()
        first = await pair.ask(prompt, 0)
        pair.kill(0, signal.SIGSTOP)
        assert (await pair.ask(prompt, 1), pair.counts["late"]) == (first, 1)
        pair.kill(0, signal.SIGCONT)
        limit_s = 300.0

        async def lose_blocks() -> None:
            os.truncate(store / "blocks.bin", 0)

        pair.courier.meddle = lose_blocks
        await pair.both()
        assert pair.counts["damaged"] == 2

        async def lose_folder() -> None:
            store.rename(tmp_path / "gone")

        pair.courier.meddle = lose_folder
        await pair.both()
        assert pair.counts["failed"] == 1
        (tmp_path / "gone").rename(store)

        async def kill_source() -> None:
            pair.kill(0, signal.SIGKILL)
            await until(lambda: not pair.set.replicas[0].is_ready)

        pair.courier.meddle = kill_source
        await pair.both()
        assert pair.counts["done"] == 3, "what it has written is there"

    run(tmp_path, test)
