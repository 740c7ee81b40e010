"""Gate: admission control: how much can wait, each tenant's share, and when to retry.

    call ── enter ──► waiting: text, queue of the engine ── begin (its first token) ──► running ── leave ──►
              │       bounded in sequences, tokens and time
              └──► 503 the queue is full, the server drains, the engine is not running     429 this key is at its limit

The engine's own queue is unbounded, so the gate counts what waits: a call waits from its entry to its first token. It
enters before its texts are tokenized, with an estimate of their tokens that is corrected later. The unit is the
sequence: a call of 8 prompts with n = 4 counts as 32, because it takes 32 rows and the memory of 32 sequences.

**Tenants.** If keys belong to several tenants, each may have as much waiting as is still free. One tenant alone can
fill half of the queue, two a third each, and so on: some room is always left. A tenant with nothing waiting is always
admitted, even if the queue is full and its call is large, because a large call could never enter otherwise. So at
most the limit waits, plus one call per tenant. The same holds for the share of a key.

**When to retry.** A refusal names the time after which half of the waiting sequences will have begun, at the recent
rate. Half, so that retries find room and the engine has not run dry meanwhile. The rate counts only time in which a
request waited: an idle hour shows nothing about the engine's speed.

**How long a call may wait.** A call that would begin too late is worth nothing to its client, and would only delay
later calls. A bound in sequences alone cannot prevent that, because a queue's speed depends on the model, the machine
and the prompts. So the same rate bounds the wait in seconds. If tenants take turns, a call waits for its own tenant's
calls and for the same number of each other tenant's, not for the whole queue.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from quire.core.clock import Clock
from quire.core.errors import InvariantError
from quire.engine.records.stats import ModelState
from quire.serve.errors import ApiError, draining, engine_unavailable, overloaded, too_many_requests
from quire.serve.gate_limits import GateLimits
from quire.serve.tenants import Tenant

logger = logging.getLogger("quire.serve")

MIN_RETRY_S, MAX_RETRY_S = 1.0, 120.0
"""Clients give up rather than wait longer than two minutes."""

RATE_MEMORY_S = 20.0
KNOWN_AFTER_S = 1.0
"""A rate measured over less time than this cannot predict how long a call will wait."""

WARN_EVERY_S = 10.0


class Refusal(Enum):
    """Why a call was refused."""

    QUEUE_FULL = "queue_full"
    WAIT = "wait_too_long"
    KEY_LIMIT = "key_limit"
    DRAINING = "draining"
    ENGINE = "engine_not_ready"


class DrainRate:
    """How many sequences begin per second while any wait: a decaying average.

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
        """The rate; 0 if nothing has begun yet."""
        return self._num_begun / self._seconds if self._seconds else 0.0

    @property
    def seconds(self) -> float:
        """How much time the rate was measured over, with old time decayed."""
        return self._seconds

    def wait_s(self, num_sequences: int) -> float:
        """Return how long the last of this many will wait. Counts one more start just now, so never too pessimistic."""
        return num_sequences * self._seconds / (self._num_begun + 1.0)

    def pass_time(self, seconds: float) -> None:
        """Note that time has passed in which sequences waited. Mutates."""
        kept = math.exp(-seconds / RATE_MEMORY_S)
        self._num_begun *= kept
        self._seconds = self._seconds * kept + RATE_MEMORY_S * (1.0 - kept)

    def note(self, num_sequences: int) -> None:
        """Note that this many sequences have begun. Mutates."""
        self._num_begun += num_sequences


@dataclass(slots=True)
class _Waiting:
    """What waits: in total, or of one tenant."""

    sequences: int = 0
    tokens: int = 0

    def add(self, visit: Visit, sign: int = 1) -> None:
        """Count a visit in (1) or out (-1). Mutates."""
        self.sequences += sign * visit.num_sequences
        self.tokens += sign * visit.num_tokens


NOTHING: Final = _Waiting()


class Gate:
    """Admits calls, or refuses them with a time to retry. Use it in one event loop; operations on a call are O(1)."""

    def __init__(
        self,
        clock: Clock,
        limits: GateLimits,
        state: Callable[[], ModelState],
        num_ready: Callable[[], int] = lambda: 1,
    ) -> None:
        self._clock = clock
        self._state = state
        self._limits = limits
        self._num_ready = num_ready
        self._is_draining = False
        self._rate = DrainRate()
        self._seen_s = self._warned_s = -math.inf
        self._refused_since_warning = 0
        self._visits: set[Visit] = set()
        self._inside: Counter[str] = Counter()
        self._waiting = _Waiting()
        self._waiting_of: dict[str, _Waiting] = {}  # by tenant, only those with something waiting
        self.refusals: Counter[Refusal] = Counter()
        self.refusals_of: Counter[str] = Counter()  # by tenant, only those for lack of room

    @property
    def limits(self) -> GateLimits:
        """How much can wait now, for the ready engines; for one engine while none is ready."""
        return self._limits.of(max(1, self._num_ready())) if self._limits.of_each else self._limits

    @property
    def num_waiting_sequences(self) -> int:
        """Admitted sequences that have not begun."""
        return self._waiting.sequences

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of these sequences, estimated until they are known."""
        return self._waiting.tokens

    @property
    def num_visits(self) -> int:
        """Admitted calls that have not left."""
        return len(self._visits)

    @property
    def num_sequences(self) -> int:
        """Sequences of these calls."""
        return self._inside.total()

    @property
    def is_draining(self) -> bool:
        """Whether the gate refuses all new calls because the server stops."""
        return self._is_draining

    @property
    def is_ready(self) -> bool:
        """Whether calls are admitted while there is room: the server's readiness."""
        return not self._is_draining and self._state() is ModelState.READY

    @property
    def retry_after_s(self) -> float:
        """Seconds after which half of the waiting sequences will have begun, at the recent rate.

        Rounded to a power of two: the exact number would show every client how much others have sent.
        """
        self._pass_time()
        if self._rate.per_second > 0:
            seconds = self._waiting.sequences / 2 / self._rate.per_second
        else:
            seconds = self._rate.seconds
        return min(2.0 ** round(math.log2(max(seconds, MIN_RETRY_S))), MAX_RETRY_S)

    def visits_of(self, tenant: Tenant) -> list[Visit]:
        """Return a tenant's admitted calls that have not left. Does not mutate."""
        return [visit for visit in self._visits if visit.tenant == tenant.name]

    def drain(self) -> None:
        """Admit no more calls; those inside stay. Mutates."""
        self._is_draining = True

    def closed(self) -> ApiError | None:
        """Return the error answer if the gate admits no calls at the moment, else None. Does not mutate."""
        if self._is_draining:
            return draining()
        return None if self.is_ready else engine_unavailable()

    def require_ready(self) -> None:
        """Raise the answer of `closed`, to refuse a call early. Counts the refusal."""
        answer = self.closed()
        if answer is not None:
            raise self._refused(Refusal.DRAINING if self._is_draining else Refusal.ENGINE, answer)

    def require_place(self, tenant: Tenant, num_sequences: int = 1, num_tokens: int = 1) -> None:
        """Raise the answer to a call that cannot be admitted. Counts the refusal.

        The default is the smallest possible call: checking that first saves work on a call that would be refused.
        """
        self.require_ready()
        inside = self._inside[tenant.name]
        if tenant.max_sequences is not None and inside and inside + num_sequences > tenant.max_sequences:
            self.refusals_of[tenant.name] += 1
            # It is unknown when one of its own will end, and how long others wait is kept secret.
            raise self._refused(Refusal.KEY_LIMIT, too_many_requests(MIN_RETRY_S))
        waiting = self._waiting_of.get(tenant.name)
        why = None if waiting is None else self._overload(waiting, num_sequences, num_tokens)
        if why is not None:
            self._warn_of_full_queue()
            self.refusals_of[tenant.name] += 1
            raise self._refused(why, self._overloaded(why))

    def enter(self, tenant: Tenant, num_sequences: int, num_tokens: int) -> Visit:
        """Admit a request of this many sequences and prompt tokens; raises `ApiError` if it must retry later. Mutates.

        The visit is a context manager: at its end the call leaves the gate.
        """
        self.require_place(tenant, num_sequences, num_tokens)
        self._pass_time()
        visit = Visit(self, tenant.name, num_sequences, num_tokens)
        self._visits.add(visit)
        self._inside[tenant.name] += num_sequences
        self._count(visit)
        return visit

    def check(self) -> None:
        """Raise `InvariantError` unless the counts match the visits."""
        waiting, waiting_of, inside = _Waiting(), dict[str, _Waiting](), Counter[str]()
        for visit in self._visits:
            inside[visit.tenant] += visit.num_sequences
            if visit.is_waiting:
                waiting.add(visit)
                waiting_of.setdefault(visit.tenant, _Waiting()).add(visit)
        if (waiting, waiting_of) != (self._waiting, self._waiting_of):
            raise InvariantError("the gate's counts do not match the sequences and tokens in the queue")
        if inside != self._inside or any(count <= 0 for count in self._inside.values()):
            raise InvariantError("the gate's counts per tenant do not match the admitted sequences")

    def _overload(self, own: _Waiting, num_sequences: int, num_tokens: int) -> Refusal | None:
        """Return the bound that a tenant's call would break, or None. Mutates the rate, for which time passes."""
        limits, waiting = self.limits, self._waiting
        # A tenant may have as much as is still free, so some room is always left.
        held = own if limits.has_tenants else NOTHING
        if waiting.sequences + held.sequences + num_sequences > limits.max_queued_sequences:
            return Refusal.QUEUE_FULL
        if waiting.tokens + held.tokens + num_tokens > limits.max_queued_tokens:
            return Refusal.QUEUE_FULL
        self._pass_time()
        if limits.max_wait_s is None or self._rate.seconds < KNOWN_AFTER_S:
            return None
        ahead = waiting.sequences + num_sequences
        if limits.takes_turns:
            ahead = min(ahead, len(self._waiting_of) * (own.sequences + num_sequences))
        return Refusal.WAIT if self._rate.wait_s(ahead) > limits.max_wait_s else None

    def _count(self, visit: Visit, sign: int = 1) -> None:
        """Add a visit to the waiting counts (1) or remove it (-1). Mutates."""
        own = self._waiting_of.setdefault(visit.tenant, _Waiting())
        own.add(visit, sign)
        self._waiting.add(visit, sign)
        if not own.sequences:
            del self._waiting_of[visit.tenant]

    def _correct(self, visit: Visit, num_tokens: int) -> None:
        if visit.is_waiting:
            self._count(visit, -1)
        visit.num_tokens = num_tokens
        if visit.is_waiting:
            self._count(visit)

    def _begin(self, visit: Visit) -> None:
        self._pass_time()
        self._rate.note(visit.num_sequences)
        self._count(visit, -1)

    def _leave(self, visit: Visit) -> None:
        self._pass_time()
        if visit.is_waiting:
            self._count(visit, -1)
        self._visits.remove(visit)
        self._inside[visit.tenant] -= visit.num_sequences
        if not self._inside[visit.tenant]:
            del self._inside[visit.tenant]

    def _pass_time(self) -> None:
        now = self._clock.now()
        if self._waiting.sequences:
            self._rate.pass_time(max(now - self._seen_s, 0.0))
        self._seen_s = now

    def _refused(self, why: Refusal, answer: ApiError) -> ApiError:
        self.refusals[why] += 1
        return answer

    def _overloaded(self, why: Refusal) -> ApiError:
        if why is Refusal.WAIT:
            sentence = f"a new request would wait longer than {self.limits.max_wait_s:g} seconds (max_wait_s)"
            return overloaded(self.retry_after_s, sentence)
        return overloaded(self.retry_after_s)

    def _warn_of_full_queue(self) -> None:
        """Log a warning every `WARN_EVERY_S`, not for every refused call."""
        now = self._clock.now()
        self._refused_since_warning += 1
        if now - self._warned_s >= WARN_EVERY_S:
            logger.warning(
                "the queue is full: %d sequences with %d tokens wait, %d calls refused",
                self._waiting.sequences,
                self._waiting.tokens,
                self._refused_since_warning,
            )
            self._warned_s, self._refused_since_warning = now, 0


class Visit:
    """An admitted call, as a context manager."""

    __slots__ = ("_gate", "_has_left", "is_waiting", "num_sequences", "num_tokens", "tenant")

    def __init__(self, gate: Gate, tenant: str, num_sequences: int, num_tokens: int) -> None:
        self._gate = gate
        self._has_left = False
        self.is_waiting = True
        self.tenant = tenant
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens

    def correct(self, num_tokens: int) -> None:
        """Set the number of tokens in its prompts, now known. Mutates."""
        if not self._has_left:
            self._gate._correct(self, num_tokens)

    def begin(self) -> None:
        """Note that the engine has begun the call, which no longer waits. May be called more than once. Mutates."""
        if self.is_waiting and not self._has_left:
            self._gate._begin(self)
            self.is_waiting = False

    def leave(self) -> None:
        """Note that the call has ended, successfully or not. May be called more than once. Mutates."""
        if not self._has_left:
            self._gate._leave(self)
            self._has_left = True

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
