"""Several engines of one model, as real processes: killed, stopped and restarted under many streams."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from quire import EngineConfig, Grammar, SamplingParams
from quire.core.failpoints import FAILPOINTS_VARIABLE
from quire.engine.outputs import RequestDelta
from quire.engine.process.heartbeat import Patience
from quire.engine.records.stats import ModelState
from quire.engine.replicas import replica_set
from quire.engine.replicas.replica_set import AT_FAULT
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.supervised import SupervisedLLM
from quire.routing import scaling
from support.deltas import outputs_of
from support.waiting import LIMIT_S, run, until

NUM_STREAMS = 12
NUM_ENGINES = 3  # when one dies, two share its streams
SEARCH = 5  # of six, the stream that tells nothing before its end
CONFIG = EngineConfig(model="guide", kv_memory="8MiB", num_threads=1, max_num_seqs=8)
SUBJECTS = ("block table", "prefix cache", "scheduler", "worker")


def wanted(number: int) -> SamplingParams:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.8},
        {"temperature": 0.0, "frequency_penalty": 0.4, "logprobs": 1},
        {"temperature": 0.7, "n": 3, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_tokens": 20, "stop": (" the", "ing "), "repetition_penalty": 1.1},
        {"temperature": 0.9, "grammar": Grammar.regex("([a-z]{2,7} ){20,30}\\.")},
        {"temperature": 0.0, "n": 1, "best_of": 3, "beam_search": True, "max_tokens": 30},
    ]
    return SamplingParams(**{"seed": number, "max_tokens": 200, "ignore_eos": number % 6 < 3} | kinds[number % 6])


def prompt(number: int) -> str:
    return f"Question {number}: what does the {SUBJECTS[number % 4]} do?" * (1 + number % 3)


async def read(llm: SupervisedLLM, number: int, note: Callable[[], None] = lambda: None) -> list[Any]:
    """Everything that a client is told of a call, whole, with its usage."""
    deltas: list[RequestDelta] = []
    async for delta in llm.deltas(await llm.prepare(prompt(number), wanted(number))):
        deltas.append(delta)
        note()
    return [*outputs_of(deltas), deltas[-1].num_prompt_tokens]


def process_of(llm: SupervisedLLM, index: int) -> int:
    process_id = llm.replicas.replicas[index].process_id
    assert process_id is not None
    return process_id


async def all_ready(llm: SupervisedLLM) -> None:
    await until(lambda: all(replica.is_ready for replica in llm.replicas.replicas))


async def begun(llm: SupervisedLLM, numbers: Iterable[int]) -> list[asyncio.Task[list[Any]]]:
    """Return streams of which each has said something."""
    told = Counter[int]()
    streams = {number: asyncio.create_task(read(llm, number, partial(told.update, [number]))) for number in numbers}
    await until(
        lambda: all(told[number] or stream.done() or number % 6 == SEARCH for number, stream in streams.items())
    )
    return list(streams.values())


async def texts_through(llm: SupervisedLLM, trouble: Callable[[SupervisedLLM], Awaitable[None]]) -> list[list[Any]]:
    """Return what streams say while there is trouble, when the engines are as before."""
    await all_ready(llm)
    streams = await begun(llm, range(NUM_STREAMS))
    await trouble(llm)
    texts = await asyncio.gather(*streams)
    await all_ready(llm)
    llm.replicas.book.check()
    assert not llm.replicas.book.requests
    assert llm.state is ModelState.READY
    await until(lambda: llm.stats().num_used_blocks == 0)
    return texts


@dataclass
class Fleet:
    """Three engines that work while tests have trouble for them, and the event loop of their server."""

    llm: SupervisedLLM
    loop: asyncio.AbstractEventLoop

    def run(self, test: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(test, self.loop).result(LIMIT_S)

    def texts_through(self, trouble: Callable[[SupervisedLLM], Awaitable[None]]) -> list[list[Any]]:
        return self.run(texts_through(self.llm, trouble))


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    async def start() -> SupervisedLLM:
        return await SupervisedLLM(CONFIG, replicas=ReplicaSettings(NUM_ENGINES)).__aenter__()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    llm = asyncio.run_coroutine_threadsafe(start(), loop).result(LIMIT_S)
    fleet = Fleet(llm, loop)
    try:
        yield fleet
    finally:
        fleet.run(llm.__aexit__())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def calm(fleet: Fleet) -> list[list[Any]]:
    """What each stream says where nothing happens."""

    async def nothing(llm: SupervisedLLM) -> None:
        pass

    return fleet.texts_through(nothing)


def test_an_engine_comes_with_the_load_and_goes_after_it(
    calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "MOST_WAIT_S", 0.0)
    monkeypatch.setattr(scaling, "WAITS_FOR_S", 0.1)
    monkeypatch.setattr(scaling, "IDLE_FOR_S", 0.1)
    monkeypatch.setattr(replica_set, "BEAT_S", 0.05)
    monkeypatch.setattr(scaling, "BUSY_MEMORY_S", 0.1)

    async def test() -> list[list[Any]]:
        async with SupervisedLLM(CONFIG, replicas=ReplicaSettings(2, least=1)) as llm:
            assert [replica.is_in_use for replica in llm.replicas.replicas] == [True, False]

            async def ask(number: int) -> list[list[Any]]:
                texts = [await read(llm, number)]
                while len(llm.replicas.in_use) < 2:  # a queue that does not end
                    texts.append(await read(llm, number))
                return texts

            found = await asyncio.gather(*map(ask, range(NUM_STREAMS)))
            await all_ready(llm)
            await until(lambda: not llm.replicas.book.requests)
            await until(lambda: len(llm.replicas.in_use) == 1)
            last = await asyncio.gather(*(read(llm, number) for number in range(NUM_STREAMS)))
            return [[*texts, text] for texts, text in zip(found, last, strict=True)]

    for texts, expected in zip(run(test), calm, strict=True):
        assert all(text == expected for text in texts)


def test_streams_of_an_engine_that_is_killed_go_on_with_the_same_bits(fleet: Fleet, calm: list[list[Any]]) -> None:
    killed = []

    async def kill(llm: SupervisedLLM) -> None:
        busiest = max(llm.replicas.replicas, key=llm.replicas.book.num_at)  # another may have ended all its texts
        assert llm.replicas.book.num_at(busiest)
        killed.append(busiest.index)
        os.kill(process_of(llm, busiest.index), signal.SIGKILL)

    replicas = fleet.llm.replicas
    before, num_continued = [replica.num_restarts for replica in replicas.replicas], replicas.num_continued
    assert fleet.texts_through(kill) == calm
    assert [replica.num_restarts - before[replica.index] for replica in replicas.replicas] == [
        index in killed for index in range(NUM_ENGINES)
    ]
    assert replicas.num_continued > num_continued


def test_all_engines_may_be_killed_at_once(fleet: Fleet, calm: list[list[Any]]) -> None:
    async def kill(llm: SupervisedLLM) -> None:
        for index in range(NUM_ENGINES):
            os.kill(process_of(llm, index), signal.SIGKILL)

    before = [replica.num_restarts for replica in fleet.llm.replicas.replicas]
    assert fleet.texts_through(kill) == calm
    assert [replica.num_restarts for replica in fleet.llm.replicas.replicas] == [number + 1 for number in before]


def test_an_engine_that_is_stopped_is_lost_and_cannot_speak_again(calm: list[list[Any]]) -> None:
    async def stop(llm: SupervisedLLM) -> None:
        stopped = process_of(llm, 1)
        os.kill(stopped, signal.SIGSTOP)
        await until(lambda: llm.replicas.replicas[1].num_restarts > 0)
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)

    async def test() -> list[list[Any]]:
        settings = ReplicaSettings(2, patience=Patience(max_silence_s=7.0))
        async with SupervisedLLM(CONFIG, replicas=settings) as llm:
            return await texts_through(llm, stop)

    assert run(test) == calm


def test_a_rolling_restart_ends_no_stream(fleet: Fleet, calm: list[list[Any]]) -> None:
    processes: list[int] = []

    async def restart(llm: SupervisedLLM) -> None:
        processes.extend(process_of(llm, index) for index in range(NUM_ENGINES))
        await llm.restart()
        processes.extend(process_of(llm, index) for index in range(NUM_ENGINES))

    num_continued = fleet.llm.replicas.num_continued
    assert fleet.texts_through(restart) == calm
    assert len(set(processes)) == 2 * NUM_ENGINES
    assert fleet.llm.replicas.num_continued == num_continued


def test_requests_that_begin_alike_stay_together(fleet: Fleet) -> None:
    async def cached(begins: int, number: int) -> int:
        sampling = SamplingParams(max_tokens=4, temperature=0.0)
        prompt = [20 + (7 * begins + 3 * i) % 900 for i in range(160)] + [20 + number] * 9
        deltas = [delta async for delta in fleet.llm.deltas(await fleet.llm.prepare(prompt, sampling))]
        return deltas[-1].num_cached_tokens

    async def test() -> None:
        replicas = fleet.llm.replicas.replicas
        await all_ready(fleet.llm)
        before = [replica.stats.hit_tokens_total for replica in replicas]
        for number in range(4):
            found = [await cached(begins, number) for begins in range(5)]
            assert found == [160 if number else 0] * 5
        assert all(replica.stats.hit_tokens_total > before[replica.index] for replica in replicas)

    fleet.run(test())


def test_a_request_that_kills_engines_ends_alone(calm: list[list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "kill:token=777")

    async def test() -> None:
        async with SupervisedLLM(CONFIG, replicas=ReplicaSettings(2)) as llm:
            await all_ready(llm)
            poison = SamplingParams(max_tokens=9, temperature=0.0)

            async def ends() -> tuple[str, str]:
                deltas = [delta async for delta in llm.deltas(await llm.prepare([5, 777, 6], poison))]
                return deltas[-1].outputs[-1].finish_reason or "", deltas[-1].outputs[-1].error

            numbers = [number for number in range(12) if all(777 not in text[1] for text in calm[number][:-1])]
            streams = await begun(llm, numbers)
            assert await ends() == ("error", AT_FAULT)
            assert await asyncio.gather(*streams) == [calm[number] for number in numbers]
            assert sum(replica.num_restarts for replica in llm.replicas.replicas) == 3

    run(test)
