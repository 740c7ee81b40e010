"""ReplicaFault: a failure of one of several replicas, and how a server recovers from it.

    kill     the engine dies and loses its memory            noticed after 40 ms
    silent   the engine hangs: no step, no answer            gets no new requests after 5 s, counts as lost after 10 s
    drain    no new requests, as before an update            requests that are left after 5 s move

The requests of the replica continue in others, before new requests, from their prompt and the tokens already sent: the
same tokens follow, and only the time to compute their keys and values again is lost. Two seconds later the replica is
back, and empty. A fault within a step takes effect at its end; a fault of a replica that is down has no effect.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quire.core.errors import InvalidConfigError
from quire.core.request import Request
from quire.core.setting_checks import require_int, require_number, require_one_of
from quire.simulate.replica import SimulatedEngine

KILL, SILENT, DRAIN = "kill", "silent", "drain"
NOTICED_S: Final = MappingProxyType({KILL: 0.04, SILENT: 10.0, DRAIN: 5.0})
"""Seconds until the requests of the replica move."""
QUIET_S: Final = 5.0
"""Seconds of silence until a replica gets no new requests."""
BACK_S: Final = 2.0
"""Seconds until the replica takes requests again."""


@dataclass(frozen=True, slots=True)
class ReplicaFault:
    """A fault of a replica, and its time.

    >>> ReplicaFault.parse("60:1:kill")
    ReplicaFault(at_s=60.0, index=1, kind='kill')
    """

    at_s: float
    index: int
    kind: str

    def __post_init__(self) -> None:
        require_number("time of a fault", self.at_s, 0.0, 1e9)
        require_int("replica of a fault", self.index, 0, 1 << 20)
        require_one_of("kind of a fault", self.kind, tuple(NOTICED_S))

    @classmethod
    def parse(cls, text: str) -> ReplicaFault:
        """Return the fault that a text describes; raises `InvalidConfigError` for an invalid text."""
        try:
            at_text, index_text, kind = text.split(":")
            at_s, index = float(at_text), int(index_text)
        except ValueError:
            allowed = f"SECONDS:REPLICA:KIND, such as 60:0:kill; kinds: {', '.join(NOTICED_S)}"
            raise InvalidConfigError("fault", text, allowed) from None
        return cls(at_s, index, kind)


class Agenda:
    """Scheduled calls, in the order of their times; calls at the same time keep the order of `put`."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_put = 0

    def put(self, at_s: float, call: Callable[[float], None]) -> None:
        """Schedule a call, which gets its time as argument. Mutates."""
        self._num_put += 1
        heapq.heappush(self._calls, (at_s, self._num_put, call))

    def next_s(self) -> float | None:
        """Return the time of the next call; None without calls."""
        return self._calls[0][0] if self._calls else None

    def run_next(self) -> None:
        """Make the next call. Mutates."""
        at_s, _, call = heapq.heappop(self._calls)
        call(at_s)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a run, and a function that makes the engine to replace a lost one."""

    faults: tuple[ReplicaFault, ...] = ()
    make_engine: Callable[[], SimulatedEngine] | None = None

    def require_for(self, num_replicas: int) -> None:
        """Raise `InvalidConfigError` for a fault of a replica that does not exist."""
        for fault in self.faults:
            require_int("replica of a fault", fault.index, 0, num_replicas - 1)


NO_FAULTS: Final = FaultPlan()


def continued(request: Request, again: Request) -> Request:
    """Return the request that continues another engine's request.

    `again`: the same request in its original state; it gets the tokens generated so far. Mutates `again`. Raises
    `InvalidConfigError` for a request with several sequences.
    """
    if again.sampling.num_sequences > 1:
        raise InvalidConfigError("fault", again.request_id, "none while a request with several sequences runs")
    most = again.num_prompt_tokens + (again.sampling.max_tokens or 0) - 1  # an answer may be complete, but not sent
    again.begin_with(request.tokens[again.num_prompt_tokens : most])
    return again
