"""ReplicaSet: the engines of a model. It places requests in engines, and moves them when an engine dies.

    RequestStreams ── Add, Abort … ──► ReplicaSet ──► Replica 0 ──► engine
          ▲                              │  ▲   └───► Replica 1 ──► engine
          └────────── updates ───────────┘  └── lost: its parts go to the others, before new requests

To the streams of a server this is one engine (`EngineLink`). The router chooses the engine of a request. Every token
that an engine reports is recorded, so when the engine dies, its texts continue in another one with the same bits
(`parts`), and the request that killed it is found (`suspects`). The requests of a drained engine move in the same way,
so a rolling restart ends none of them.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Protocol

from quire.core.clock import Clock
from quire.core.errors import ExecutionError, InvariantError
from quire.core.executor import NoteLoaded
from quire.core.request import CacheScope, FinishReason
from quire.engine.client import SequenceUpdate
from quire.engine.commands import Abort, Add, AnyCommand, Fail, Stop, Survey
from quire.engine.process.connection import StartEngine
from quire.engine.process.heartbeat import BEAT_S
from quire.engine.process.messages import Loaded
from quire.engine.records.live import LiveFrame
from quire.engine.records.stats import EngineStats, ModelState, ReplicaStats, joined_stats
from quire.engine.replicas.book import PartBook
from quire.engine.replicas.fetches import Fetches
from quire.engine.replicas.parts import Part, TrackedRequest
from quire.engine.replicas.replica import Replica
from quire.engine.replicas.rolling import drain, roll
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.shown_memory import ShownMemory
from quire.memory.cache_journal import CacheNews
from quire.routing.router import Router
from quire.routing.scaling import Load, Scaling

logger = logging.getLogger("quire.engine")
scaling_logger = logging.getLogger("quire.scaling")  # a server shows its messages from level INFO on

MOST_WAIT_S: Final = 30.0
"""Seconds that a running request waits for an engine that can continue it, at least."""
LOADS_WAITED_FOR: Final = 2.0
"""It waits for at least this many times the load time, because a restarted engine loads as long again."""
GIVEN_UP: Final = "giving up on this engine; restart the server to try it again"
AT_FAULT: Final = "three engines died while computing this request, the last one without any other request"
STATES: Final = (
    ModelState.READY,
    ModelState.UNRESPONSIVE,
    ModelState.STARTING,
    ModelState.RESTARTING,
    ModelState.CLOSED,
    ModelState.FAILED,
)
"""The state of the set is the first of these that one of its engines has."""


class SetOwner(Protocol):
    """Receives the updates and failures of a set's requests."""

    def process(self, updates: list[SequenceUpdate]) -> None:
        """Requests have new updates."""
        ...

    def lose(self, message: str, request_ids: Sequence[str] | None = None) -> None:
        """These requests cannot go on; None: none can."""
        ...


class ReplicaSet:
    """The engines of a model. Implements `EngineLink`; use it in one event loop.

    `note_ready`: called with each engine that takes requests, before it gets any.
    """

    def __init__(
        self,
        start: StartEngine,
        settings: ReplicaSettings,
        router: Router,
        clock: Clock,
        *,
        note_loaded: NoteLoaded | None = None,
        note_ready: Callable[[Replica], None] = lambda replica: None,
    ) -> None:
        indices, silence_s = range(settings.num_replicas), settings.silence_s
        self.replicas = [Replica(index, start, self, clock, silence_s) for index in indices]
        self.settled = asyncio.Event()  # an engine has been ready, or all have failed permanently
        self.num_continued = self.num_moved = self.num_at_fault = 0
        self._router = router
        self._clock = clock
        self._continue_on = settings.continue_on
        self._scaling = None if settings.least is None else Scaling(settings.least, settings.num_replicas)
        self._removal: asyncio.Task[None] | None = None
        self._note_loaded = note_loaded
        self._note_ready = note_ready
        self._owner: SetOwner | None = None
        self.book = PartBook(self.replicas, router, clock)
        self._draining: set[Replica] = set()
        self._rolling = asyncio.Lock()
        self._suspects = self.book.suspects
        self.memory = ShownMemory(self.replicas)
        courier = settings.courier
        self.fetches = None if courier is None else Fetches(self, self.replicas, router, courier, clock)
        self._ticks: asyncio.Task[None] | None = None
        self._is_closed = False

    def serve(self, owner: SetOwner) -> None:
        """Set the owner; call it before the first command. Mutates."""
        self._owner = owner

    @property
    def state(self) -> ModelState:
        """The state of the set: it takes requests while one of its engines does."""
        if self._is_closed:
            return ModelState.CLOSED
        states = {replica.state for replica in self.in_use}
        return next((state for state in STATES if state in states), ModelState.STARTING)

    @property
    def in_use(self) -> list[Replica]:
        """The engines that run or are starting; the others start when the load requires it."""
        return [replica for replica in self.replicas if replica.is_in_use]

    @property
    def failure(self) -> str:
        """Why no engine takes requests; empty while one does."""
        is_ready = self.state is ModelState.READY
        return "" if is_ready else next((each.failure for each in self.replicas if each.failure), "")

    def stats(self) -> EngineStats:
        """Return the counters of all engines together, and the state of each. Does not mutate."""
        joined = joined_stats([each.stats for each in self.replicas if each.state.has_engine])
        return replace(
            joined,
            restarts_total=sum(each.num_restarts for each in self.replicas),
            replicas=tuple(map(self._stats_of, self.replicas)),
            continued_total=self.num_continued,
            moved_total=self.num_moved,
            at_fault_total=self.num_at_fault,
            **({} if self.fetches is None else self.fetches.figures()),
        )

    def _stats_of(self, replica: Replica) -> ReplicaStats:
        routes, num_texts = self._router.routes(replica.index), self.book.num_at(replica)
        return ReplicaStats(replica.state, replica.failure, num_texts, replica.num_restarts, routes, replica.stats)

    # ---- commands ---------------------------------------------------------------------------------------------------

    def send(self, command: AnyCommand) -> None:
        """Send a command to the engines it concerns; raises `ExecutionError` for `Add` if none is ready. Mutates."""
        match command:
            case Add():
                if self.state is not ModelState.READY:
                    raise ExecutionError("the engine is not running")
                part = self.book.track(command)
                if not self._place(part):
                    self.book.wait([part])
            case Abort(request_id) | Fail(request_id):
                if request_id in self.book.requests:
                    self._withdraw(self.book.requests[request_id], command)
                    self._place_all()
            case Stop(request_id, branch):
                self._stop(request_id, branch)
            case _:
                for replica in self.replicas:
                    replica.send(command)

    def send_to(self, index: int, command: AnyCommand) -> None:
        """Send one engine a command that concerns no request; if it is not running, drop the command. Mutates."""
        self.replicas[index].send(command)

    def holder(self, tokens: array[int], scope: CacheScope) -> int:
        """Return the number of the engine that holds most of a prompt; raises `ExecutionError` if none runs."""
        there = [each.index for each in self.replicas if each.state.has_engine]
        if not there:
            raise ExecutionError("the engine is not running")
        return self._router.holder(self._router.prompt(tokens, scope), there)

    # ---- life cycle -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the engines, and restart each whenever it ends, until `close`."""
        self._ticks = asyncio.create_task(self._tick(), name="quire-replicas")
        for replica in self.replicas[: None if self._scaling is None else self._scaling.least]:
            replica.begin()

    async def close(self) -> None:
        """End all requests and all engines. May be called twice."""
        self._is_closed = True
        self._drop_all("the engine is closed")
        for task in (self._ticks, self._removal):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(replica.close() for replica in self.replicas))
        if self.fetches is not None:
            await self.fetches.close()
        self.settled.set()
        self._owner, self._note_ready = None, lambda replica: None  # the model and its tokenizer can be freed

    def close_to_requests(self, replica: Replica) -> None:
        """Send an engine no new requests until `open_to_requests`; its own requests go on. Mutates."""
        self._draining.add(replica)

    def open_to_requests(self, replica: Replica) -> None:
        """Allow new requests in an engine again. Mutates."""
        self._draining.discard(replica)
        self._place_all()

    def move(self, replica: Replica, most: int) -> list[Part]:
        """Take at most this many parts from a healthy engine; return the parts that replace them. Mutates."""
        return self._move(self.book.at(replica)[:most])

    async def roll(self) -> None:
        """Restart the engines one after another; their requests continue in the others. Mutates.

        Raises `ExecutionError` if an engine does not come back, and then restarts no further ones. If a rolling restart
        is already running, waits for its end instead.
        """
        is_rolling = self._rolling.locked()
        async with self._rolling:
            if is_rolling:
                return
            if self._removal is not None:
                await asyncio.wait([self._removal])
            await roll(self, self._clock, may_move=self._continue_on != "never")

    async def _tick(self) -> None:
        """Once a second, end the requests that have waited too long for an engine, and check the load."""
        while True:
            await asyncio.sleep(BEAT_S)
            now = self._clock.now()
            late = dict.fromkeys(part.request for part in self.book.waiting if not self._may_still_wait(part, now))
            for request in late:
                self._give_up(request, f"no engine could continue this request within {self._most_wait_s:.0f} s")
            self._place_all()
            if self._scaling is not None and not self._rolling.locked():
                self._scale(self._scaling, now)

    def _scale(self, scaling: Scaling, now: float) -> None:
        """Start one more engine, or end one, if the load requires it. Mutates."""
        router, book = self._router, self.book
        engines = [each for each in self.in_use if each.state is not ModelState.FAILED]
        num_ready = sum(map(self._is_open, engines))
        num_waiting_tokens = router.num_waiting_tokens + sum(part.num_tokens for part in book.waiting)
        change = scaling.look(
            now, Load(len(engines), num_ready, router.num_busy, num_waiting_tokens, router.num_done_tokens)
        )
        idle = next((each for each in self.replicas if not each.is_in_use), None)
        if change > 0 and idle is not None:
            scaling_logger.info("replica %d starts: a request would wait for %.1f s", idle.index, scaling.wait_s)
            idle.begin()
        elif change < 0:
            self._removal = asyncio.create_task(self._remove(engines[-1]), name="quire-removal")

    async def _remove(self, replica: Replica) -> None:
        """End an engine once its requests have ended or moved. Mutates."""
        scaling_logger.info("replica %d ends: the others have capacity for its requests", replica.index)
        self.close_to_requests(replica)
        try:
            await drain(self, replica, self._clock, may_move=self._continue_on != "never")
            await replica.rest()
            self.replica_lost(replica, is_planned=True)
        finally:
            self.open_to_requests(replica)

    @property
    def _most_wait_s(self) -> float:
        return max(MOST_WAIT_S, *(LOADS_WAITED_FOR * each.load_s for each in self.replicas))

    def _may_still_wait(self, part: Part, now: float) -> bool:
        if now - part.waits_since_s <= self._most_wait_s:
            return True
        return any(each.is_ready and self._has_same_bits(each, part) for each in self.replicas)

    # ---- events of replicas -----------------------------------------------------------------------------------------

    def note_loaded(self, replica: Replica, message: Loaded) -> None:
        """Pass on the loading progress of the first engine. Does not mutate."""
        if self._note_loaded is not None and not replica.index:
            self._note_loaded(message.count, message.total, message.what)

    def replica_ready(self, replica: Replica) -> None:
        """Place the waiting parts, now that an engine is ready. Mutates."""
        self._router.add(replica.index)
        if self._router.reads_blocks:
            replica.send(Survey())
        self._note_ready(replica)
        self.memory.begin(replica)
        self._place_all()
        self.settled.set()

    def replica_changed(self, replica: Replica) -> None:
        """Place the waiting parts if an engine responds again. Mutates."""
        if replica.is_ready:
            self._place_all()

    def take_updates(self, replica: Replica, updates: list[SequenceUpdate]) -> None:
        """Record the updates of requests, and pass them on. Mutates."""
        book, told, passed = self.book, list[SequenceUpdate](), None
        for update in updates:
            part = book.named(update.request_id, replica)
            if part is None:
                continue
            told.append(part.take(update))
            book.start(part)
            part.fingerprint = replica.fingerprint
            if self._suspects.has_passed(part):
                passed = part  # it may pass several times: each of its samples has an update
            if part.is_over:
                book.forget(part)
        if told:
            self._tell(told)
        if passed is not None:
            self._end_trial(passed)
        elif self._suspects.waiting:
            self._begin_trial()  # an engine may now be empty

    def take_blocks(self, replica: Replica, news: CacheNews) -> None:
        """Report changes of an engine's prefix cache to the router. Mutates."""
        if self._router.note(replica.index, news):
            replica.send(Survey())

    def take_live(self, replica: Replica, frame: LiveFrame) -> None:
        """Pass on the memory events of a watched engine. Does not mutate."""
        self.memory.take(replica, frame)

    def replica_lost(self, replica: Replica, *, is_planned: bool) -> None:
        """Move the requests of an engine that has ended to others, and end the one at fault. Mutates."""
        self._router.lose(replica.index)
        parts = self.book.at(replica)
        unsent = [part for part in parts if part.fetch is not None]
        for part in parts:
            self.book.leave(part)
        if self._is_closed:
            return
        self.book.wait(unsent)
        parts = [part for part in parts if part not in unsent]
        if replica.state is ModelState.FAILED:
            logger.error("replica %d: %s; %s", replica.index, replica.failure, GIVEN_UP)
        if self.in_use and all(each.state is ModelState.FAILED for each in self.in_use):
            self._drop_all(replica.failure)
            self.settled.set()
        elif self._continue_on == "never":
            for request in dict.fromkeys(part.request for part in parts):
                self._give_up(request, replica.failure)
        elif is_planned:
            if self._suspects.on_trial in parts:
                self._suspects.end_trial()
            self.book.wait([piece for part in parts for piece in part.pieces()])
        elif parts:
            self._go_on(parts)
        if replica is self._suspects.engine:
            self._suspects.engine = None
        self._place_all()

    def _go_on(self, parts: list[Part]) -> None:
        """Continue the parts of an engine that died, in halves or alone; end the one at fault. Mutates."""
        first, second, at_fault = self._suspects.note_death(parts)
        self.num_continued += len(first) + len(second)
        ready = [each for each in self.replicas if self._is_open(each)]
        middle = len(ready) // 2
        if middle:
            for half, engines in ((first, ready[:middle]), (second, ready[middle:])):
                self.book.wait([part for part in half if not self._place(part, engines)])
        else:
            self.book.wait([*first, *second])
        if at_fault is not None:
            self.num_at_fault += 1
            logger.error("request %s: %s", at_fault.request.add.request_id, AT_FAULT)
            self._fail(at_fault.request, AT_FAULT)

    # ---- which engine -----------------------------------------------------------------------------------------------

    def _is_open(self, replica: Replica) -> bool:
        """Whether an engine takes new requests."""
        return replica.is_ready and replica not in self._draining and replica is not self._suspects.engine

    def _has_same_bits(self, replica: Replica, part: Part) -> bool:
        """Whether an engine is allowed to continue a part's output."""
        return self._continue_on == "any" or not part.output or part.fingerprint == replica.fingerprint

    def _place(self, part: Part, among: Sequence[Replica] | None = None) -> bool:
        """Send a part to the engine that the router chooses; return False if none can take it. Mutates."""
        engines = [each for each in among or self.replicas if self._is_open(each) and self._has_same_bits(each, part)]
        if engines:
            self._put(part, engines)
        return bool(engines)

    def _put(self, part: Part, among: Sequence[Replica]) -> None:
        """Send a part to one of these engines. Mutates."""
        router, add = self._router, part.next_add()
        for each in self.replicas:  # also one that ends: the router knows it until its process is gone
            (router.resume if each in among else router.pause)(each.index)
        prompt = router.prompt(add.names(router.block_size) + add.output_token_ids, add.scope)
        index = router.choose(part.name, prompt)
        if index is None:
            raise InvariantError(f"the router chose none of {len(among)} engines for request {part.name}")
        self.book.enter(part, self.replicas[index])
        if self.fetches is None or not self.fetches.holds(part, add, prompt):
            self.replicas[index].send(add)

    def _place_all(self) -> None:
        """Send the waiting parts, oldest first, to engines that can take them. Mutates."""
        self._begin_trial()
        if any(map(self._is_open, self.replicas)):
            self.book.wait([part for part in self.book.take_waiting() if not self._place(part)])

    def _move(self, parts: Sequence[Part]) -> list[Part]:
        """Take parts from their healthy engine; return the parts that replace them. Mutates."""
        if self._suspects.on_trial in parts:
            self._suspects.end_trial()
        for part in parts:
            if part.replica is not None:
                part.replica.send(Abort(part.name))
                self.book.leave(part)
        pieces = [piece for part in parts for piece in part.pieces()]
        self.num_moved += len(pieces)
        self.book.wait(pieces)
        self._place_all()
        return pieces

    # ---- trials -----------------------------------------------------------------------------------------------------

    def _begin_trial(self) -> None:
        """Try the next suspect alone, once an engine has no requests. Mutates."""
        suspects = self._suspects
        if suspects.on_trial is not None:
            return
        ready = [each for each in self.replicas if each.is_ready and each not in self._draining]
        for part in suspects.waiting:
            fitting = [each for each in ready if self._has_same_bits(each, part)]
            if fitting:
                self._try_alone(part, fitting)
                return
        suspects.engine = None

    def _try_alone(self, part: Part, fitting: Sequence[Replica]) -> None:
        """Send a suspect to an idle engine among these, or reserve one for it. Mutates."""
        suspects = self._suspects
        allowed = [each for each in fitting if each is suspects.engine] or fitting
        idle = next((each for each in allowed if not self.book.num_at(each)), None)
        if idle is not None:
            self.num_continued += 1
            suspects.begin(part, idle)
            self._put(part, [idle])
        elif all(each.is_ready or each.state is ModelState.FAILED for each in self.in_use):
            suspects.engine = min(allowed, key=self.book.num_at)  # it gets no new requests

    def _end_trial(self, part: Part) -> None:
        """End the trial of a part that has passed, and make room for the next suspect. Mutates."""
        if part is self._suspects.on_trial:  # else it has ended meanwhile, and the next one may be on trial
            self._suspects.end_trial()
        if self._suspects.waiting and part.replica is not None:
            self._move([part])
        else:
            self._place_all()

    # ---- ends -------------------------------------------------------------------------------------------------------

    def _stop(self, request_id: str, branch: int) -> None:
        """End one sequence, because its text reached a stop string. Mutates."""
        request = self.book.requests.get(request_id)
        if request is None:
            return
        request.ended.add(branch)
        for part in self.book.of(request):
            if part.branch not in (None, branch):
                continue
            if part.replica is not None:
                part.replica.send(Stop(part.name, branch if part.branch is None else 0))
            if part.is_over:
                self.book.forget(part)
        self._place_all()

    def _fail(self, request: TrackedRequest, message: str) -> None:
        """End all sequences of a request with an error. Mutates."""
        request_id = request.add.request_id
        told = [
            SequenceUpdate(request_id, branch, [], [], 0, FinishReason.ERROR, message)
            for branch in range(request.add.sampling.num_sequences)
            if branch not in request.ended
        ]
        self._withdraw(request)
        self._tell(told)

    def _withdraw(self, request: TrackedRequest, command: Abort | Fail | None = None) -> None:
        """Remove a request from all its engines, and forget it. Mutates."""
        for part in self.book.of(request):
            if part.replica is not None:
                part.replica.send(replace(command or Abort(part.name), request_id=part.name))
            self.book.forget(part)
        self.book.requests.pop(request.add.request_id, None)

    def _give_up(self, request: TrackedRequest, message: str) -> None:
        """End a request because no engine can continue it. Mutates."""
        self._withdraw(request)
        if self._owner is not None:
            self._owner.lose(message, [request.add.request_id])

    def _drop_all(self, message: str) -> None:
        """End all requests, because no engine will continue them. Mutates."""
        for request in list(self.book.requests.values()):
            self._give_up(request, message)

    def _tell(self, updates: list[SequenceUpdate]) -> None:
        if self._owner is not None:
            self._owner.process(updates)
