"""How many engines a model has, and what becomes of the texts of one that dies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from quire.engine.process.heartbeat import PATIENCE, Patience

if TYPE_CHECKING:  # a command that only checks settings loads no messages
    from quire.engine.process.connection import StartElsewhere
    from quire.engine.records.report import EngineReport
    from quire.engine.replicas.fetches import Courier

CONTINUE_ON: Final = ("same", "any", "never")
LOST_S: Final = 10.0
"""An engine that is silent for longer is lost, where another one can go on with its texts."""


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How many engines a model has, which of them go on with the texts of one that died, and how patient they are.

    `continue_on`: those that compute the same bits, any, or never. `start`: starts an engine on another machine; None:
    they are processes of this one. `least`: how many there are at any time, where their number follows the load.
    `courier`: copies prefixes from one to another; None: each computes what it lacks.
    """

    num_replicas: int = 1
    continue_on: str = "same"
    patience: Patience = PATIENCE
    start: StartElsewhere | None = None
    least: int | None = None
    courier: Courier | None = None

    @property
    def text(self) -> str:
        """The number in words."""
        where = "" if self.start is None else " on a Ray cluster"
        if self.least is None:
            return f"{self.num_replicas}{where}"
        return f"{self.least} to {self.num_replicas}{where}, by load"

    def shown_in(self, report: EngineReport) -> EngineReport:
        """Return the start-up table of an engine as that of all of them. Pure."""
        return replace(report, replicas=self.text, num_replicas=self.num_replicas)

    @property
    def silence_s(self) -> float | None:
        """How long an engine may be silent before it is lost; None: for any time."""
        limit_s = self.patience.max_silence_s
        return limit_s if limit_s is None or self.num_replicas == 1 else min(limit_s, LOST_S)


ONE_REPLICA: Final = ReplicaSettings()
