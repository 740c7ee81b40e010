"""Gate: how much may wait, who may have how much, and when to come again.

    call ── enter ──► waiting ── begin (its first token) ──► under way ── leave ──►
              │        bounded in requests and in tokens       the engine bounds it
              │        and in time
              └──► 503 the queue is full, the server drains, the engine is not there     429 this key has its share

The engine's own queue has no bound, so what waits is counted here, before anything is enqueued: a call waits from its
entry to its first token. A call that finds nobody waiting is let in however large it is, because it could never come
in otherwise; so at most the limit waits, or one call. The same holds for the share of a key.

Whoever is refused is told when to come again: when, at the rate at which requests have begun lately, half of what
waits will have begun. Half, so that those who come again find room and the engine has not run dry meanwhile. The rate
counts only time in which somebody waited: an idle hour says nothing of how fast the engine is.

The same rate bounds how long a call may have to wait: one that would begin too late is worth nothing to its client any
more, and would only make those behind it late, too. A bound in requests alone cannot do that, because how long a queue
of requests is depends on the model, the machine and the prompts.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from quire.core.clock import Clock
from quire.core.errors import InvariantError
from quire.engine.stats import ModelState
from quire.serve.config import ServerConfig
from quire.serve.errors import ApiError, draining, engine_unavailable, overloaded, too_many_requests
from quire.serve.model import ServedModel
from quire.serve.tenants import Tenant

logger = logging.getLogger("quire.serve")

MIN_RETRY_S, MAX_RETRY_S = 1.0, 120.0
"""Clients do not wait longer than two minutes: they give up instead."""

RATE_MEMORY_S = 20.0
KNOWN_AFTER_S = 1.0
"""A rate that is known from less time than this says nothing of how long a call will wait."""

DRAINING_RETRY_S = 5.0
ENGINE_RETRY_S = 2.0
WARN_EVERY_S = 10.0
QUEUED_PER_SEQUENCE = 4
QUEUED_POOLS = 8


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How much may wait."""

    max_queued_requests: int
    max_queued_tokens: int
    max_wait_s: float | None = None


def gate_limits(config: ServerConfig, model: ServedModel) -> GateLimits:
    """Return the limits that are set, and where none are, those that suit the engine. Does not mutate."""
    engine, plan = model.config, model.report.plan
    requests, tokens = config.max_queued_requests, config.max_queued_tokens
    return GateLimits(
        QUEUED_PER_SEQUENCE * engine.max_num_seqs if requests is None else requests,
        QUEUED_POOLS * plan.num_blocks * engine.block_size if tokens is None else tokens,
        config.max_wait_s,
    )


class Refusal(Enum):
    """Why a call was not let in."""

    QUEUE_FULL = "queue_full"
    WAIT = "wait_too_long"
    KEY_LIMIT = "key_limit"
    DRAINING = "draining"
    ENGINE = "engine_not_ready"


class DrainRate:
    """How many requests begin in a second while any wait: an average that forgets.

    >>> rate = DrainRate()
    >>> rate.pass_time(2.0); rate.note(6)
    >>> round(rate.per_second)
    3
    """

    def __init__(self) -> None:
        self._num_begun = 0.0
        self._seconds = 0.0

    @property
    def per_second(self) -> float:
        """The rate; 0 where nothing has begun yet."""
        return self._num_begun / self._seconds if self._seconds else 0.0

    @property
    def seconds(self) -> float:
        """How much time the rate is known from, the old counting less."""
        return self._seconds

    def wait_s(self, num_requests: int) -> float:
        """Return how long the last of so many will wait: as if one more began just now, so never too pessimistic."""
        return num_requests * self._seconds / (self._num_begun + 1.0)

    def pass_time(self, seconds: float) -> None:
        """Some time has passed in which requests waited. Mutates."""
        kept = math.exp(-seconds / RATE_MEMORY_S)
        self._num_begun *= kept
        self._seconds = self._seconds * kept + RATE_MEMORY_S * (1.0 - kept)

    def note(self, num_requests: int) -> None:
        """So many requests have begun. Mutates."""
        self._num_begun += num_requests


class Gate:
    """Lets calls in, or says when to come again. Called in one event loop; all operations on a call are O(1)."""

    def __init__(self, clock: Clock, limits: GateLimits, state: Callable[[], ModelState]) -> None:
        self._clock = clock
        self._state = state
        self.limits = limits
        self._is_draining = False
        self._rate = DrainRate()
        self._seen_s = self._warned_s = -math.inf
        self._refused_since_warning = 0
        self._visits: set[Visit] = set()
        self._inside: Counter[str] = Counter()
        self._waiting_requests = self._waiting_tokens = 0
        self.refusals: Counter[Refusal] = Counter()
        self.refusals_of: Counter[str] = Counter()  # by tenant: those for want of a place

    @property
    def num_waiting_requests(self) -> int:
        """Requests that have come in and have not begun."""
        return self._waiting_requests

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the prompts of these requests."""
        return self._waiting_tokens

    @property
    def num_visits(self) -> int:
        """Calls that have come in and not left."""
        return len(self._visits)

    @property
    def num_requests(self) -> int:
        """Requests of these calls."""
        return self._inside.total()

    @property
    def is_draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self._is_draining

    @property
    def is_ready(self) -> bool:
        """Whether calls are let in while there is room: what readiness tells."""
        return not self._is_draining and self._state() is ModelState.READY

    @property
    def retry_after_s(self) -> float:
        """Seconds after which half of what waits will have begun, if all goes on as it did lately.

        The nearest power of two: the exact number would tell every client how much others have sent.
        """
        self._pass_time()
        if self._rate.per_second > 0:
            seconds = self._waiting_requests / 2 / self._rate.per_second
        else:
            seconds = self._rate.seconds
        return min(2.0 ** round(math.log2(max(seconds, MIN_RETRY_S))), MAX_RETRY_S)

    def visits_of(self, tenant: Tenant) -> list[Visit]:
        """Return the calls of a tenant that have come in and not left. Does not mutate."""
        return [visit for visit in self._visits if visit.tenant == tenant.name]

    def drain(self) -> None:
        """Let nobody in any more; those inside stay. Mutates."""
        self._is_draining = True

    def closed(self) -> ApiError | None:
        """Return the answer of a server that lets nobody in at the moment; None: it does. Does not mutate."""
        if self._is_draining:
            return draining(DRAINING_RETRY_S)
        return None if self.is_ready else engine_unavailable(ENGINE_RETRY_S)

    def require_ready(self) -> None:
        """Raise that answer, for a call that need not be looked at then. Counts it."""
        answer = self.closed()
        if answer is not None:
            raise self._refused(Refusal.DRAINING if self._is_draining else Refusal.ENGINE, answer)

    def require_place(self, tenant: Tenant, num_requests: int = 1, num_tokens: int = 1) -> None:
        """Raise the answer to a call that cannot come in. Counts it.

        As it is, for one that is as small as can be: asked first, it spares the work on prompts that would be refused.
        """
        self.require_ready()
        inside = self._inside[tenant.name]
        if tenant.max_requests is not None and inside and inside + num_requests > tenant.max_requests:
            self.refusals_of[tenant.name] += 1
            # When one of its own will have ended nobody knows; how long others wait is not told.
            raise self._refused(Refusal.KEY_LIMIT, too_many_requests(MIN_RETRY_S))
        why = self._overload(num_requests, num_tokens) if self._waiting_requests else None
        if why is not None:
            self._warn_of_full_queue()
            self.refusals_of[tenant.name] += 1
            raise self._refused(why, overloaded(self.retry_after_s))

    def enter(self, tenant: Tenant, num_requests: int, num_tokens: int) -> Visit:
        """Let a call of so many requests and tokens of prompts in; raises `ApiError` where it must come again. Mutates.

        The visit is a context manager: whoever leaves it has left the gate.
        """
        self.require_place(tenant, num_requests, num_tokens)
        self._pass_time()
        visit = Visit(self, tenant.name, num_requests, num_tokens)
        self._visits.add(visit)
        self._inside[tenant.name] += num_requests
        self._waiting_requests += num_requests
        self._waiting_tokens += num_tokens
        return visit

    def check(self) -> None:
        """Raise `InvariantError` unless the counts are those of the visits."""
        waiting = [visit for visit in self._visits if visit.is_waiting]
        inside: Counter[str] = Counter()
        for visit in self._visits:
            inside[visit.tenant] += visit.num_requests
        if self._waiting_requests != sum(visit.num_requests for visit in waiting):
            raise InvariantError("the gate counts other requests than those that wait")
        if self._waiting_tokens != sum(visit.num_tokens for visit in waiting):
            raise InvariantError("the gate counts other tokens than those that wait")
        if inside != self._inside or any(count <= 0 for count in self._inside.values()):
            raise InvariantError("the gate counts other requests of tenants than those inside")

    def _overload(self, num_requests: int, num_tokens: int) -> Refusal | None:
        """Return which bound a call would break. Mutates the rate, in which time has passed."""
        limits, waiting = self.limits, self._waiting_requests + num_requests
        if waiting > limits.max_queued_requests or self._waiting_tokens + num_tokens > limits.max_queued_tokens:
            return Refusal.QUEUE_FULL
        self._pass_time()
        if limits.max_wait_s is None or self._rate.seconds < KNOWN_AFTER_S:
            return None
        return Refusal.WAIT if self._rate.wait_s(waiting) > limits.max_wait_s else None

    def _begin(self, visit: Visit) -> None:
        self._pass_time()
        self._rate.note(visit.num_requests)
        self._stop_waiting(visit)

    def _leave(self, visit: Visit) -> None:
        self._pass_time()
        if visit.is_waiting:
            self._stop_waiting(visit)
        self._visits.remove(visit)
        self._inside[visit.tenant] -= visit.num_requests
        if not self._inside[visit.tenant]:
            del self._inside[visit.tenant]

    def _stop_waiting(self, visit: Visit) -> None:
        self._waiting_requests -= visit.num_requests
        self._waiting_tokens -= visit.num_tokens

    def _pass_time(self) -> None:
        now = self._clock.now()
        if self._waiting_requests:
            self._rate.pass_time(max(now - self._seen_s, 0.0))
        self._seen_s = now

    def _refused(self, why: Refusal, answer: ApiError) -> ApiError:
        self.refusals[why] += 1
        return answer

    def _warn_of_full_queue(self) -> None:
        """Say it once in a while, not for every call that is refused."""
        now = self._clock.now()
        self._refused_since_warning += 1
        if now - self._warned_s >= WARN_EVERY_S:
            logger.warning(
                "the queue is full: %d requests with %d tokens wait, %d refused",
                self._waiting_requests,
                self._waiting_tokens,
                self._refused_since_warning,
            )
            self._warned_s, self._refused_since_warning = now, 0


class Visit:
    """A call between entry and end, as a context manager."""

    __slots__ = ("_gate", "_has_left", "is_waiting", "num_requests", "num_tokens", "tenant")

    def __init__(self, gate: Gate, tenant: str, num_requests: int, num_tokens: int) -> None:
        self._gate = gate
        self._has_left = False
        self.is_waiting = True
        self.tenant = tenant
        self.num_requests = num_requests
        self.num_tokens = num_tokens

    def begin(self) -> None:
        """The engine has begun with it: it waits no longer. May be called more than once. Mutates."""
        if self.is_waiting and not self._has_left:
            self._gate._begin(self)
            self.is_waiting = False

    def __enter__(self) -> Visit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._has_left:
            self._gate._leave(self)
            self._has_left = True
