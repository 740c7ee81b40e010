"""Engines behind connections that lose, double, delay and tear what they say, and die to order.

Each is a whole control plane over a `ShadowExecutor`, so what it says of a request is known, whatever happens to it. It
steps when the test says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import QuireError
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import FinishReason
from quire.core.validate import RequestLimits
from quire.engine.client import EngineClient, SequenceUpdate, refused
from quire.engine.commands import Add, AnyCommand, Command
from quire.engine.core import EngineCore
from quire.engine.process.messages import (
    LENGTH_BYTES,
    Blocks,
    Close,
    FromEngine,
    Message,
    Ready,
    Stats,
    Updates,
    encode_message,
    message_from_engine,
)
from quire.engine.replicas.replica_set import ReplicaSet
from quire.engine.replicas.settings import ReplicaSettings
from quire.memory.manager import KVCacheManager
from quire.routing.router import Router
from quire.scheduler.scheduler import Scheduler
from support.shadow import ShadowExecutor

VOCAB = 1000
SPEC = KVCacheSpec.from_layers([None], block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
LIMITS = RequestLimits(VOCAB, 128, 400, 8)
KEY = b"one for all"
POISON = 13
"""An engine that has given a request with this token in its prompt a second token dies."""


class FakeEngine:
    """An engine and its connection. Implements `EngineConnection`."""

    def __init__(self, fingerprint: str = "same") -> None:
        config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=32, max_model_len=128)
        scheduler = Scheduler(config, KVCacheManager(SPEC, MemoryConfig(num_blocks=100, hash_key=KEY)), LIMITS)
        self.client = EngineClient(EngineCore(scheduler, ShadowExecutor(SPEC, VOCAB), ManualClock()))
        self.scheduler = scheduler
        self.is_dead = False
        self.may_end = asyncio.Event()  # while it is cleared, the process stays although it serves nobody
        self.may_end.set()
        self.commands: list[AnyCommand] = []
        self.process_id = 1
        self._num_delivered = 0
        self._held: list[bytes] = []
        self._queue: asyncio.Queue[FromEngine | bytes | None] = asyncio.Queue()
        self._queue.put_nowait(Ready(LIMITS, cast(Any, None), fingerprint))

    # ---- the side of the server -------------------------------------------------------------------------------------

    def send(self, message: Message | Command) -> None:
        if self.is_dead:
            return
        if isinstance(message, Close):
            self.kill()
        elif isinstance(message, Command):
            command = cast(AnyCommand, message)
            self.commands.append(command)
            try:
                self.client.send(command)
            except QuireError as error:
                assert isinstance(command, Add)
                self._deliver(refused(command, str(error)))

    async def receive(self) -> FromEngine | None:
        message = await self._queue.get()
        return message_from_engine(message) if isinstance(message, bytes) else message

    async def end(self, patience_s: float) -> int:
        self.is_dead = True
        await self.may_end.wait()
        return -9

    def kill(self) -> None:
        if not self.is_dead:
            self.is_dead = True
            self._queue.put_nowait(None)

    # ---- the side of the test ---------------------------------------------------------------------------------------

    def step(self, fault: str = "") -> None:
        """Do a step; `fault`: what becomes of the message about it: lost, doubled, late, torn or silent.

        A silent engine does not say which blocks it can hit.
        """
        if self.is_dead or self.client.is_idle:
            return
        updates = self.client.receive()
        if any(
            POISON in request.tokens[: request.num_prompt_tokens] and request.num_output_tokens >= 2
            for request in self._alive()
        ):
            self.kill()
            return
        self._report(fault)
        if updates:
            self._deliver(updates, fault)

    def _report(self, fault: str) -> None:
        """Say what can be hit, as the engine's thread does before the updates of a step; it may be lost."""
        news = self.client.take_cache_news()
        if news is not None and fault != "silent":
            self._queue.put_nowait(encode_message(Blocks(news))[LENGTH_BYTES:])

    def tell_stats(self, **more: Any) -> None:
        self._queue.put_nowait(Stats(replace(self.client.stats(), **more)))

    def _alive(self) -> list[Any]:
        return list(self.scheduler.requests.values())

    def _deliver(self, updates: Sequence[SequenceUpdate], fault: str = "") -> None:
        message = encode_message(Updates.of(updates, self._num_delivered))[LENGTH_BYTES:]
        self._num_delivered += 1
        if fault == "late":
            self._held.append(message)
            return
        said = [*self._held, *{"lost": [], "doubled": [message, message], "torn": [message[:-1]]}.get(fault, [message])]
        self._held.clear()
        for each in said:
            self._queue.put_nowait(each)


class Reader:
    """The streams of a server: what they were told of each sequence."""

    def __init__(self) -> None:
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], SequenceUpdate] = {}
        self.lost: dict[str, str] = {}

    def process(self, updates: list[SequenceUpdate]) -> None:
        for update in updates:
            place = update.request_id, update.branch
            assert place not in self.ends, "an update after the last one"
            assert update.request_id not in self.lost
            self.tokens.setdefault(place, []).extend(update.token_ids)
            if update.finish_reason is not None:
                self.ends[place] = update

    def lose(self, message: str, request_ids: Sequence[str] | None = None) -> None:
        assert request_ids is not None
        self.lost |= dict.fromkeys(request_ids, message)

    def errors(self) -> dict[str, str]:
        return {name: end.error for (name, _), end in self.ends.items() if end.finish_reason is FinishReason.ERROR}


class Fleet:
    """A set of such engines, and its reader."""

    def __init__(self, num_replicas: int, fingerprints: Sequence[str] = (), **options: Any) -> None:
        self.clock, self.reader = ManualClock(), Reader()
        self.engines: list[FakeEngine | None] = [None] * num_replicas
        self.starts: list[int] = []
        self.broken: set[int] = set()  # engines that cannot be started
        self.load_s = 0.0
        self.fingerprints = list(fingerprints)  # of the engines in the order in which they start
        self.set = ReplicaSet(self._start, ReplicaSettings(num_replicas, **options), Router(4, KEY), self.clock)
        self.set.serve(self.reader)

    async def _start(self, index: int) -> FakeEngine:
        self.starts.append(index)
        if index in self.broken:
            raise OSError(f"no process for engine {index}")
        self.clock.advance(self.load_s)
        engine = self.engines[index] = FakeEngine(self.fingerprints.pop(0) if self.fingerprints else "same")
        return engine

    async def __aenter__(self) -> Fleet:
        self.set.begin()
        await self.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.set.close()

    async def settle(self) -> None:
        """Let everything happen that has been said."""
        for _ in range(30):
            await asyncio.sleep(0)
        self.set.book.check()

    def engine(self, index: int) -> FakeEngine:
        engine = self.engines[index]
        assert engine is not None
        return engine

    async def step(self, *indices: int, fault: str = "") -> None:
        for index in indices or range(len(self.engines)):
            self.engine(index).step(fault)
        await self.settle()

    async def run(self, most: int = 2000) -> None:
        """Step until nothing is under way."""
        for _ in range(most):
            if not self.set.book.requests:
                break
            await self.step()
        assert not self.set.book.requests
        for engine in self.engines:
            if engine is not None and not engine.is_dead:
                engine.step()  # what was aborted leaves
                assert engine.client.is_idle
