"""Small engines for tests of simulations, and a source of requests that notes what was answered."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.simulate.cost.linear import LinearCost
from quire.simulate.replica import EngineSetup
from quire.simulate.workload.offered import OfferedRequest, OpenLoop

SMALL = EngineSetup(
    KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),)),
    MemoryConfig(num_blocks=80),
    SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=100),
    LinearCost(0.5, 0.05),
)


class Answers(OpenLoop):
    """Notes what was answered, once for each request."""

    def __init__(self, requests: Sequence[OfferedRequest]) -> None:
        super().__init__(requests)
        self.texts: dict[str, list[int]] = {}

    def ended(self, request_id: str, output: array[int], now_s: float) -> None:
        assert request_id not in self.texts
        self.texts[request_id] = output.tolist()


def draw_requests(rng: random.Random) -> list[OfferedRequest]:
    """Return requests with prefixes of up to three texts, at times within a minute."""
    prefixes = [array("i", [rng.randrange(9) for _ in range(rng.choice([0, 8, 24]))]) for _ in range(3)]
    times = sorted(rng.uniform(0.0, 60.0) for _ in range(rng.randint(1, 30)))
    return [
        OfferedRequest(f"r{number}", due_s, rng.choice(prefixes) + array("i", [number, 3]), rng.randint(1, 30))
        for number, due_s in enumerate(times)
    ]
