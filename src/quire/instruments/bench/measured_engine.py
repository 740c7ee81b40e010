"""MeasuredEngine: an engine as in `LLM`, with timers between its parts.

    client.receive ── scheduler, memory, commit ──► executor.submit ── batch, sampling ──► runner.run
    └─ wall time                                    └─ in the executor                     └─ in the decoder

The time outside of the executor is the engine's own share of a step. Requests and outputs are token ids, without a
tokenizer.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

from quire.compute.backend import WorkerParts
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.image_queue import ImageEncoder
from quire.compute.worker.model_runner import ModelRunner, StepInputs, StepOutputs
from quire.compute.worker.worker import Worker
from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.core.pooling import Pooling
from quire.core.request import CacheScope
from quire.core.step import NO_BLOCK, StepPlan, StepResult
from quire.engine.client import EngineClient, SequenceUpdate
from quire.engine.commands import Add
from quire.engine.core import EngineCore
from quire.engine.factory import plan_engine
from quire.engine.progress import LoadingLine
from quire.instruments.bench.workload_file import WorkloadRequest

AWAITED_S: Final = 100e-6
"""The time to process a result that is ready."""


@dataclass(slots=True)
class StepWatch:
    """Seconds in the executor and in the decoder, and the submitted plans. All accumulate until `reset`.

    `unawaited_s`: if the executor launches ahead, the seconds of steps whose results were ready without waiting.
    `blocks`, if it is a set, collects every block of KV memory that a plan writes or reads. `image_encoder`: the
    engine's, if its model reads images.
    """

    executor_s: float = 0.0
    decoder_s: float = 0.0
    unawaited_s: float = 0.0
    num_steps: int = 0
    last_plan: StepPlan | None = None
    blocks: set[int] | None = None
    image_encoder: ImageEncoder | None = None

    def reset(self) -> None:
        """Reset all counts. Mutates."""
        self.executor_s = self.decoder_s = self.unawaited_s = 0.0
        self.num_steps = 0


class WatchedRunner:
    """A model runner with a timer."""

    def __init__(self, runner: ModelRunner[Any], watch: StepWatch) -> None:
        self._runner = runner
        self._watch = watch

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        return self._runner.vocab_size

    def run(self, inputs: StepInputs, cache: CacheEngine) -> StepOutputs:
        """Compute one step."""
        started = time.perf_counter()
        outputs = self._runner.run(inputs, cache)
        self._watch.decoder_s += time.perf_counter() - started
        return outputs


class WatchedWorker:
    """A worker with a timer.

    If it launches steps ahead, the decoder runs in parallel with the host: its time is then the host's waiting time.
    """

    def __init__(self, watch: StepWatch, parts: WorkerParts) -> None:
        self._watch = watch
        watch.image_encoder = parts.image_encoder
        self._collected = time.perf_counter()
        self._launches_ahead = parts.launcher is not None
        self._executor = Worker(
            parts if self._launches_ahead else parts.with_runner(WatchedRunner(parts.runner, watch))
        )

    def start(self) -> None:
        """Prepare for plans."""
        self._executor.start()

    def submit(self, plan: StepPlan) -> None:
        """Submit a plan."""
        started = time.perf_counter()
        self._executor.submit(plan)
        self._watch.executor_s += time.perf_counter() - started
        self._watch.num_steps += 1
        self._watch.last_plan = plan
        if self._watch.blocks is not None:
            self._watch.blocks.update(block for block in plan.tables.blocks if block != NO_BLOCK)

    def collect(self) -> StepResult:
        """Return the result of the oldest plan."""
        started = time.perf_counter()
        result = self._executor.collect()
        ended = time.perf_counter()
        waited_s = ended - started
        self._watch.executor_s += waited_s
        if self._launches_ahead:
            self._watch.decoder_s += waited_s
            if waited_s < AWAITED_S:
                self._watch.unawaited_s += ended - self._collected
        self._collected = ended
        return result

    def shutdown(self) -> None:
        """Free all memory."""
        self._executor.shutdown()


@dataclass(slots=True)
class Run:
    """The results of a workload's requests: all times in seconds, of the run's own clock."""

    wall_s: float = 0.0
    executor_s: float = 0.0
    decoder_s: float = 0.0
    unawaited_s: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    num_output_tokens: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)  # by request
    first_token_s: dict[str, float] = field(default_factory=dict)  # by request
    gaps_s: list[float] = field(default_factory=list)  # between two tokens of one sequence


class MeasuredEngine:
    """An engine that runs token ids, and reports the time of each part."""

    def __init__(self, config: EngineConfig) -> None:
        self.watch = StepWatch()
        self.load_s = 0.0
        started = time.perf_counter()
        self.blueprint = plan_engine(replace(config, skip_tokenizer_init=True))
        self.plan_s = time.perf_counter() - started

    def load(self) -> MeasuredEngine:
        """Load the weights and allocate the memory; sets `load_s` to the time until ready. Mutates."""
        started = time.perf_counter()
        clock = SystemClock()
        with closing(LoadingLine(sys.stderr, clock)) as progress:
            self.blueprint = self.blueprint.measured(progress.note)
            self.core: EngineCore = self.blueprint.build(clock, progress.note, partial(WatchedWorker, self.watch))
        self.client = EngineClient(self.core)
        self.load_s = self.plan_s + time.perf_counter() - started
        return self

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the model."""
        return self.blueprint.vocab_size

    @property
    def generates(self) -> bool:
        """Whether the model can continue a text: an encoder only makes vectors."""
        return self.blueprint.model.generates

    def add(self, request_id: str, request: WorkloadRequest, *, seed: int = 0) -> None:
        """Add a request; raises `InvalidRequestError` if it can never be served. Mutates."""
        sampling = replace(request.sampling, seed=seed)
        scope = CacheScope(adapter=request.adapter)
        tokens = array("i", request.prompt_token_ids)
        self.client.send(Add(request_id, tokens, sampling, scope, pooling=request.pooling))

    def run(self, requests: Sequence[WorkloadRequest], watch_step: Callable[[], None] | None = None) -> Run:
        """Run requests to their end; calls `watch_step` after each step with tokens. Mutates the engine."""
        run, last_s = Run(), dict[tuple[str, int], float]()
        self.watch.reset()
        preemptions = self.core.scheduler.num_preemptions
        started = time.perf_counter()
        for index, request in enumerate(requests):
            self.add(str(index), request, seed=index)
        while not self.client.is_idle:
            updates = self.client.receive()
            now = time.perf_counter() - started
            for update in updates:
                _note(run, last_s, update, now)
            if updates and watch_step is not None:
                watch_step()
        run.wall_s = time.perf_counter() - started
        run.executor_s, run.decoder_s = self.watch.executor_s, self.watch.decoder_s
        run.unawaited_s = self.watch.unawaited_s
        run.num_steps = self.watch.num_steps
        run.num_preemptions = self.core.scheduler.num_preemptions - preemptions
        return run

    def warm_up(self) -> None:
        """Run two short requests, as the runners of the peers do. Mutates."""
        tokens = [(7 * index) % self.vocab_size for index in range(25)]
        max_tokens, pooling = (4, None) if self.generates else (1, Pooling("last"))
        self.run([WorkloadRequest(tuple(tokens[:count]), max_tokens, pooling=pooling) for count in (24, 25)])

    def close(self) -> None:
        """Free the memory."""
        self.client.close()

    def __enter__(self) -> MeasuredEngine:
        return self.load()

    def __exit__(self, *_: object) -> None:
        self.close()


def _note(run: Run, last_s: dict[tuple[str, int], float], update: SequenceUpdate, now: float) -> None:
    """Add an update to the run. Mutates both."""
    if update.error:
        raise ExecutionError(f"request {update.request_id} has failed: {update.error}")
    run.cached_tokens[update.request_id] = update.num_cached_tokens
    if not update.token_ids:
        return
    count, sequence = len(update.token_ids), (update.request_id, update.branch)
    run.num_output_tokens += count
    run.first_token_s.setdefault(update.request_id, now)
    if sequence in last_s:
        run.gaps_s += [(now - last_s[sequence]) / count] * count
    last_s[sequence] = now
