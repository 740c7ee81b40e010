"""Prefixes that one engine is to have from another: when that pays, and what becomes of requests that wait for one."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.kept_block import FetchError
from quire.core.request import CacheScope
from quire.core.sampling_params import SamplingParams
from quire.engine.commands import Abort, Add
from quire.engine.records.stats import EngineStats
from quire.engine.replicas import fetches as fetches_module
from quire.engine.replicas import replica as replica_module
from quire.engine.replicas.fetches import (
    LATE,
    NOT_WORTH,
    RETRY_EVERY,
    Errand,
    Fetches,
    StoredBlocks,
    StoringEngines,
)
from quire.routing.router import Loan
from support.fake_engines import VOCAB, Fleet
from support.shadow import expected_tokens
from support.waiting import run

PREFIX = list(range(20, 60))
OTHER = list(range(60, 100))
SECONDS = 300.0


class Script:
    """A courier whose errands go as the test says. Implements `Courier`."""

    def __init__(self) -> None:
        self.fate = "done"
        self.disk = asyncio.Event()
        self.errands: list[Errand] = []

    async def ask(self, engines: StoringEngines, errand: Errand) -> StoredBlocks | None:
        self.errands.append(errand)
        if self.fate == "there":
            return None
        return StoredBlocks("", "", tuple(range(len(errand.tokens) // 4)))

    async def move(self, engines: StoringEngines, errand: Errand, stored: StoredBlocks) -> int:
        if self.fate == "hangs":
            await asyncio.Event().wait()
        if self.fate == "is stuck":
            try:
                await self.disk.wait()
            finally:
                await self.disk.wait()
        if self.fate == "slow":
            await asyncio.sleep(0)
        if self.fate == "fails":
            raise FetchError("damaged")
        if self.fate == "breaks":
            raise RuntimeError("our own mistake")
        return 100


def add(name: str, prompt: list[int], **more: Any) -> Add:
    return Add(name, array("i", prompt), SamplingParams(max_tokens=4, ignore_eos=True, seed=5), **more)


async def tell(fleet: Fleet, **more: Any) -> None:
    """Have all engines tell of a disk, and that a token takes a second."""
    for engine in fleet.engines:
        if engine is not None and not engine.is_dead:
            engine.tell_stats(**{"disk_store": "store", "token_us": 1e6} | more)
    await fleet.settle()


def sent(fleet: Fleet, index: int) -> list[str]:
    return [command.request_id for command in fleet.engine(index).commands if isinstance(command, Add)]


async def with_prefix(fleet: Fleet) -> None:
    """Have engine 0 compute two prefixes, and the next requests sent to engine 1."""
    fleet.set.close_to_requests(fleet.set.replicas[1])
    for name, prefix in (("first", PREFIX), ("another", OTHER)):
        fleet.set.send(add(name, prefix))
    await fleet.run()
    await tell(fleet)
    fleet.set.close_to_requests(fleet.set.replicas[0])
    fleet.set.open_to_requests(fleet.set.replicas[1])


@pytest.mark.parametrize("fate", ["done", "there", "fails", "breaks", "hangs"])
def test_a_request_waits_for_a_fetch_and_for_no_longer(fate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches_module, "LONGEST_S", 0.02 if fate == "hangs" else SECONDS)

    async def test() -> None:
        script = Script()
        async with Fleet(2, courier=script) as fleet:
            await with_prefix(fleet)
            script.fate = fate
            fleet.set.send(add("second", [*PREFIX, 7]))
            fleet.set.send(add("third", [*PREFIX, 8]))
            fleet.set.send(add("other", [9, 9, 9, 9, 9]))
            assert sent(fleet, 1) == ["other"]
            while len(sent(fleet, 1)) < 3:
                await asyncio.sleep(0.001)
            assert sent(fleet, 1) == ["other", "second", "third"]
            (errand,) = script.errands
            assert (errand.source.index, errand.target.index, errand.tokens.tolist()) == (0, 1, PREFIX)
            await fleet.settle()
            figures = fleet.set.stats()
            reason = {"there": "there already", "fails": "damaged", "breaks": "failed", "hangs": LATE}.get(fate, fate)
            assert figures.fetches == {reason: 1}
            assert (figures.fetched_blocks_total, figures.fetched_bytes_total) == (
                (10, 100) if fate == "done" else (0, 0)
            )
            await fleet.run()
            assert not fleet.reader.lost and not fleet.reader.errors()

    run(test)


def test_nothing_is_sent_for_requests_that_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches_module, "LONGEST_S", SECONDS)

    async def test() -> None:
        script = Script()
        async with Fleet(2, courier=script) as fleet:
            await with_prefix(fleet)
            fleet.set.send(add("hasty", PREFIX))
            fleet.set.send(Abort("hasty"))
            await fleet.settle()
            assert (script.errands, fleet.set.stats().fetches) == ([], {"left": 1}), "nobody was asked"
            script.fate = "hangs"
            for name in ("second", "third"):
                fleet.set.send(add(name, PREFIX))
            fleet.set.send(add("busy", OTHER))
            await fleet.settle()
            assert fleet.set.stats().fetches == {"left": 1, "busy": 1}
            fleet.set.send(Abort("second"))
            await fleet.settle()
            assert fleet.set.stats().fetches == {"left": 1, "busy": 1}, "the third one waits"
            fleet.set.send(Abort("third"))
            await fleet.settle()
            assert fleet.set.stats().fetches == {"left": 2, "busy": 1}
            assert (sent(fleet, 1), list(fleet.set.book.requests)) == (["busy"], ["busy"])

    run(test)


def test_an_engine_that_dies_had_nothing_of_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches_module, "LONGEST_S", SECONDS)

    async def test() -> None:
        script = Script()
        async with Fleet(2, courier=script) as fleet:
            await with_prefix(fleet)
            script.fate = "hangs"
            fleet.set.send(add("second", PREFIX))
            fleet.set.open_to_requests(fleet.set.replicas[0])
            fleet.engine(1).kill()
            await fleet.settle()
            assert (sent(fleet, 0)[2:], fleet.set.stats().fetches) == (["second~1"], {"left": 1})
            (part,) = fleet.set.book.at(fleet.set.replicas[0])
            assert (part.num_deaths, fleet.set.num_continued) == (0, 0), "it is no suspect"

    run(test)


def test_what_was_held_is_not_sent_to_an_engine_whose_process_still_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches_module, "LONGEST_S", SECONDS)

    async def test() -> None:
        script = Script()
        async with Fleet(2, courier=script) as fleet:
            await with_prefix(fleet)
            script.fate = "is stuck"
            fleet.set.send(add("second", PREFIX))
            fleet.set.open_to_requests(fleet.set.replicas[0])
            ending = fleet.engine(1)
            ending.may_end.clear()
            ending.kill()
            await fleet.settle()
            script.disk.set()
            await fleet.settle()
            assert fleet.set.stats().fetches == {"done": 1}
            ending.may_end.set()
            await fleet.settle()
            assert sent(fleet, 0)[2:] == ["second~1"]
            (part,) = fleet.set.book.at(fleet.set.replicas[0])
            assert (part.num_deaths, fleet.set.num_continued) == (0, 0), "it is no suspect"

    run(test)


def test_a_suspect_computes_everything_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches_module, "LONGEST_S", SECONDS)

    async def test() -> None:
        async with Fleet(3, courier=Script()) as fleet:
            fleet.set.close_to_requests(fleet.set.replicas[2])
            await with_prefix(fleet)
            fleet.set.send(add("second", PREFIX))
            await fleet.settle()
            assert (sent(fleet, 1), fleet.set.stats().fetches) == (["second"], {"done": 1})
            fleet.set.open_to_requests(fleet.set.replicas[2])
            fleet.engine(1).kill()
            await fleet.settle()
            assert (sent(fleet, 2), fleet.set.stats().fetches) == (["second~1"], {"done": 1})

    run(test)


def test_nobody_waits_for_a_disk_that_hangs_nor_joins_those_who_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches_module, "LONGEST_S", 0.02)

    async def test() -> None:
        script = Script()
        async with Fleet(2, courier=script) as fleet:
            await with_prefix(fleet)
            assert fleet.set.fetches is not None
            script.fate = "is stuck"
            fleet.set.send(add("second", PREFIX))
            while not sent(fleet, 1):
                await asyncio.sleep(0.001)
            fleet.set.send(add("third", PREFIX))
            fleet.set.send(add("fourth", OTHER))
            assert sent(fleet, 1) == ["second", "third", "fourth"]
            script.disk.set()
            await fleet.settle()
            assert fleet.set.stats().fetches == {"busy": 1, LATE: 1}
            fleet.set.send(Abort("fourth"))
            await fleet.settle()
            fleet.set.send(add("fifth", OTHER))
            assert sent(fleet, 1)[3:] == ["fifth"], "the link has become slow"
            assert fleet.set.stats().fetches == {"busy": 1, LATE: 1, NOT_WORTH: 1}

    run(test)


def test_what_is_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetches_module, "LONGEST_S", SECONDS)

    async def test() -> None:
        async with Fleet(2, courier=Script()) as fleet:
            await with_prefix(fleet)
            script = Script()
            assert fleet.set.fetches is not None
            fleet.set.fetches._courier = script

            async def is_sent(request: Add) -> bool:
                fleet.set.send(request)
                at_once = request.request_id in sent(fleet, 1)
                fleet.set.send(Abort(request.request_id))
                await fleet.settle()
                return at_once

            assert not await is_sent(add("is", PREFIX))
            assert await is_sent(add("of nobody else", PREFIX, scope=CacheScope("b", salt="s")))
            assert await is_sent(
                replace(add("logits", PREFIX), sampling=SamplingParams(prompt_logprobs=1, max_tokens=1))
            )
            assert await is_sent(add("unkept", PREFIX, scope=CacheScope(persist=False)))
            await tell(fleet, disk_is_off=True)
            assert await is_sent(add("off", PREFIX))
            await tell(fleet, disk_store="")
            assert await is_sent(add("none", PREFIX))
            await tell(fleet, token_us=0.0)
            assert await is_sent(add("unknown", PREFIX))
            await tell(fleet)
            fleet.set.replicas[0].fingerprint = "other"
            assert await is_sent(add("bits", PREFIX))
            assert not script.errands[1:]

    run(test)


def test_a_fetch_must_take_half_the_time_of_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with Fleet(2, courier=Script()) as fleet:
            fetches = fleet.set.fetches
            assert fetches is not None

            def limit_s(num_known: int = 0, token_us: float = 10_000, load_us: float = 0.0) -> float:
                return fetches._limit_s(Loan(0, 100, num_known), EngineStats(token_us=token_us, load_us=load_us))

            assert limit_s() == 2.0, "400 tokens of 10 ms"
            assert limit_s(50) == 1.0
            assert limit_s(token_us=1e9) == fetches_module.LONGEST_S
            assert limit_s(token_us=100) == 0, "40 ms is too little"
            assert not fetches.counts
            fetches.rates.note_asked(0.5)
            fetches.rates.note_moved(100, 1.0)
            assert (limit_s(), limit_s(50), limit_s(load_us=6000)) == (2.0, 0.0, 0.0)
            found = [limit_s(50) for _ in range(2 * RETRY_EVERY)]
            assert Counter(found) == {0.0: 2 * RETRY_EVERY - 2, 1.0: 2}
            assert fetches.counts[NOT_WORTH] == 2 + 2 * RETRY_EVERY

    run(test)


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(4, 10), st.sampled_from(["done", "there", "slow", "fails", "hangs"])),
        st.tuples(st.sampled_from(["step", "step", "kill", "drain", "abort"]), st.integers(0, 1)),
    ),
    max_size=12,
)


class Play:
    """Requests that begin alike, at two engines of which now one and now the other takes requests."""

    def __init__(self, fleet: Fleet, script: Script) -> None:
        self.fleet, self.script = fleet, script
        self.added: dict[str, Add] = {}
        self.num_added = self.num_kills = 0

    async def add(self, length: int, fate: str = "done") -> None:
        while not any(replica.is_ready for replica in self.fleet.set.replicas):
            await asyncio.sleep(0.001)
        self.script.fate, self.num_added = fate, self.num_added + 1
        request = add(f"r{self.num_added}", [*(PREFIX, OTHER)[self.num_added % 2][: 4 * length], self.num_added])
        self.added[request.request_id] = request
        self.fleet.set.send(request)

    async def step(self, index: int) -> None:
        self.fleet.engine(index).step()

    async def kill(self, index: int) -> None:
        self.num_kills += 1
        if self.num_kills < 3:  # or what is killed with them ends, at fault
            self.fleet.engine(index).kill()

    async def drain(self, index: int) -> None:
        self.fleet.set.open_to_requests(self.fleet.set.replicas[1 - index])
        self.fleet.set.close_to_requests(self.fleet.set.replicas[index])

    async def abort(self, index: int) -> None:
        if len(self.added) > index:
            name = list(self.added)[-1 - index]
            del self.added[name]
            self.fleet.set.send(Abort(name))

    async def end(self) -> None:
        for replica in self.fleet.set.replicas:
            self.fleet.set.open_to_requests(replica)
        while self.fleet.set.book.requests:
            await asyncio.sleep(0.0005)
            for index in range(2):
                await self.step(index)
            await self.fleet.settle()


@settings(deadline=None, max_examples=40)
@given(ACTIONS, st.sampled_from([1e-6, 0.01]))
def test_whatever_becomes_of_fetches_each_text_is_whole(actions: list[Any], limit_s: float) -> None:
    async def test() -> None:
        script = Script()
        async with Fleet(2, courier=script) as fleet:
            await with_prefix(fleet)
            play = Play(fleet, script)
            for what, *values in [*actions, ("add", 3)]:
                await tell(fleet)
                await getattr(play, what)(*values)
                await fleet.settle()
            await play.end()
            for name, request in play.added.items():
                prompt = request.prompt_token_ids.tolist()
                assert fleet.reader.tokens[name, 0] == expected_tokens(prompt, 4, VOCAB)
            assert not fleet.reader.lost and not fleet.reader.errors()
            for index in range(2):
                assert max(Counter(sent(fleet, index)).values(), default=1) == 1, "nothing is sent twice"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_module, "FIRST_RESTART_S", 0.0)
        patch.setattr(Fetches, "_limit_s", lambda *_: limit_s)
        run(test)
