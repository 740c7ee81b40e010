"""ReplicaFault: what may happen to one of several replicas, and how a server gets over it.

    kill     the engine dies with all that it holds          noticed after 40 ms
    silent   the engine hangs: no step, no answer            gets no new requests after 5 s, is taken for lost after 10
    drain    no new requests, as before an update            what is left after 5 s moves

The requests that the replica had go on elsewhere, before new ones, as their prompt and the tokens that were told: the
same tokens follow, and what is lost is the time to compute their keys and values again. Two seconds later the replica
is back, and empty. A fault within a step waits for its end; a fault of a replica that is away does nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quire.core.config import require_int, require_number, require_one_of
from quire.core.errors import InvalidConfigError
from quire.core.request import Request
from quire.simulate.replica import SimulatedEngine

KILL, SILENT, DRAIN = "kill", "silent", "drain"
NOTICED_S: Final = MappingProxyType({KILL: 0.04, SILENT: 10.0, DRAIN: 5.0})
"""Seconds until the requests of the replica move."""
QUIET_S: Final = 5.0
"""Seconds of silence until no requests are sent to a replica."""
BACK_S: Final = 2.0
"""Seconds until it takes requests again."""


@dataclass(frozen=True, slots=True)
class ReplicaFault:
    """What happens to a replica, and when.

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
        """Return the fault of a text; raises `InvalidConfigError` for any other text."""
        try:
            at_text, index_text, kind = text.split(":")
            at_s, index = float(at_text), int(index_text)
        except ValueError:
            allowed = f"SECONDS:REPLICA:KIND, as 60:0:kill; kinds: {', '.join(NOTICED_S)}"
            raise InvalidConfigError("fault", text, allowed) from None
        return cls(at_s, index, kind)


class Agenda:
    """What happens when: calls in the order of their times, those of one time in the order in which they were put."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_put = 0

    def put(self, at_s: float, call: Callable[[float], None]) -> None:
        """Have something called at a time, with that time. Mutates."""
        self._num_put += 1
        heapq.heappush(self._calls, (at_s, self._num_put, call))

    def next_s(self) -> float | None:
        """Return the time of the next call; None: there is none."""
        return self._calls[0][0] if self._calls else None

    def run_next(self) -> None:
        """Do the next call. Mutates."""
        at_s, _, call = heapq.heappop(self._calls)
        call(at_s)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """The faults of a run, and how to make an engine that takes the place of a lost one."""

    faults: tuple[ReplicaFault, ...] = ()
    make_engine: Callable[[], SimulatedEngine] | None = None

    def require_for(self, num_replicas: int) -> None:
        """Raise `InvalidConfigError` for a fault of a replica that is not there."""
        for fault in self.faults:
            require_int("replica of a fault", fault.index, 0, num_replicas - 1)


NO_FAULTS: Final = FaultPlan()


def continued(request: Request, again: Request) -> Request:
    """Return the request that goes on where another engine has left one.

    `again`: the same request as it was when it came; it gets the tokens that the other has. Mutates `again`. Raises
    `InvalidConfigError` for a request of several sequences.
    """
    if again.sampling.num_sequences > 1:
        raise InvalidConfigError("fault", again.request_id, "none while a request of several sequences is under way")
    again.begin_with(request.tokens[again.num_prompt_tokens :])
    return again
