"""AdapterSet: requests for more adapters than fit into the memory take turns, and none waits forever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quire.core.adapters import AdapterFacts
from quire.core.errors import ExecutionError, InvalidRequestError, TooManyJobsError
from quire.engine.commands import AnyCommand, DropAdapter, LoadAdapter
from quire.engine.process.adapter_set import MAX_WAITING, AdapterSet
from quire.engine.records.stats import EngineStats
from support.waiting import run, until


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


def test_a_request_that_waits_for_its_turn_keeps_no_room() -> None:
    """Another one waits for what is being loaded, and passes it; its own room comes when both have ended."""

    async def test() -> None:
        engine = Engine(1)
        first = engine.hold(Y)
        await until(lambda: engine.states == {"y": "loading"})
        second, third, fourth = engine.hold(Z), engine.hold(Y), engine.hold(X)
        await asyncio.sleep(0.01)
        engine.load()
        await first
        engine.set.release(Y, engine.send)
        await until(lambda: "z" in engine.states)
        engine.load()
        await second
        assert not third.done() and not fourth.done()
        engine.set.release(Z, engine.send)
        await until(lambda: "y" in engine.states)
        engine.load()
        await third
        engine.set.release(Y, engine.send)
        await until(lambda: "x" in engine.states)
        engine.load()
        await fourth
        engine.set.release(X, engine.send)

    run(test)


def test_a_load_that_hangs_holds_up_only_its_own_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        engine = Engine(2)
        hung = engine.hold(X)
        await until(lambda: engine.states == {"x": "loading"})
        for wanted in (Y, Z, Y):  # all in the room that is left
            other = engine.hold(wanted)
            await until(lambda: wanted.digest in engine.states)  # noqa: B023
            engine.states[wanted.digest] = "ready"
            await other
            engine.set.release(wanted, engine.send)
        assert not hung.done()
        monkeypatch.setattr("quire.engine.process.adapter_set.LOAD_S", -1.0)
        with pytest.raises(ExecutionError, match="loading"):
            await hung
        assert "x" not in engine.states

    run(test)


def test_two_that_wait_for_one_adapter_get_it_at_once() -> None:
    async def test() -> None:
        engine = Engine(1)
        both = engine.hold(X), engine.hold(X)
        await until(lambda: "x" in engine.states)
        await asyncio.sleep(0.01)
        engine.load()
        await asyncio.gather(*both)
        other = engine.hold(Y)
        await asyncio.sleep(0.01)
        engine.set.release(X, engine.send)
        await asyncio.sleep(0.01)
        assert not other.done() and engine.states == {"x": "ready"}, "the other one has it"
        engine.set.release(X, engine.send)
        await until(lambda: "y" in engine.states)
        engine.load()
        await other

    run(test)


def test_an_adapter_without_a_name_takes_room_until_its_requests_have_ended() -> None:
    async def test() -> None:
        engine = Engine(1)
        first = engine.hold(X)
        await until(lambda: "x" in engine.states)
        engine.load()
        await first
        engine.set.unload("x", engine.send)
        second = engine.hold(Y)
        await asyncio.sleep(0.01)
        assert engine.states == {"x": "ready"}
        engine.set.release(X, engine.send)
        await until(lambda: engine.states == {"y": "loading"})
        engine.load()
        await second

    run(test)


def test_of_two_adapters_loaded_under_one_name_the_second_is_refused_and_freed() -> None:
    async def test() -> None:
        engine = Engine(2)
        engine.set = AdapterSet({}, facts, 200)
        loads = [
            asyncio.create_task(engine.set.load("n", lambda each=each: each, engine.send, engine.stats))
            for each in ("x", "y")
        ]
        await until(lambda: engine.states == {"x": "loading", "y": "loading"})
        engine.load()
        first, second = await asyncio.gather(*loads, return_exceptions=True)
        assert first == X and isinstance(second, InvalidRequestError) and second.field == "name"
        assert engine.set.by_name == {"n": X}
        assert engine.states == {"x": "ready"}

    run(test)


def test_a_restarted_engine_gets_an_adapter_without_a_name_while_requests_hold_it() -> None:
    async def test() -> None:
        engine = Engine(2)
        first, second = engine.hold(Z), engine.hold(Z)
        await until(lambda: "z" in engine.states)
        engine.load()
        await first
        await second
        engine.set.unload("z", engine.send)
        engine.set.release(Z, engine.send)
        engine.states.clear()  # the engine has ended, and another one starts
        engine.set.restore(engine.send)
        assert engine.states == {"z": "loading"}
        engine.load()
        engine.set.release(Z, engine.send)
        assert engine.states == {}
        engine.set.restore(engine.send)
        assert engine.states == {}

    run(test)


def test_a_disk_that_never_answers_holds_one_thread_and_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.process.adapter_set.LOAD_S", 0.01)
    gate, begun = threading.Event(), []

    def find() -> str:
        begun.append(threading.get_ident())
        gate.wait(300)
        return "/disk/tune"

    async def test() -> None:
        engine = Engine(1)
        for _ in range(3):
            with pytest.raises(ExecutionError, match="the adapter 'new' could not be read within"):
                await engine.set.load("new", find, engine.send, engine.stats)
        assert len(begun) == 1, "the others have waited for it, and given up"
        assert "new" not in engine.set.by_name
        monkeypatch.setattr("quire.engine.process.adapter_set.LOAD_S", 300.0)
        calls = [
            asyncio.create_task(engine.set.load("x", lambda: "/x", engine.send, engine.stats))
            for _ in range(MAX_WAITING)
        ]
        await asyncio.sleep(0)
        with pytest.raises(TooManyJobsError):
            await engine.set.load("x", lambda: "/x", engine.send, engine.stats)
        gate.set()
        await until(lambda: "x" in engine.states)
        engine.load()
        assert await asyncio.gather(*calls) == [X] * MAX_WAITING, "the disk answers again"
        engine.set.close()

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
            engine.set.release(wanted, engine.send)
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
        engine.set.release(X, engine.send)
        third = engine.hold(Z)
        await until(lambda: "z" in engine.states)
        engine.load()
        await third
        assert set(engine.states) == {"z"}

    run(test)
