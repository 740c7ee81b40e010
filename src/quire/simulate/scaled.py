"""ScalingPlan: a number of replicas that follows the load, by the product's own rule (`quire.routing.scaling`).

A replica that is added takes requests after `start_s`, which its model takes to load. One that is given back drains
as before an update: what is left after 5 s goes on elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.core.config import require_int, require_number
from quire.simulate.replica import SimulatedEngine

LOOK_S: Final = 1.0
"""Seconds between two looks at the load, as at a server."""


@dataclass(frozen=True, slots=True)
class ScalingPlan:
    """`least` of all replicas run at any time; `make_engine` makes the next engine of one that was given back."""

    least: int
    make_engine: Callable[[], SimulatedEngine]
    start_s: float = 30.0

    def require_for(self, num_replicas: int) -> None:
        """Raise `InvalidConfigError` unless there are as many."""
        require_int("least replicas", self.least, 1, num_replicas)
        require_number("start time", self.start_s, 0.0, 1e6)
