"""SimulationResult: the result of a run, as a frozen value that can be written as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from quire.memory.ledger import MemoryLedger
from quire.simulate.histogram import Distribution
from quire.simulate.timeline import TimelinePoint, mean_over_time


@dataclass(frozen=True, slots=True)
class ReplicaResult:
    """The result of one replica: its memory over time, and its ledger at the end."""

    num_requests: int
    num_steps: int
    busy_s: float
    num_preemptions: int
    num_copied_blocks: int
    num_moved_blocks: int
    timeline: tuple[TimelinePoint, ...]
    ledger: MemoryLedger
    num_disk_tokens: int = 0
    num_host_tokens: int = 0

    def mean_share(self, name: str) -> float:
        """Return the mean share of all slots in a count of the timeline, weighted by the time of steps.

        A block counts with all its slots.
        """
        return mean_over_time(self.timeline, lambda point: self.slots(point, name)) / self.num_slots

    @property
    def num_slots(self) -> int:
        """The number of slots."""
        return self.ledger.num_blocks * self.ledger.block_size

    def slots(self, point: TimelinePoint, name: str) -> float:
        """Return a count of a point of the timeline in slots; a block counts with all its slots."""
        count = float(getattr(point, name))
        return count if name.endswith("_slots") else count * self.ledger.block_size

    @property
    def stored_share_of_used(self) -> float:
        """Share of the used memory that held keys and values of a token, over the time of the timeline."""
        used = self.mean_share("used_blocks")
        return self.mean_share("stored_slots") / used if used else 0.0


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The result of a run.

    `computed_tokens` are those of all steps. Tokens that requests need and the cache lacks are computed once;
    `recomputed_tokens` are computed again, because a preemption dropped them or a replica was lost.
    `num_moved_requests`: requests that continued in another replica. `mean_replicas`: the mean number of replicas over
    time.
    """

    duration_s: float
    num_requests: int
    num_refused: int
    num_sequences: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    hit_tokens: int
    recomputed_tokens: int
    mean_running: float
    latencies: Mapping[str, Distribution]
    replicas: tuple[ReplicaResult, ...]
    num_moved_requests: int = 0
    mean_replicas: float = 1.0

    @property
    def num_preemptions(self) -> int:
        """The number of preemptions."""
        return sum(replica.num_preemptions for replica in self.replicas)

    @property
    def num_steps(self) -> int:
        """The number of steps of all replicas."""
        return sum(replica.num_steps for replica in self.replicas)

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens per second of simulated time, from the first request to the last end."""
        return self.output_tokens / self.duration_s if self.duration_s else 0.0

    @property
    def requests_per_s(self) -> float:
        """Requests that ended per second of simulated time."""
        return (self.num_requests - self.num_refused) / self.duration_s if self.duration_s else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that the cache served."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def disk_hit_rate(self) -> float:
        """Share of the prompt tokens that came from the disk, which also count as cache hits."""
        tokens = sum(replica.num_disk_tokens for replica in self.replicas)
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def host_hit_rate(self) -> float:
        """Share of the prompt tokens that came from the host, which also count as cache hits."""
        tokens = sum(replica.num_host_tokens for replica in self.replicas)
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON data, with derived figures."""
        content = asdict(self)
        for replica in content["replicas"]:
            misses = replica["ledger"]["misses"]
            replica["ledger"]["misses"] = {reason.value: count for reason, count in misses.items()}
        derived = ("num_preemptions", "num_steps", "output_tokens_per_s", "requests_per_s", "hit_rate")
        return {**content, **{name: getattr(self, name) for name in derived}}
