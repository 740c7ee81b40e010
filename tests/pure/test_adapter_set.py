"""AdapterSet: requests for more adapters than fit into the memory take turns, and none waits forever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quire.core.adapters import AdapterFacts
from quire.engine.commands import AnyCommand, DropAdapter, LoadAdapter
from quire.engine.process.adapter_set import AdapterSet
from quire.engine.records.stats import EngineStats


def facts(digest: str) -> AdapterFacts:
    return AdapterFacts(f"/{digest}", digest, 4, 100, "")


X, Y, Z = map(facts, "xyz")


class Engine:
    """An engine that loads an adapter when the test says so."""

    def __init__(self, num_adapters: int) -> None:
        self.states: dict[str, str] = {}
        self.set = AdapterSet({"x": X, "y": Y, "z": Z}, lambda folder: X, 100 * num_adapters)
        self.set._loaded.clear()  # none is in memory at the start

    def send(self, command: AnyCommand) -> None:
        match command:
            case LoadAdapter(digest):
                self.states.setdefault(digest, "loading")
            case DropAdapter(digest):
                self.states.pop(digest, None)

    def load(self) -> None:
        self.states.update(dict.fromkeys(self.states, "ready"))
        assert len(self.states) <= self.set._budget // 100

    def stats(self) -> EngineStats:
        return EngineStats(adapters=dict(self.states))

    def hold(self, wanted: AdapterFacts) -> asyncio.Task[None]:
        return asyncio.create_task(self.set.hold(wanted, self.send, self.stats))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(300):
            await test()

    asyncio.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_request_that_waits_for_its_turn_keeps_no_room() -> None:
    """It wants what is in memory by now, and waits behind another that needs its room."""

    async def test() -> None:
        engine = Engine(1)
        first = engine.hold(Y)
        await until(lambda: engine.states == {"y": "loading"})
        second, third = engine.hold(Z), engine.hold(Y)
        await asyncio.sleep(0.01)
        engine.load()
        await first
        engine.set.release(Y)
        await until(lambda: "z" in engine.states)
        engine.load()
        await second
        assert not third.done()
        engine.set.release(Z)
        await until(lambda: "y" in engine.states)
        engine.load()
        await third
        engine.set.release(Y)

    run(test)


def test_requests_for_many_adapters_take_turns() -> None:
    async def test() -> None:
        engine, left = Engine(2), 60

        async def one(wanted: AdapterFacts) -> None:
            nonlocal left
            await engine.hold(wanted)
            assert engine.states[wanted.digest] == "ready"
            await asyncio.sleep(0.001)
            assert engine.states[wanted.digest] == "ready", "it stays while it is held"
            engine.set.release(wanted)
            left -= 1

        requests = [asyncio.create_task(one((X, Y, Z)[(7 * index) % 5 % 3])) for index in range(60)]
        while left and not any(request.done() and request.exception() for request in requests):
            engine.load()
            await asyncio.sleep(0.001)
        await asyncio.gather(*requests)

    run(test)


def test_one_that_gives_up_holds_nothing() -> None:
    async def test() -> None:
        engine = Engine(1)
        first = engine.hold(X)
        await until(lambda: "x" in engine.states)
        engine.load()
        await first
        second = engine.hold(Y)
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.wait([second])
        engine.set.release(X)
        third = engine.hold(Z)
        await until(lambda: "z" in engine.states)
        engine.load()
        await third
        assert set(engine.states) == {"z"}

    run(test)
