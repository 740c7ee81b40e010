"""RequestStreams: every reader gets its own text, whole and once; who leaves, or loses the engine, leaves nothing."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.adapters import AdapterFacts
from quire.core.clock import ManualClock
from quire.core.errors import ExecutionError
from quire.core.request import CacheScope, FinishReason
from quire.core.sampling_params import SamplingParams
from quire.engine.client import SequenceUpdate
from quire.engine.commands import Abort, Add, AnyCommand
from quire.engine.outputs import RequestDelta, RequestOutput
from quire.engine.process.adapter_set import AdapterSet
from quire.engine.records.stats import EngineStats
from quire.engine.streams import RequestStreams
from quire.engine.text.output_processor import PreparedRequest
from support.waiting import until

PATIENCE_S = 300


class Link:
    """Notes the commands; refuses to add where it is told to."""

    def __init__(self) -> None:
        self.commands: list[AnyCommand] = []
        self.refusal: Exception | None = None

    def send(self, command: AnyCommand) -> None:
        if self.refusal is not None and isinstance(command, Add):
            raise self.refusal
        self.commands.append(command)

    @property
    def aborted(self) -> list[str]:
        return [command.request_id for command in self.commands if isinstance(command, Abort)]


class Room:
    """Streams over an engine that is this test."""

    def __init__(self) -> None:
        self.link = Link()
        self.streams = RequestStreams(self.link, None, ManualClock())

    def deltas(self, name: str, shown_id: str = "shown", **wanted: Any) -> AsyncGenerator[RequestDelta, None]:
        return self.streams.deltas(prepared(name, shown_id, **wanted))

    def send(self, name: str, tokens: list[int], end: FinishReason | None = None, branch: int = 0) -> None:
        self.streams.process([SequenceUpdate(name, branch, tokens, [], 0, end)])


def prepared(name: str, shown_id: str = "shown", **wanted: Any) -> PreparedRequest:
    sampling = SamplingParams(**wanted)
    return PreparedRequest(Add(name, array("i", [5, 6]), sampling), shown_id, None, sampling)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def read(deltas: AsyncGenerator[RequestDelta, None], found: list[RequestDelta]) -> None:
    async with aclosing(deltas):
        async for delta in deltas:
            found.append(delta)


def tokens_of(deltas: list[RequestDelta]) -> list[int]:
    return [token for delta in deltas for output in delta.outputs for token in output.token_ids]


@given(st.integers(0, 1 << 40))
def test_whatever_comes_in_whatever_order_each_reader_has_its_own_text_once(seed: int) -> None:
    rng = random.Random(seed)
    texts = {f"r{number}": [rng.randrange(99) for _ in range(rng.randint(1, 9))] for number in range(rng.randint(1, 5))}

    async def work() -> None:
        room = Room()
        found: dict[str, list[RequestDelta]] = {name: [] for name in texts}
        readers = [asyncio.create_task(read(room.deltas(name), found[name])) for name in texts]
        await settle()
        assert len(room.streams) == len(texts)
        assert sorted(command.request_id for command in room.link.commands) == sorted(texts)
        at = dict.fromkeys(texts, 0)
        while at:
            updates = []
            for name in rng.sample(sorted(at), rng.randint(1, len(at))):
                stop = rng.randint(at[name], len(texts[name]))
                end = FinishReason.LENGTH if stop == len(texts[name]) and rng.random() < 0.5 else None
                updates.append(SequenceUpdate(name, 0, texts[name][at[name] : stop], [], 0, end))
                at[name] = stop
                if end is not None:
                    del at[name]
            room.streams.process(updates)
            if rng.random() < 0.5:  # else the readers are slow and sleep through it
                await settle()
        await asyncio.gather(*readers)
        for name, deltas in found.items():
            assert tokens_of(deltas) == texts[name]
            assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert (len(room.streams), room.link.aborted) == (0, [])

    run(work())


def test_snapshots_hold_everything_so_far() -> None:
    async def work() -> None:
        room, found = Room(), list[RequestOutput]()

        async def read_snapshots() -> None:
            async for output in room.streams.snapshots(prepared("r")):
                found.append(output)

        reader = asyncio.create_task(read_snapshots())
        await settle()
        for tokens, end in (([1], None), ([], None), ([2, 3], FinishReason.STOP)):
            room.send("r", tokens, end)
            await settle()
        await reader
        assert [output.outputs[0].token_ids for output in found] == [[1], [1], [1, 2, 3]]
        assert [output.finished for output in found] == [False, False, True]
        assert found[-1].request_id == "shown"

    run(work())


def test_a_delta_that_tells_nothing_is_not_sent() -> None:
    async def work() -> None:
        room, found = Room(), list[RequestDelta]()
        reader = asyncio.create_task(read(room.deltas("r"), found))
        await settle()
        for tokens, end in (([], None), ([1], None), ([], None), ([2], None), ([], FinishReason.LENGTH)):
            room.send("r", tokens, end)
            await settle()
        await reader
        assert [[each.token_ids for each in delta.outputs] for delta in found] == [[[1]], [[2]], [[]]]
        assert found[-1].outputs[0].finish_reason == "length"

    run(work())


def test_where_the_best_are_chosen_the_first_delta_comes_with_the_first_token_and_the_texts_at_the_end() -> None:
    async def work() -> None:
        room, found = Room(), list[RequestDelta]()
        reader = asyncio.create_task(read(room.deltas("r", n=1, best_of=2), found))
        await settle()
        for tokens, end, branch in (
            ([1], None, 0),
            ([2], None, 1),
            ([3], FinishReason.LENGTH, 0),
            ([4], FinishReason.LENGTH, 1),
        ):
            room.send("r", tokens, end, branch)
            await settle()
        await reader
        assert [(delta.num_generated_tokens, len(delta.outputs), delta.finished) for delta in found] == [
            (1, 0, False),
            (4, 1, True),
        ]

    run(work())


# ---- who leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["break", "close", "cancel", "exception"])
def test_leaving_ends_the_request_in_the_engine_and_no_other(way: str) -> None:
    async def work() -> None:
        room, others = Room(), list[RequestDelta]()
        other = asyncio.create_task(read(room.deltas("other"), others))

        async def leave_early() -> None:
            async with aclosing(room.deltas("leaver")) as deltas:
                async for _ in deltas:
                    if way == "exception":
                        raise LookupError
                    if way == "close":
                        await deltas.aclose()
                        return
                    if way == "break":
                        break

        reader = asyncio.create_task(leave_early())
        await settle()
        room.send("leaver", [1])
        await settle()
        if way == "cancel":
            reader.cancel()
        (ended,) = await asyncio.gather(reader, return_exceptions=True)
        expected = {"cancel": asyncio.CancelledError, "exception": LookupError}
        assert type(ended) is expected.get(way, type(None))
        assert (room.link.aborted, len(room.streams)) == (["leaver"], 1)
        room.send("leaver", [2], FinishReason.LENGTH)  # of a step that was under way
        room.send("other", [7], FinishReason.LENGTH)
        await other
        assert (tokens_of(others), room.link.aborted, len(room.streams)) == ([7], ["leaver"], 0)

    run(work())


def test_a_request_that_the_engine_does_not_take_is_forgotten() -> None:
    async def work() -> None:
        room = Room()
        room.link.refusal = ExecutionError("the engine is gone")
        with pytest.raises(ExecutionError, match=r"^the engine is gone$"):
            await anext(room.deltas("r"))
        await settle()
        assert (len(room.streams), room.link.aborted) == (0, ["r"])

    run(work())


def test_all_requests_of_an_id_are_aborted_and_their_readers_get_what_there_is() -> None:
    async def work() -> None:
        room = Room()
        found: dict[str, list[RequestDelta]] = {"a": [], "b": [], "c": []}
        readers = [
            asyncio.create_task(read(room.deltas(name, shown_id="mine" if name in "ab" else "yours"), found[name]))
            for name in found
        ]
        await settle()
        room.send("a", [1])
        room.streams.abort("mine")
        room.streams.abort("nobody's")
        await settle()
        assert [reader.done() for reader in readers] == [True, True, False]
        assert sorted(room.link.aborted) == ["a", "b"], "each once, though its reader leaves as well"
        assert tokens_of(found["a"]) == [1]
        assert [found[name][-1].outputs[0].finish_reason for name in "ab"] == ["abort", "abort"]
        room.send("c", [3], FinishReason.STOP)
        await asyncio.gather(*readers)
        assert tokens_of(found["c"]) == [3]

    run(work())


# ---- an engine that is lost ----------------------------------------------------------------------------------------


def test_a_lost_engine_is_told_to_every_reader_by_its_first_message_but_not_to_who_is_done() -> None:
    async def work() -> None:
        room = Room()
        found: dict[str, list[RequestDelta]] = {"done": [], "half": [], "new": []}
        readers = [asyncio.create_task(read(room.deltas(name), found[name])) for name in found]
        await settle()
        room.send("half", [1])
        room.send("done", [2], FinishReason.LENGTH)
        room.streams.lose("it burned")
        room.streams.lose("it is gone")
        ends = await asyncio.gather(*readers, return_exceptions=True)
        assert [str(end) for end in ends] == ["None", "it burned", "it burned"]
        assert [type(end) for end in ends[1:]] == [ExecutionError, ExecutionError]
        assert (tokens_of(found["done"]), found["done"][-1].finished) == ([2], True)
        assert len(room.streams) == 0

    run(work())


def test_updates_that_cannot_be_processed_leave_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        room = Room()
        readers = [asyncio.create_task(read(room.deltas(name), [])) for name in ("a", "b")]
        await settle()
        room.send("a", [1], branch=5)  # that the request does not have
        for end in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(end, ExecutionError)
            assert str(end) == ("the outputs of the engine cannot be processed: IndexError: list index out of range")
        assert len(room.streams) == 0

    run(work())
    assert "updates of the engine cannot be processed" in caplog.text


def test_a_request_that_is_aborted_while_it_waits_for_its_adapter_never_reaches_the_engine() -> None:
    async def work() -> None:
        room, found = Room(), list[RequestDelta]()
        facts = AdapterFacts("/x", "x", 4, 100, "")
        adapters = AdapterSet({"x": facts}, lambda folder: facts, 100)
        adapters._loaded.clear()
        states: dict[str, str] = {}
        room.streams.hold_adapters(adapters, lambda: EngineStats(adapters=states))
        asked = prepared("r")
        asked = replace(asked, request=replace(asked.request, scope=CacheScope(adapter="x")))
        reader = asyncio.create_task(read(room.streams.deltas(asked), found))
        await until(lambda: bool(room.link.commands))
        room.streams.abort("shown")
        states["x"] = "ready"
        await reader
        assert [delta.finished for delta in found] == [True]
        assert not any(isinstance(command, Add) for command in room.link.commands)
        assert len(room.streams) == 0

    run(work())


def test_a_request_that_waits_for_its_adapter_learns_that_the_engine_has_failed() -> None:
    async def work() -> None:
        room = Room()
        facts = AdapterFacts("/x", "x", 4, 100, "")
        adapters = AdapterSet({"x": facts}, lambda folder: facts, 100)
        adapters._loaded.clear()
        room.streams.hold_adapters(adapters, lambda: EngineStats(adapters={}))
        asked = prepared("r")
        asked = replace(asked, request=replace(asked.request, scope=CacheScope(adapter="x")))
        reader = asyncio.create_task(read(room.streams.deltas(asked), []))
        await until(lambda: bool(room.link.commands))
        room.streams.lose("it is gone")
        with pytest.raises(ExecutionError, match="it is gone"):
            await asyncio.wait_for(reader, 30)
        assert len(room.streams) == 0

    run(work())
