"""Runs: the simulations behind the figures. A run is a value, so that figures can share runs.

figure ──► Run ──► Laboratory ──► Outcome ──► figure
│        └── site: a model, a machine, and the KV memory that table 1 of the paper gives it
└── system, rate, requests, size of a block
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.setting_checks import require_int
from quire.simulate.baselines.contiguous import ContiguousEngine
from quire.simulate.baselines.published import contiguous_setup, vllm_setup
from quire.simulate.cost.roofline import RooflineCost
from quire.simulate.hardware import Hardware, find_hardware
from quire.simulate.model_shape import ModelShape
from quire.simulate.replica import EngineSetup, PagedEngine, SimulatedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.roofline import Numbers, Roofline
from quire.simulate.simulation import Simulation
from quire.simulate.timeline import mean_over_time
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.drawn import DrawnPrompts, drawn_requests
from quire.simulate.workload.lengths import ALPACA, SHAREGPT
from quire.simulate.workload.offered import OpenLoop

SWAPPING = "vllm, swapping"
OPT_13B, OPT_175B, LLAMA_8B = "opt-13b", "opt-175b", "llama-3.1-8b"
LONGEST = 2048
FULL, SHORT_FULL = 10.0, 400.0
"""Requests per second beyond the capacity of every system, with the lengths of ShareGPT and of Alpaca."""
SHORT_REQUESTS = 5
"""Short requests per long one, so that both kinds of runs have about equally many tokens."""


@dataclass(frozen=True, slots=True)
class Site:
    """A model on a machine, and the bytes for its keys and values."""

    shape: ModelShape
    hardware: Hardware
    kv_bytes: int

    def roofline(self) -> Roofline:
        """Return the lower bounds of its steps."""
        return Roofline(self.hardware, self.shape, Numbers("float16"))

    def setup(self, block_size: int = 16) -> EngineSetup:
        """Return the product's engine in this memory."""
        spec = self.shape.kv_cache_spec(block_size, "float16")
        return EngineSetup(
            spec,
            MemoryConfig(num_blocks=self.kv_bytes // spec.bytes_per_block),
            SchedulerConfig(256, 2560, LONGEST, preemption="recompute"),
            RooflineCost(self.roofline(), bytes_per_block=spec.bytes_per_block),
        )


def paper_sites(find_shape: Callable[[str], ModelShape], machine: Hardware) -> dict[str, Site]:
    """Return the sites of table 1, and the card of an older document. `find_shape` returns a model by its name."""
    large, card = find_hardware("nvidia-a100-80gb"), find_hardware("nvidia-rtx-4070-ti-super")
    eight = replace(
        large,
        name=f"8 × {large.name}",
        memory_bytes=8 * large.memory_bytes,
        read_bandwidth=8 * large.read_bandwidth,
        matrix_rate={dtype: 8 * rate for dtype, rate in large.matrix_rate.items()},
    )
    llama = find_shape(LLAMA_8B)
    return {
        OPT_13B: Site(find_shape(OPT_13B), machine, 12 << 30),
        OPT_175B: Site(find_shape(OPT_175B), eight, 264 << 30),
        LLAMA_8B: Site(llama, card, card.memory_bytes - llama.weight_bytes(llama.dtype)),
    }


@dataclass(frozen=True, slots=True)
class Run:
    """A system, and the requests that it gets at a rate. `times`: short requests per long one."""

    system: str
    rate: float
    prompts: DrawnPrompts
    times: int = 1
    block_size: int = 16
    site: str = OPT_13B


def long_run(system: str, rate: float = FULL, *, block_size: int = 16) -> Run:
    """Return a run of requests with the lengths of ShareGPT; by default, at a rate beyond every system's capacity."""
    return Run(system, rate, DrawnPrompts(SHAREGPT, LONGEST), block_size=block_size)


def short_run(system: str, rate: float = SHORT_FULL, *, block_size: int = 16, site: str = OPT_13B) -> Run:
    """Return a run of requests with the lengths of Alpaca; by default, at a rate beyond every system's capacity."""
    return Run(system, rate, DrawnPrompts(ALPACA, LONGEST), SHORT_REQUESTS, block_size, site)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a run for figures. Shares are of all slots, over the time in which requests waited for memory."""

    requests_per_s: float
    normalised_latency_s: float
    mean_running: float
    stored: float
    reserved: float
    cached: float
    filled: float
    saved: float
    num_preemptions: int
    recomputed_tokens: int
    num_moved_blocks: int

    @property
    def lost(self) -> float:
        """The share of slots that will never be used, or that are free."""
        return 1 - self.stored - self.reserved - self.cached

    @classmethod
    def of(cls, result: SimulationResult) -> Outcome:
        """Return the outcome of a run of one replica."""
        (replica,) = result.replicas
        points = [point for point in replica.timeline if point.waiting > 0] or replica.timeline
        size = replica.ledger.block_size

        def mean(name: str) -> float:
            return mean_over_time(points, attrgetter(name))

        slots = replica.ledger.num_blocks * size
        saved, used = mean("saved_blocks"), mean("used_blocks")
        return cls(
            requests_per_s=result.requests_per_s,
            normalised_latency_s=result.latencies["normalised_latency_s"].mean,
            mean_running=result.mean_running,
            stored=mean("stored_slots") / slots,
            reserved=mean("reserved_slots") / slots,
            cached=mean("cached_blocks") * size / slots,
            filled=mean("stored_slots") / (used * size),
            saved=saved / (saved + used),
            num_preemptions=result.num_preemptions,
            recomputed_tokens=result.recomputed_tokens,
            num_moved_blocks=replica.num_moved_blocks,
        )


class Laboratory:
    """Simulates the runs of figures, each only once. The same seed gives the same outcomes.

    `watch` is called after each run with the number of runs so far.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        *,
        seed: int = 0,
        num_requests: int = 1000,
        watch: Callable[[int], None] = lambda num_runs: None,
    ) -> None:
        require_int("num_requests", num_requests, 10, 1 << 20)
        self.sites = sites
        self.seed = seed
        self.num_requests = num_requests
        self._watch = watch
        self._outcomes: dict[Run, Outcome] = {}

    def run(self, run: Run) -> Outcome:
        """Return the outcome of a run; takes about a second the first time. Mutates."""
        if run not in self._outcomes:
            self._outcomes[run] = self._serve(run)
            self._watch(len(self._outcomes))
        return self._outcomes[run]

    def _serve(self, run: Run) -> Outcome:
        limit = -(-self.num_requests * run.times // run.prompts.num_sequences)
        requests = drawn_requests(Arrivals(run.rate), run.prompts, duration_s=float("inf"), seed=self.seed, limit=limit)
        engine = make_engine(run.system, self.sites[run.site].setup(run.block_size))
        return Outcome.of(Simulation([engine], OpenLoop(requests)).run())


def make_engine(system: str, setup: EngineSetup) -> SimulatedEngine:
    """Return a new engine of a system by its name, in the memory of a setup."""
    if system == "quire":
        return PagedEngine(setup)
    published = vllm_setup(setup)
    if system == "vllm":
        return PagedEngine(published)
    if system == SWAPPING:
        memory = replace(published.memory, num_host_blocks=published.memory.num_blocks)
        return PagedEngine(replace(published, memory=memory, scheduler=replace(published.scheduler, preemption="swap")))
    return ContiguousEngine(contiguous_setup(setup, system))
