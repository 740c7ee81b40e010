"""Engines in processes of their own report which blocks can be hit, under names that a router makes of prompts."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest

from quire.core.config import EngineConfig
from quire.core.request import CacheScope
from quire.core.sampling_params import SamplingParams
from quire.engine.commands import Add, Clear, Survey
from quire.engine.process.connection import LocalEngine
from quire.engine.process.heartbeat import PATIENCE
from quire.engine.process.messages import Blocks, Configure, Message, Ready, Updates
from quire.engine.process.waiting_host import WaitingHost
from quire.memory.cache_journal import CacheNews
from quire.routing.held_blocks import HeldBlocks
from quire.routing.prompts import PromptNames

KEY = b"one key for all engines"
BLOCK = 16
Wanted = TypeVar("Wanted", bound=Message)


@asynccontextmanager
async def engine(**settings: object) -> AsyncIterator[LocalEngine]:
    """An engine of the guide that has the key of others, ready."""
    config = EngineConfig(model="guide", kv_memory="4MiB", block_size=BLOCK, **settings)  # type: ignore[arg-type]
    process = await WaitingHost().engine(Configure(config, PATIENCE, KEY))
    try:
        await next_message(process, Ready)
        yield process
    finally:
        process.kill()
        await process.end(0.0)


async def next_message(process: LocalEngine, kind: type[Wanted]) -> Wanted:
    async with asyncio.timeout(300):
        while (message := await process.receive()) is not None:
            if isinstance(message, kind):
                return message
    raise AssertionError("the engine has ended")


async def news_until(process: LocalEngine, held: HeldBlocks, num_blocks: int) -> list[CacheNews]:
    """Read reports until the engine holds this many blocks."""
    reports = []
    while len(held) != num_blocks or not reports:
        reports.append((await next_message(process, Blocks)).news)
        assert held.note(reports[-1]) is not None
    return reports


@pytest.mark.parametrize("prefix_index", ["hash_chain", "radix_tree"])
def test_an_engine_reports_the_blocks_of_its_prompts_and_their_end(prefix_index: str) -> None:
    async def run() -> None:
        tokens, scope = array("i", range(10, 10 + 3 * BLOCK + 5)), CacheScope("t", salt="s")
        names, held = PromptNames(BLOCK, KEY), HeldBlocks()
        async with engine(prefix_index=prefix_index) as process:
            process.send(Add("quiet", array("i", [1] * 40), SamplingParams(max_tokens=1)))
            await next_message(process, Updates)  # nobody has asked: no report comes before it
            process.send(Survey())
            assert (await news_until(process, held, 2))[0].begins
            assert all(digest in held for digest in names.of(array("i", [1] * 40)).digests)
            process.send(Add("r", tokens, SamplingParams(max_tokens=1), scope))
            await news_until(process, held, 5)
            assert all(digest in held for digest in names.of(tokens, scope).digests)
            assert not any(digest in held for digest in names.of(tokens).digests), "another salt"
            process.send(Clear())
            await news_until(process, held, 0)

    asyncio.run(run())
