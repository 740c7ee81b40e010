"""PartBook: records where each running request is, in an engine or waiting for one, and reports moves to the router.

track ──► wait ──► enter(engine) ──► start: its first update ──► forget
            ▲           │
            └── leave ──┘  the engine died, or will be restarted
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
    """The requests of a set of engines. `requests`: the running ones, by id."""

    def __init__(self, replicas: Sequence[Replica], router: Router, clock: Clock) -> None:
        self.requests: dict[str, TrackedRequest] = {}
        self.suspects = Suspects()
        self._router = router
        self._clock = clock
        self._num_tracked = 0
        self._parts: dict[str, Part] = {}  # the parts in engines, by name
        self._waiting: list[Part] = []
        self._num_parts: dict[Replica, int] = dict.fromkeys(replicas, 0)
        self._unstarted: set[Part] = set()  # parts in engines, without an update so far

    @property
    def waiting(self) -> list[Part]:
        """The parts without an engine, suspects last."""
        return [*self._waiting, *self.suspects.waiting]

    def at(self, replica: Replica) -> list[Part]:
        """Return the parts in an engine, oldest first. Does not mutate; O(parts)."""
        return [part for part in self._parts.values() if part.replica is replica]

    def num_at(self, replica: Replica) -> int:
        """Return the number of parts in an engine. Does not mutate; O(1)."""
        return self._num_parts[replica]

    def of(self, request: TrackedRequest) -> list[Part]:
        """Return the parts of a request. Does not mutate; O(parts)."""
        return [part for part in (*self._parts.values(), *self.waiting) if part.request is request]

    def named(self, name: str, replica: Replica) -> Part | None:
        """Return the part with this name in an engine; None: it has ended or moved. Does not mutate."""
        part = self._parts.get(name)
        return part if part is not None and part.replica is replica else None

    def has_started(self, part: Part) -> bool:
        """Whether an engine has sent an update of a part, so that its prompt is computed. Does not mutate."""
        return part not in self._unstarted

    # ---- moves ------------------------------------------------------------------------------------------------------

    def track(self, add: Add) -> Part:
        """Return a new request as one part, in no engine. Mutates."""
        request = self.requests[add.request_id] = TrackedRequest(add, self._num_tracked)
        self._num_tracked += 1
        part = Part(request)
        part.waits_since_s = self._clock.now()
        return part

    def enter(self, part: Part, replica: Replica) -> None:
        """Record that the router has chosen an engine for a part, under its present name. Mutates."""
        part.replica = replica
        self._parts[part.name] = part
        self._num_parts[replica] += 1
        self._unstarted.add(part)

    def start(self, part: Part) -> None:
        """Record an engine's first update of a part; does nothing for later ones. Mutates."""
        if part in self._unstarted:
            self._unstarted.remove(part)
            self._router.started(part.name)

    def leave(self, part: Part) -> None:
        """Remove a part from its engine. Mutates."""
        self._unstarted.discard(part)
        if part.fetch is not None:
            part.fetch.leave(part)
        if part.replica is not None:
            self._router.finished(part.name)
            self._num_parts[part.replica] -= 1
            del self._parts[part.name]
        part.replica, part.waits_since_s = None, self._clock.now()

    def wait(self, parts: Sequence[Part]) -> None:
        """Queue parts for an engine: those with output first, then by age, oldest first. Mutates."""
        self._waiting += parts
        self._waiting.sort(key=lambda part: (not part.output, part.request.order))

    def take_waiting(self) -> list[Part]:
        """Remove and return the waiting parts, except suspects. Mutates."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def forget(self, part: Part) -> None:
        """Remove a part that has ended, and its request if no sequence is left. Mutates."""
        self.leave(part)
        if part in self._waiting:
            self._waiting.remove(part)
        self.suspects.forget(part)
        if part.request.is_over:
            self.requests.pop(part.request.add.request_id, None)

    def check(self) -> None:
        """Raise `InvariantError` unless each part is in one place, and each running sequence is in one part."""
        at_engines, waiting = list(self._parts.values()), self.waiting
        if any(part.replica is not None for part in waiting) or any(part.replica is None for part in at_engines):
            raise InvariantError("a part is in an engine and waits for one, or neither")
        every = [*at_engines, *waiting]
        places = sorted((part.request.add.request_id, branch) for part in every for branch in part.branches())
        under_way = sorted(
            (name, branch)
            for name, request in self.requests.items()
            for branch in range(request.add.sampling.num_sequences)
            if branch not in request.ended
        )
        if places != under_way:
            raise InvariantError("a running sequence has no part, or two")
        self._router.check()
        for replica, count in self._num_parts.items():
            names = {part.name for part in self.at(replica)}
            if names != set(self._router.under_way(replica.index)) or len(names) != count:
                raise InvariantError(f"replica {replica.index}: the router's parts differ from the engine's")
        on_trial = self.suspects.on_trial
        if on_trial is not None and (on_trial.replica is None or self.num_at(on_trial.replica) != 1):
            raise InvariantError("a suspect is not alone in its engine")
