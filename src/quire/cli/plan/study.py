"""A study: how one model would perform on one machine. `quire plan` prints its fields."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.cli.model_shapes import shape_of
from quire.cli.plan.sizing import UNLIMITED_BYTES, EngineSizer, SizedEngine, TooSmallError, resolved_on, whole_mebibytes
from quire.compute.choice import usual_block_size
from quire.core.byte_sizes import format_bytes
from quire.core.config import ResolvedConfig
from quire.core.errors import InvalidConfigError
from quire.core.what_fits import flags_that_fit
from quire.simulate.capacity import Concurrency, Occupancy
from quire.simulate.estimate import Estimate, Estimator, Objective
from quire.simulate.hardware import Hardware
from quire.simulate.lengths import RequestLengths
from quire.simulate.planner import Choices, Pool, Recommendation, UnreachableError, recommend
from quire.simulate.roofline import Numbers, Roofline

NARROW_KV = ("int8", "fp8", "k8v4", "int4")


@dataclass(frozen=True, slots=True)
class NarrowKV:
    """The capacity of the same KV memory with a narrower KV type."""

    dtype: str
    bytes_per_token: int
    num_blocks: int
    average: float


@dataclass(frozen=True, slots=True)
class Study:
    """A machine, the engine on it, and its capacity. `problem`: why it cannot serve; then the rest can be None.

    `best`: the best settings that meet the objective; if none do, `nearest` comes closest.
    """

    hardware: Hardware
    memory_bytes: int
    problem: InvalidConfigError | None = None
    engine: SizedEngine | None = None
    held: Concurrency | None = None
    narrow: tuple[NarrowKV, ...] = ()
    stream_tokens_per_s: float | None = None
    prompt_s: float | None = None
    estimate: Estimate | None = None
    best: Recommendation | None = None
    nearest: Estimate | None = None


class Planner:
    """Studies machines for one model and one kind of requests. Immutable except for its caches."""

    def __init__(self, sizer: EngineSizer, lengths: RequestLengths, choices: Choices, objective: Objective) -> None:
        self._sizer = sizer
        self._lengths = lengths
        self._choices = choices
        self._objective = objective

    def study(self, hardware: Hardware, memory_bytes: int) -> Study:
        """Study the model on the machine with this much of its memory."""
        try:
            config = resolved_on(hardware, self._sizer.config, self._sizer.model_of(self._sizer.config))
            engine = self._sizer.size(config, memory_bytes)
        except TooSmallError as error:
            needed = max(error.needed_bytes, sum(self._least_parts(config)))
            flags = flags_that_fit(config, lambda narrower: self._size_anew(narrower, memory_bytes))
            return Study(hardware, memory_bytes, problem=TooSmallError(memory_bytes, needed, error.why, flags))
        except InvalidConfigError as error:
            return Study(hardware, memory_bytes, problem=error)
        spec, plan = engine.facts.kv_spec, engine.plan
        held = Occupancy.of(spec, self._lengths).in_pool(plan.num_blocks, plan.max_model_len)
        estimator = self._estimator(hardware, engine)
        running = min(config.max_num_seqs, int(held.average))
        budget = config.max_num_batched_tokens
        study = Study(
            hardware=hardware,
            memory_bytes=memory_bytes,
            engine=engine,
            held=held,
            narrow=tuple(self._narrow(engine, memory_bytes)),
            stream_tokens_per_s=estimator.stream_tokens_per_s(),
            prompt_s=estimator.prompt_s(self._lengths.prompt(0.5), budget),
            estimate=estimator.serving(running, budget) if running else None,
        )
        return self._with_best(study, config, estimator)

    def _with_best(self, study: Study, config: ResolvedConfig, estimator: Estimator) -> Study:
        def pool_of(block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> Pool | None:
            chosen = replace(
                config,
                block_size=block_size,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
            )
            try:
                return self._sizer.size(chosen, study.memory_bytes).pool
            except InvalidConfigError:
                return None

        try:
            best = recommend(pool_of, estimator, self._lengths, self._choices, self._objective)
            return replace(study, best=best)
        except UnreachableError as error:
            if error.nearest is not None:
                return replace(study, nearest=error.nearest)
            return replace(study, problem=self._too_long(config, study.memory_bytes))

    def _too_long(self, config: ResolvedConfig, memory_bytes: int) -> InvalidConfigError:
        """Return the error for requests that are longer than any pool of the settings."""
        why, fixed = " for requests as long as these", config.kv_memory
        if fixed is None:
            return TooSmallError(memory_bytes, sum(self._least_parts(config)), why)
        return InvalidConfigError(
            "kv_memory", format_bytes(int(fixed)), f"{whole_mebibytes(self._least_parts(config)[0])} or more{why}"
        )

    def _least_parts(self, config: ResolvedConfig) -> tuple[int, int]:
        """Return the bytes of KV memory for one average request of these lengths, and the bytes of everything else.

        Both are for the settings that need the least memory.
        """
        choices = self._choices
        sequences = min(choices.sequences)
        least = replace(
            config,
            block_size=min(choices.block_sizes),
            max_num_seqs=sequences,
            max_num_batched_tokens=max(min(choices.budgets), sequences),
        )
        engine = self._sizer.size(least, UNLIMITED_BYTES)
        parts = dict(engine.plan.parts)
        needed = Occupancy.of(engine.facts.kv_spec, self._lengths).blocks_for_one() * engine.plan.bytes_per_block
        swap_bytes = 0 if engine.plan.needs.host_bytes is not None else engine.plan.swap_bytes
        return needed, parts["weights"] + parts["activations"] + swap_bytes

    def _estimator(self, hardware: Hardware, engine: SizedEngine) -> Estimator:
        facts, config = engine.facts, engine.config
        shape = shape_of(config.model, self._sizer.model, facts)
        numbers = Numbers(facts.dtype, facts.weights, facts.kv_spec.dtype, config.tensor_parallel_sums)
        return Estimator(Roofline(hardware, shape, numbers), self._lengths)

    def _size_anew(self, config: ResolvedConfig, memory_bytes: int) -> SizedEngine:
        """Return the engine, with the block size that suits its KV type unless the user has set one."""
        model, asked = self._sizer.model, replace(self._sizer.config, kv_dtype=config.kv_dtype)
        block_size = asked.block_size or usual_block_size(model, asked)
        return self._sizer.size(replace(config, block_size=block_size), memory_bytes)

    def _narrow(self, engine: SizedEngine, memory_bytes: int) -> list[NarrowKV]:
        """Return the capacity of the same KV memory with each narrower KV type that this engine supports."""
        spec, kv_bytes = engine.facts.kv_spec, engine.plan.num_blocks * engine.plan.bytes_per_block
        studied = []
        for dtype in NARROW_KV:
            try:
                narrow = self._size_anew(replace(engine.config, kv_dtype=dtype), memory_bytes).facts.kv_spec
            except InvalidConfigError:
                continue
            if narrow.bytes_per_token < spec.bytes_per_token:
                num_blocks = kv_bytes // narrow.bytes_per_block
                held = Occupancy.of(narrow, self._lengths).in_pool(num_blocks, engine.plan.max_model_len)
                studied.append(NarrowKV(dtype, narrow.bytes_per_token, num_blocks, held.average))
        return studied
