"""PartBook: where every request under way is: in an engine, or waiting for one. The router is told of each move.

track ──► wait ──► enter(engine) ──► start: its first update ──► forget
            ▲           │
            └── leave ──┘  the engine died, or is to be restarted
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.clock import Clock
from quire.core.errors import InvariantError
from quire.engine.commands import Add
from quire.engine.replicas.parts import Part, TrackedRequest
from quire.engine.replicas.replica import Replica
from quire.engine.replicas.suspects import Suspects
from quire.routing.router import Router


class PartBook:
    """The requests of a set of engines. `requests`: those that have not ended, by id."""

    def __init__(self, replicas: Sequence[Replica], router: Router, clock: Clock) -> None:
        self.requests: dict[str, TrackedRequest] = {}
        self.suspects = Suspects()
        self._router = router
        self._clock = clock
        self._num_tracked = 0
        self._parts: dict[str, Part] = {}  # that engines have, by name
        self._waiting: list[Part] = []
        self._num_parts: dict[Replica, int] = dict.fromkeys(replicas, 0)
        self._unstarted: set[Part] = set()  # those of which an engine has not reported anything yet

    @property
    def waiting(self) -> list[Part]:
        """The parts without an engine, suspects last."""
        return [*self._waiting, *self.suspects.waiting]

    def at(self, replica: Replica) -> list[Part]:
        """Return the parts that an engine has, the oldest first. Does not mutate; O(parts)."""
        return [part for part in self._parts.values() if part.replica is replica]

    def num_at(self, replica: Replica) -> int:
        """Return how many parts an engine has. Does not mutate; O(1)."""
        return self._num_parts[replica]

    def of(self, request: TrackedRequest) -> list[Part]:
        """Return the parts of a request. Does not mutate; O(parts)."""
        return [part for part in (*self._parts.values(), *self.waiting) if part.request is request]

    def named(self, name: str, replica: Replica) -> Part | None:
        """Return the part that an engine calls so; None: it has ended, or goes on elsewhere. Does not mutate."""
        part = self._parts.get(name)
        return part if part is not None and part.replica is replica else None

    def has_started(self, part: Part) -> bool:
        """Whether an engine has reported of a part, so that nothing of its prompt waits. Does not mutate."""
        return part not in self._unstarted

    # ---- what becomes of them ---------------------------------------------------------------------------------------

    def track(self, add: Add) -> Part:
        """Return a new request as one part, which is nowhere yet. Mutates."""
        request = self.requests[add.request_id] = TrackedRequest(add, self._num_tracked)
        self._num_tracked += 1
        part = Part(request)
        part.waits_since_s = self._clock.now()
        return part

    def enter(self, part: Part, replica: Replica) -> None:
        """The router has sent a part to an engine, under its present name. Mutates."""
        part.replica = replica
        self._parts[part.name] = part
        self._num_parts[replica] += 1
        self._unstarted.add(part)

    def start(self, part: Part) -> None:
        """An engine has reported of a part. Mutates."""
        if part in self._unstarted:
            self._unstarted.remove(part)
            self._router.started(part.name)

    def leave(self, part: Part) -> None:
        """A part is in no engine any more. Mutates."""
        self._unstarted.discard(part)
        if part.fetch is not None:
            part.fetch.leave(part)
        if part.replica is not None:
            self._router.finished(part.name)
            self._num_parts[part.replica] -= 1
            del self._parts[part.name]
        part.replica, part.waits_since_s = None, self._clock.now()

    def wait(self, parts: Sequence[Part]) -> None:
        """Parts wait for an engine: those that have begun before those that have not, older ones first. Mutates."""
        self._waiting += parts
        self._waiting.sort(key=lambda part: (not part.output, part.request.order))

    def take_waiting(self) -> list[Part]:
        """Return the parts that wait, suspects aside, and have them wait no more. Mutates."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def forget(self, part: Part) -> None:
        """A part is over, and its request if that was the last one. Mutates."""
        self.leave(part)
        if part in self._waiting:
            self._waiting.remove(part)
        self.suspects.forget(part)
        if part.request.is_over:
            self.requests.pop(part.request.add.request_id, None)

    def check(self) -> None:
        """Raise `InvariantError` unless every part is in one place, and every sequence under way has one part."""
        at_engines, waiting = list(self._parts.values()), self.waiting
        if any(part.replica is not None for part in waiting) or any(part.replica is None for part in at_engines):
            raise InvariantError("a part is at an engine and waits for one, or neither")
        every = [*at_engines, *waiting]
        places = sorted((part.request.add.request_id, branch) for part in every for branch in part.branches())
        under_way = sorted(
            (name, branch)
            for name, request in self.requests.items()
            for branch in range(request.add.sampling.num_sequences)
            if branch not in request.ended
        )
        if places != under_way:
            raise InvariantError("a sequence under way has no part, or two")
        self._router.check()
        for replica, count in self._num_parts.items():
            names = {part.name for part in self.at(replica)}
            if names != set(self._router.under_way(replica.index)) or len(names) != count:
                raise InvariantError(f"replica {replica.index}: the router knows other parts than it has")
        on_trial = self.suspects.on_trial
        if on_trial is not None and (on_trial.replica is None or self.num_at(on_trial.replica) != 1):
            raise InvariantError("a suspect is not alone in its engine")
