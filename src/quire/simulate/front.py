"""Front: the server's side of several replicas. It routes requests, and passes the replicas' events to the router.

    step of a replica ends ──► started, finished, report ──► the router, at that simulated time
    a request is due       ──► all events up to that time, then `Router.choose`

A replica's clock can be ahead of another's by a step, so the events of a step wait for their time. Reports of a
replica's prefix cache can be late or lost; the product's router then requests a survey, as in a server.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import partial

from quire.core.request import Request
from quire.core.setting_checks import require_number
from quire.memory.cache_journal import CacheNews
from quire.routing.router import Router
from quire.routing.scaling import Load
from quire.scheduler.commit import StepOutcome
from quire.simulate.replica import SimulatedEngine


@dataclass(frozen=True, slots=True)
class Reports:
    """How reports of the replicas' prefix caches reach the router: after a delay, and some are lost."""

    delay_s: float = 0.0
    lost_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        require_number("report delay", self.delay_s, 0.0, 1e6)
        require_number("report loss", self.lost_share, 0.0, 1.0)


class Front:
    """Chooses the replica of each request by the product's router."""

    def __init__(self, engines: Sequence[SimulatedEngine], router: Router, reports: Reports) -> None:
        self._engines = list(engines)
        self._router = router
        self._delay_s = reports.delay_s
        self._lost_share = reports.lost_share
        self._rng = random.Random(f"reports {reports.seed}")
        self._news: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._num_heard = 0
        self._waiting: set[str] = set()  # requests without a first token
        for index, engine in enumerate(engines):
            self.add(index, engine)

    def add(self, index: int, engine: SimulatedEngine) -> None:
        """Add a replica that takes requests, for the first time or again. Mutates."""
        self._engines[index] = engine
        self._router.add(index)
        if self._router.reads_blocks:
            engine.survey()

    def pause(self, index: int) -> None:
        """Send a replica no more requests. Mutates."""
        self._router.pause(index)

    def lose(self, index: int, now_s: float) -> None:
        """Remove a replica that was lost, with its prefix cache. Mutates."""
        self._listen(now_s)
        self._router.lose(index)

    def choose(self, request: Request, now_s: float, among: Container[int] | None = None) -> int | None:
        """Return the replica for a request, by the events up to this time; None: no replica takes requests. Mutates.

        `among`: the allowed replicas, all of them running.
        """
        self._listen(now_s)
        if among is not None:
            for index in range(len(self._engines)):
                (self._router.resume if index in among else self._router.pause)(index)
        self._waiting.add(request.request_id)
        return self._router.choose(request.request_id, self._router.prompt(request.tokens, request.scope))

    def load(self, num_engines: int, num_ready: int, now_s: float) -> Load:
        """Return the load by the events up to this time. Mutates: it processes these events."""
        self._listen(now_s)
        router = self._router
        return Load(num_engines, num_ready, router.num_busy, router.num_waiting_tokens, router.num_done_tokens)

    def refused(self, request_id: str) -> None:
        """Note that a replica refused a request. Mutates."""
        self._waiting.discard(request_id)
        self._router.finished(request_id)

    def step_ended(self, index: int, outcome: StepOutcome, now_s: float) -> None:
        """Queue the events of a replica's step for their time. Mutates; O(requests in the step)."""
        if self._waiting:
            for request in outcome.advanced:
                if request.num_output_tokens and request.request_id in self._waiting:
                    self._waiting.remove(request.request_id)
                    self._hear(now_s, partial(self._router.started, request.request_id))
        news = self._engines[index].take_cache_news()
        if news is not None and not (self._lost_share and self._rng.random() < self._lost_share):
            self._hear(now_s + self._delay_s, partial(self._note, index, self._engines[index], news))

    def request_ended(self, request_id: str, now_s: float) -> None:
        """Queue the end of all sequences of a request for its time. Mutates."""
        self._waiting.discard(request_id)
        self._hear(now_s, partial(self._router.finished, request_id))

    def _listen(self, now_s: float) -> None:
        while self._news and self._news[0][0] <= now_s:
            heapq.heappop(self._news)[2]()

    def _hear(self, at_s: float, call: Callable[[], None]) -> None:
        self._num_heard += 1
        heapq.heappush(self._news, (at_s, self._num_heard, call))

    def _note(self, index: int, engine: SimulatedEngine, news: CacheNews) -> None:
        """Pass a report to the router, unless its engine has been replaced."""
        if self._engines[index] is engine and self._router.note(index, news):
            engine.survey()
