"""EngineClient: an engine as its door sees it. Plain values go in, plain values come out.

    the door: text, defaults, outputs            the engine: tokens, blocks, steps
        EngineRequest ───── add ──────────────────►
        (request id) ────── abort, stop ──────────►
        ◄──────────────── receive ─────────── SequenceUpdate, one per sequence that got further

Nothing of a message refers to an object of the other side, so the engine may as well run in another process:
`InProcessClient` is the one that needs none. Token ids and log-probabilities of an update are new ones only; counts
are totals. Those of the prompt come once, with the first update of the first sequence. The update that brings a finish
reason is the last one of its sequence, and every sequence of a request that was not aborted gets one. The beams of a
search can still be replaced until it is over, so they are sent once, when they end.

A client belongs to one thread. An engine that fails is not used again: whatever is asked of it, `ExecutionError` says
what happened.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

from quire.core.errors import ExecutionError, InvariantError
from quire.core.logprobs import TokenLogprobs
from quire.core.request import DEFAULT_SCOPE, CacheScope, FinishReason, Request
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.core import EngineCore
from quire.engine.interrupts import InterruptsDeferred
from quire.engine.live import LiveFrame
from quire.engine.stats import EngineStats
from quire.scheduler.commit import StepOutcome


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A prompt and what is wanted of it."""

    request_id: str
    prompt_token_ids: array[int]
    sampling: SamplingParams
    scope: CacheScope = DEFAULT_SCOPE
    priority: int = 0

    def to_request(self) -> Request:
        """Return it as the control plane knows it. Does not mutate."""
        return Request(self.request_id, self.prompt_token_ids, self.sampling, scope=self.scope, priority=self.priority)


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What one sequence of a request has got since the update before."""

    request_id: str
    branch: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    num_cached_tokens: int
    finish_reason: FinishReason | None = None
    error: str = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cumulative_logprob: float | None = None  # of a text that a beam search has found


class EngineClient(Protocol):
    """Runs requests; see the module for the messages."""

    @property
    def limits(self) -> RequestLimits:
        """What the engine can take: the door checks every request against it before any is added."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        ...

    def add(self, request: EngineRequest) -> None:
        """Take a request in; raises `InvalidRequestError` for what can never be served. Mutates."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request and all its sequences; one that has ended already is left alone. Mutates."""
        ...

    def fail(self, request_id: str, message: str) -> None:
        """End a request with an error; nothing that it alone had cached stays. Mutates."""
        ...

    def stop(self, request_id: str, branch: int) -> None:
        """End one sequence, because its text reached a stop string; one that has ended is left alone. Mutates."""
        ...

    def receive(self) -> list[SequenceUpdate]:
        """Have the engine do a step and return what is new; empty where the step brought nothing. Mutates."""
        ...

    def stats(self) -> EngineStats:
        """Return what the engine has done and is doing. Does not mutate; O(requests)."""
        ...

    def watch(self) -> None:
        """Have what happens in the engine noted, from the beginning if it is already. Mutates."""
        ...

    def unwatch(self) -> None:
        """Have nothing noted any more. Mutates."""
        ...

    @property
    def has_news(self) -> bool:
        """Whether `live` would tell something."""
        ...

    def live(self) -> LiveFrame | None:
        """Return what has happened since the last call; None while nothing is noted. Mutates; O(changes + running)."""
        ...

    def close(self) -> None:
        """Let the engine go; may be called twice."""
        ...


class EngineLink(Protocol):
    """Passes requests on to an engine that works by itself, in a thread or in a process of its own.

    Calls return at once; what was refused or failed comes back as an update.
    """

    def add(self, request: EngineRequest) -> None:
        """Have a request taken in; if it is refused after all, its sequences end with an error."""
        ...

    def abort(self, request_id: str) -> None:
        """Have a request ended."""
        ...

    def fail(self, request_id: str, message: str) -> None:
        """Have a request ended with an error."""
        ...

    def stop(self, request_id: str, branch: int) -> None:
        """Have one sequence ended."""
        ...


def refused(request: EngineRequest, message: str) -> list[SequenceUpdate]:
    """Return the updates that end a request which an engine could not take in. Does not mutate."""
    return [
        SequenceUpdate(request.request_id, branch, [], [], 0, FinishReason.ERROR, message)
        for branch in range(request.sampling.num_sequences)
    ]


class InProcessClient:
    """An engine in this process, stepped by whoever receives."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._num_sent: dict[Request, int] = {}  # the tokens sent of every sequence that has not ended, beams aside
        self._failure = ""

    @property
    def limits(self) -> RequestLimits:
        """What the engine can take."""
        return self._core.scheduler.limits

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return not self._core.scheduler.requests

    def add(self, request: EngineRequest) -> None:
        """Take a request in. Mutates."""
        self._require_engine()
        added = request.to_request()
        self._core.add_request(added)
        if added.sampling.num_beams == 1:
            self._num_sent[added] = 0

    def abort(self, request_id: str) -> None:
        """End a request and all its sequences. Mutates."""
        if self._forget(request_id):
            self._core.abort(request_id)

    def fail(self, request_id: str, message: str) -> None:
        """End a request with an error. Mutates."""
        if self._forget(request_id):
            self._core.fail(request_id, message)

    def stop(self, request_id: str, branch: int) -> None:
        """End one sequence. Mutates."""
        for member in self._members(request_id):
            if member.branch == branch and self._num_sent.pop(member, None) is not None:
                self._core.stop(request_id, branch)

    def receive(self) -> list[SequenceUpdate]:
        """Do a step, whole: an interrupt waits for its end. An exception means that the engine is broken. Mutates."""
        self._require_engine()
        with InterruptsDeferred():
            try:
                outcome = self._core.step()
                if outcome is None and not self.is_idle:
                    raise InvariantError("requests are waiting, and none of them can be planned")
            except Exception as error:
                self._failure = f"the engine has failed: {type(error).__name__}: {error}"
                raise
            return [] if outcome is None else self._updates(outcome)

    def stats(self) -> EngineStats:
        """Return what the engine has done and is doing. Does not mutate."""
        return self._core.stats()

    def watch(self) -> None:
        """Have what happens noted. Mutates."""
        self._core.unwatch()
        self._core.watch()

    def unwatch(self) -> None:
        """Have nothing noted any more. Mutates."""
        self._core.unwatch()

    @property
    def has_news(self) -> bool:
        """Whether `live` would tell something."""
        return self._core.has_news

    def live(self) -> LiveFrame | None:
        """Return what has happened since the last call. Mutates."""
        return self._core.take_live()

    def close(self) -> None:
        """Let the engine go."""
        if not self._failure:
            self._failure = "the engine is closed"
        self._core.close()

    def _updates(self, outcome: StepOutcome) -> list[SequenceUpdate]:
        samples = [request for request in outcome.opened if request.sampling.num_beams == 1]
        self._num_sent.update(dict.fromkeys(samples, 0))
        grown = [request for request in outcome.advanced if request in self._num_sent]
        ended = [request for request in outcome.finished if request in self._num_sent or request.sampling.num_beams > 1]
        updates: list[SequenceUpdate] = []
        for request in dict.fromkeys([*grown, *samples, *ended]):
            updates += self._update(request, self._num_sent.get(request, 0))
        return updates

    def _update(self, request: Request, num_sent: int) -> list[SequenceUpdate]:
        """Return what is new of a sequence; of a group that ended before it opened, of all its sequences."""
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
                logprobs=request.logprobs[num_sent:],
                num_cached_tokens=request.num_cached_tokens,
                finish_reason=request.finish_reason,
                error=request.error,
                prompt_logprobs=() if num_sent or branch else tuple(request.prompt_logprobs),
                cumulative_logprob=request.cumulative_logprob,
            )
            for branch in branches
        ]

    def _forget(self, request_id: str) -> bool:
        """Send nothing more of a request; return whether it is under way. Mutates."""
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
