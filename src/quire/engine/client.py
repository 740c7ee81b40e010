"""EngineClient: the door's view of an engine. Plain values go in, plain values come out.

    the door: text, defaults, outputs            the engine: tokens, blocks, steps
        Add, Abort, Stop … ───── send ────────────►
        ◄──────────────── receive ─────────── SequenceUpdate, one per sequence that advanced

No message refers to an object of the other side, so a host can pass them on to another process (`process/`). An
update has only the new token ids and log-probabilities; its counts are totals. The log-probabilities of the prompt are
in the first update of the first sequence. An update with a finish reason is the last one of its sequence, and every
sequence of a request that was not aborted gets one. The beams of a search can be replaced until the search ends, so
they are sent once, at its end.

A client belongs to one thread. An engine that has failed or is closed is not used again: every call raises
`ExecutionError` with the cause, except commands that end a request or drop an adapter: nothing is left to end or drop.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol

from quire.core.errors import ExecutionError, InvariantError
from quire.core.logprobs import TokenLogprobs
from quire.core.request import FinishReason, Request
from quire.core.validate import RequestLimits
from quire.engine.commands import Abort, Add, AnyCommand, AskDisk, DropAdapter, Fail, Stop
from quire.engine.core import EngineCore
from quire.engine.process.interrupts import InterruptsDeferred
from quire.engine.records.live import LiveFrame
from quire.engine.records.stats import EngineStats
from quire.memory.cache_journal import CacheNews
from quire.scheduler.commit import StepOutcome

ASK_S: Final = 0.02
"""Seconds between two `AskDisk` commands to an idle engine."""
FEW_ASKED: Final = 50
"""`AskDisk` commands in a row without an answer, after which the interval grows."""
MOST_SLOWER: Final = 50
"""The interval grows at most by this factor."""
STORE_S: Final = 5.0
"""Seconds that a closing engine goes on storing blocks."""


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """The progress of one sequence of a request since its previous update."""

    request_id: str
    branch: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    error: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float | None = None  # of a beam search's result
    waited_s: float | None = None  # from arrival to the first step
    num_disk_tokens: int = 0  # cached tokens that were loaded from disk for this request
    num_host_tokens: int = 0  # cached tokens that were copied from the host
    vector: bytes = b""  # float32 numbers, when a pooled request ends


class EngineLink(Protocol):
    """Sends commands to an engine that runs in its own thread or process."""

    def send(self, command: AnyCommand) -> None:
        """Send a command. Returns at once; a refusal or failure comes back as an update."""
        ...


def refused(request: Add, message: str) -> list[SequenceUpdate]:
    """Return the updates that end a request which the engine refused. Does not mutate."""
    return [
        SequenceUpdate(request.request_id, branch, [], [], 0, FinishReason.ERROR, message)
        for branch in range(request.sampling.num_sequences)
    ]


class EngineClient:
    """Reaches an engine in this process; `receive` runs its steps."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_sent: dict[Request, int] = {}  # tokens sent of each running sequence, except beams
        self._failure = ""

    @property
    def limits(self) -> RequestLimits:
        """The engine's limits for requests."""
        return self._core.scheduler.limits

    @property
    def is_idle(self) -> bool:
        """Whether no request is running."""
        return not self._core.scheduler.requests

    @property
    def ask_s(self) -> float | None:
        """Seconds after which to send an idle engine `AskDisk`; grows while the disk does not answer."""
        disk = self._core.scheduler.memory.disk
        return ASK_S * min(1 + disk.num_asked // FEW_ASKED, MOST_SLOWER) if disk.is_storing else None

    def send(self, command: AnyCommand) -> None:
        """Carry out a command; raises `InvalidRequestError` for a request that can never be served. Mutates."""
        if self._failure and isinstance(command, Abort | DropAdapter | Fail | Stop):
            return
        self._require_engine()
        with InterruptsDeferred():
            self._carry_out(command)

    def _carry_out(self, command: AnyCommand) -> None:
        match command:
            case Add(request_id):
                self._core.send(command)
                if command.sampling.num_beams == 1:
                    self._num_sent[self._core.scheduler.requests[request_id]] = len(command.output_token_ids)
            case Abort(request_id) | Fail(request_id):
                members = self._members(request_id)
                if self._forget(request_id):
                    self._core.send(command)
                _release(members)
            case Stop(request_id, branch):
                members = self._members(request_id)
                for member in members:
                    if member.branch == branch and self._num_sent.pop(member, None) is not None:
                        self._core.send(command)
                _release(members)
            case _:
                self._core.send(command)

    def receive(self) -> list[SequenceUpdate]:
        """Run one complete step: an interrupt waits for its end. Any exception means a broken engine. Mutates."""
        self._require_engine()
        with InterruptsDeferred():
            try:
                outcome = self._core.step()
                if outcome is None and not self.is_idle:
                    raise InvariantError("requests are waiting, but none can be scheduled")
            except Exception as error:
                self._failure = f"the engine has failed: {type(error).__name__}: {error}"
                raise
            return [] if outcome is None else self._updates(outcome)

    def stats(self) -> EngineStats:
        """Return the engine's counters and its present load. Does not mutate; O(requests)."""
        return self._core.stats()

    @property
    def has_news(self) -> bool:
        """Whether `live` has something to report."""
        return self._core.has_news

    def live(self) -> LiveFrame | None:
        """Return the events since the last call. Mutates."""
        return self._core.take_live()

    @property
    def has_cache_news(self) -> bool:
        """Whether `take_cache_news` has something to report."""
        return self._core.has_cache_news

    def take_cache_news(self) -> CacheNews | None:
        """Return the blocks that became or ceased to be cache hits since the last call. Mutates."""
        return self._core.take_cache_news()

    def close(self) -> None:
        """Close the engine. If it is idle, blocks that are being written to the disk get `STORE_S` to finish."""
        if not self._failure:
            self._failure = "the engine is closed"
            if self.is_idle:
                self._finish_storing()
        self._core.close()

    def _finish_storing(self) -> None:
        end_s = time.monotonic() + STORE_S
        with suppress(ExecutionError):
            while self.ask_s is not None and time.monotonic() < end_s:
                self._core.send(AskDisk())
                time.sleep(ASK_S / 10)

    def _updates(self, outcome: StepOutcome) -> list[SequenceUpdate]:
        samples = [request for request in outcome.opened if request.sampling.num_beams == 1]
        self._num_sent.update(dict.fromkeys(samples, 0))
        grown = [request for request in outcome.advanced if request in self._num_sent]
        ended = [request for request in outcome.finished if request in self._num_sent or request.sampling.num_beams > 1]
        updates: list[SequenceUpdate] = []
        for request in dict.fromkeys([*grown, *samples, *ended]):
            updates += self._update(request, self._num_sent.get(request, 0))
        _release(outcome.finished)
        return updates

    def _update(self, request: Request, num_sent: int) -> list[SequenceUpdate]:
        """Return the update of a sequence, or those of all sequences of a group that ended before it opened."""
        tokens = request.tokens[request.num_prompt_tokens + num_sent :].tolist()
        if request.finish_reason is None and not tokens:
            return []
        if request.finish_reason is None:
            self._num_sent[request] = num_sent + len(tokens)
        else:
            self._num_sent.pop(request, None)
        unopened = request.group is not None and not request.group.opened
        branches = range(request.sampling.num_sequences) if unopened else [request.branch]
        return [
            SequenceUpdate(
                request_id=request.request_id,
                branch=branch,
                token_ids=tokens,
                logprobs=request.logprobs[-len(tokens) :] if tokens else [],  # tokens that it began with have none
                num_cached_tokens=request.num_cached_tokens,
                finish_reason=request.finish_reason,
                error=request.error,
                prompt_logprobs=() if num_sent or branch else tuple(request.prompt_logprobs),
                cumulative_logprob=request.cumulative_logprob,
                waited_s=None if num_sent else request.waited_s,
                num_disk_tokens=request.num_disk_tokens,
                num_host_tokens=request.num_host_tokens,
                vector=request.vector,
            )
            for branch in branches
        ]

    def _forget(self, request_id: str) -> bool:
        """Send no more updates of a request; return whether it is running. Mutates."""
        for member in self._members(request_id):
            self._num_sent.pop(member, None)
        return request_id in self._core.scheduler.requests

    def _members(self, request_id: str) -> list[Request]:
        leader = self._core.scheduler.requests.get(request_id)
        if leader is None:
            return []
        return list(leader.group.members) if leader.group else [leader]

    def _require_engine(self) -> None:
        if self._failure:
            raise ExecutionError(self._failure)


def _release(requests: Iterable[Request]) -> None:
    """Part groups that have ended from their sequences, so that they are freed at once and not at a collection."""
    for request in requests:
        if request.group is not None and all(member.is_finished for member in request.group.members):
            request.group.members = []
