"""DemoEngine: the product's own EngineCore, Scheduler and KVCacheManager, watched after every step.

Only the arithmetic of the model is left out: `SimExecutor` draws tokens from a hash. The memory behaves the same with
any tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from quire.cli.demo.panels import draw_memory
from quire.cli.demo.scene import Picture
from quire.cli.demo.snapshot import MemorySnapshot, describe_changes, read_snapshot, sequence_name
from quire.cli.text import FAINT, Line, line, span
from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.executor import Executor
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import Request, RequestStatus
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan, StepResult
from quire.core.validate import RequestLimits
from quire.engine.core import EngineCore
from quire.memory.manager import KVCacheManager
from quire.scheduler.scheduler import Scheduler
from quire.simulate.executor import SimExecutor

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 512


class WatchedExecutor:
    """Passes plans to an executor, and remembers the last plan and the blocks that were loaded from another tier."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._loads: dict[int, int] = {}  # blocks by their tickets
        self._arrived: dict[int, str] = {}
        self.last_plan: StepPlan | None = None

    def start(self) -> None:
        """Start the executor."""
        self._executor.start()

    def submit(self, plan: StepPlan) -> None:
        """Submit a plan. Mutates."""
        self.last_plan = plan
        self._arrived |= {move.device_block: "host" for move in plan.moves_in}
        self._loads |= {load.ticket: load.block for load in plan.transfers.loads}
        self._executor.submit(plan)

    def collect(self) -> StepResult:
        """Return the oldest result. Mutates."""
        result = self._executor.collect()
        self._arrived |= {self._loads[ticket]: "disk" for ticket in result.transfers.done if ticket in self._loads}
        return result

    def take_arrived(self) -> dict[int, str]:
        """Return the blocks loaded since the last call, with the tier that they came from. Mutates."""
        arrived, self._arrived = self._arrived, {}
        return arrived

    def shutdown(self) -> None:
        """Drop the steps in flight. Mutates."""
        self._executor.shutdown()


class DemoEngine:
    """An engine of a few blocks, with the KV cache of Qwen3-0.6B: 28 layers, 8 KV heads of 128, bfloat16.

    >>> engine = DemoEngine(8)
    >>> _ = engine.add("A", range(20), max_tokens=4)
    >>> _ = engine.step()
    >>> engine.table("A")
    [0, 1]
    """

    def __init__(self, num_blocks: int, *, num_host_blocks: int = 0, preemption: str = "recompute") -> None:
        spec = KVCacheSpec.from_layers(
            [None] * 28, block_size=BLOCK_SIZE, num_kv_heads=8, head_dim=128, dtype="bfloat16"
        )
        clock = ManualClock()
        self.memory = KVCacheManager(spec, MemoryConfig(num_blocks=num_blocks, num_host_blocks=num_host_blocks))
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=256,
                max_model_len=MAX_MODEL_LEN,
                headroom=0.0,
                preemption=preemption,
            ),
            self.memory,
            RequestLimits(VOCAB_SIZE, MAX_MODEL_LEN, num_blocks * BLOCK_SIZE, max_num_seqs=16),
        )
        self._executor = WatchedExecutor(SimExecutor(VOCAB_SIZE, clock))
        self._engine = EngineCore(self.scheduler, self._executor, clock)
        self.num_steps = 0
        self.snapshot = self._read(None)

    def add(self, name: str, prompt: Iterable[int], *, max_tokens: int, n: int = 1) -> Request:
        """Add a request, named by a letter. Mutates."""
        request = Request(name, prompt, SamplingParams(n=n, max_tokens=max_tokens))
        self._engine.add_request(request)
        return request

    def step(self) -> Picture:
        """Run a step, check the scheduler and the memory, and return a picture. Mutates."""
        before = self.snapshot
        outcome = self._engine.step()
        self.num_steps += 1
        self.scheduler.check()
        self.snapshot = self._read(before)
        plan = self._executor.last_plan
        if outcome is None or plan is None:
            return self._picture(before, "nothing to do", None)
        ended = [sequence_name(request) for request in outcome.finished]
        facts = [f"{plan.num_tokens} token{'s' * (plan.num_tokens != 1)} computed"]
        for moves, words in (
            (plan.copies, "copied"),
            (plan.moves_out, "moved to the host"),
            (plan.moves_in, "moved back"),
        ):
            if moves:
                facts.append(f"{len(moves)} block{'s' * (len(moves) != 1)} {words}")
        facts += [f"{name} ended" for name in ended]
        return self._picture(before, f"step {self.num_steps}: {', '.join(facts)}", plan)

    def steps(self, count: int) -> list[Picture]:
        """Run `count` steps. Mutates."""
        return [self.step() for _ in range(count)]

    def table(self, name: str) -> list[int]:
        """Return the block table of a sequence. Does not mutate."""
        return next(list(view.block_ids) for view in self.snapshot.sequences if view.name == name)

    def _read(self, previous: MemorySnapshot | None) -> MemorySnapshot:
        members = [
            member
            for leader in self.scheduler.requests.values()
            for member in (leader.group.members if leader.group else [leader])
        ]
        idle = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        waiting = [member for member in members if member.status in idle]
        return read_snapshot(self.memory, waiting, previous, self._executor.take_arrived())

    def _picture(self, before: MemorySnapshot, text: str, plan: StepPlan | None) -> Picture:
        changes = describe_changes(before, self.snapshot, plan.copies if plan is not None else ())
        return partial(_draw, self.snapshot, changes, text)


def _draw(snapshot: MemorySnapshot, changes: dict[int, str], text: str, columns: int) -> list[Line]:
    return [line(span(text, FAINT)), *draw_memory(snapshot, changes, columns)]
