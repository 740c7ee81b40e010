"""The factory: the only file that wires the control plane to the compute plane.

    EngineConfig ──► model folder ──► ModelDescription ──► Backend ──► MemoryPlan        plan_engine: nothing is taken
                                                                           │
    Worker (an Executor): weights, KV arrays ──┐                           │
    KVCacheManager ──► Scheduler ──────────────┴──► EngineCore ◄───────────┘             EngineBlueprint.build

What can be refused from settings alone is refused by `plan_engine`. On a GPU `EngineBlueprint.measured` then loads the
weights and plans the memory again, by what steps really take of it.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol

from quire.compute.grammar import GrammarVerdicts, MaskService, Vocabulary
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.hub import resolve_model
from quire.compute.reference import load_worker
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader, weight_bytes
from quire.compute.worker.worker import Worker
from quire.core.clock import Clock, SystemClock
from quire.core.config import EngineConfig, MemoryConfig, ResolvedConfig, SchedulerConfig
from quire.core.errors import InvalidConfigError
from quire.core.executor import Executor, NoteLoaded
from quire.core.failpoints import FAILPOINTS_VARIABLE, Failpoint, parse_failpoints
from quire.core.granted import free_memory, resident_bytes, usable_cores
from quire.core.kv_spec import KVCacheSpec
from quire.core.sampling_params import SamplingParams
from quire.core.step import MAX_PROMPT_LOGITS
from quire.core.validate import RequestLimits
from quire.engine.core import EngineCore
from quire.engine.memory_plan import MemoryNeeds, MemoryPlan, plan_memory
from quire.engine.report import EngineReport
from quire.engine.step_log import StepLogWriter
from quire.engine.step_log_file import StepLogFile, step_log_notices
from quire.engine.tokenizer_files import tokenizer_json
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_sequence_tokens
from quire.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.compute.torch.device import DeviceFacts
    from quire.compute.torch.footprint import Footprint

GUIDE = "guide"
GPU_KV_SHARE: Final = 0.9
"""Of the free memory of a GPU, which nobody else is expected to want; what is left is for its allocator."""


class Load(Protocol):
    """Loads the weights and takes the memory of so many blocks; tells how far the weights are, where it can."""

    def __call__(self, num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> Executor:
        """Return what computes."""
        ...


@dataclass(frozen=True, slots=True)
class Backend:
    """What computes, by which settings, and what it needs. `gpu`: that on which it computes; `notice`: why it is none.

    `measured`, where that can be, loads the weights for `load` and returns what they and the largest steps take.
    """

    name: str
    config: ResolvedConfig
    dtype: str
    instruction_set: str
    num_threads: int
    kv_spec: KVCacheSpec
    weight_bytes: int
    activation_bytes: int
    load: Load
    gpu: DeviceFacts | None = None
    notice: str = ""
    measured: Callable[[NoteLoaded | None], Footprint] | None = None

    def memory_needs(self, found: Footprint | None = None) -> MemoryNeeds:
        """Return what is needed, foreseen or as it was found, and what is free where it computes. Does not mutate."""
        if self.gpu is None:
            return MemoryNeeds(self.weight_bytes, self.activation_bytes, resident_bytes() or 0, free_memory())
        from quire.compute.torch.footprint import Footprint

        free = self.gpu.free_bytes
        found = found or Footprint.foreseen(self.weight_bytes, self.activation_bytes, free)
        rest = max(free - found.weight_bytes - found.free_bytes, 0)
        needs = found.weight_bytes, found.activation_bytes, rest, found.weight_bytes + found.free_bytes
        return MemoryNeeds(*needs, GPU_KV_SHARE, host_bytes=free_memory() or 0, graph_bytes=found.graph_bytes)


@dataclass(frozen=True, slots=True)
class EngineBlueprint:
    """An engine that was found possible, and not built yet."""

    config: ResolvedConfig
    folder: Path
    model: ModelDescription
    backend: Backend
    report: EngineReport
    grammars: GrammarVerdicts | None
    """Which grammars there can be; None where there is no tokenizer. It loads nothing before the first of them."""
    masks: MaskService | None
    """What holds texts to grammars; None where there is no tokenizer."""

    @property
    def vocab_size(self) -> int:
        """How many token ids the model knows."""
        return self.model.spec.vocab_size

    @property
    def tokenizer_folder(self) -> Path:
        """Where the tokenizer is."""
        return _tokenizer_folder(self.config, self.folder)

    @property
    def default_sampling(self) -> SamplingParams:
        """How the makers of the model want it sampled, for requests that do not say."""
        defaults = self.model.generation
        said = {
            name: getattr(defaults, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        }
        return SamplingParams(**{name: value for name, value in said.items() if value is not None})

    def measured(self, note_loaded: NoteLoaded | None = None) -> EngineBlueprint:
        """Return it with the memory planned by what is found to be free; on a CPU, which gives no answer, as it is.

        The weights are loaded for it, and kept for `build`. Raises `InvalidConfigError` for what does not fit.
        """
        backend = self.backend
        if backend.gpu is None or backend.measured is None:
            return self
        needs = backend.memory_needs(backend.measured(note_loaded))
        plan = plan_memory(self.config, backend.kv_spec, self.model.spec.context_length, needs)
        return replace(self, report=replace(self.report, plan=plan))

    def check_weights(self) -> int:
        """Return how many tensors the folder has; raises `CheckpointError` for all that loading would refuse them for.

        Reads what the files say of their tensors, and none of the tensors. Does not mutate.
        """
        checkpoint = Checkpoint.open(self.folder)
        WeightReader(self.model.spec, checkpoint, "float32", self.config.weights)
        return len(checkpoint.entries)

    def build(self, clock: Clock, note_loaded: NoteLoaded | None = None) -> EngineCore:
        """Load the weights, allocate the memory, and return the engine. Does not mutate the blueprint.

        `note_loaded` is told how far the weights are, where the backend says so: the native one does.
        """
        plan = self.report.plan
        memory = self.config.memory_config(plan.num_blocks, plan.num_host_blocks, secrets.token_bytes(32))
        backend = self.backend if self.masks is None else _with_grammars(self.backend, self.masks)
        backend = replace(backend, load=partial(backend.load, note_loaded=note_loaded))
        scheduler, path = self.config.scheduler_config(plan.max_model_len), self.config.step_log
        open_log = None if path is None else partial(StepLogFile, path, clock)
        return _assemble(backend, self.model, memory, scheduler, clock, open_log)


def plan_engine(config: EngineConfig) -> EngineBlueprint:
    """Find out what an engine of these settings would be; reads settings, no weights, and takes no memory.

    Raises `CheckpointError` for a folder that cannot be run, `InvalidConfigError` for settings that do not fit it or
    this machine.
    """
    folder = _model_folder(config.model)
    model = read_model(folder, config.max_model_len)
    backend = choose_backend(config, folder, model)
    failpoints = parse_failpoints(os.environ.get(FAILPOINTS_VARIABLE, ""))
    if failpoints:
        backend = _armed(backend, failpoints)
    plan = plan_memory(backend.config, backend.kv_spec, model.spec.context_length, backend.memory_needs())
    notices = step_log_notices(config.step_log)
    notices += tuple(f"{FAILPOINTS_VARIABLE}: {failpoint} is armed, steps will fail" for failpoint in failpoints)
    report = _report(model, backend, plan)
    report = replace(report, notices=report.notices + notices)
    vocabulary = _vocabulary(config, folder, model)
    grammars = None if vocabulary is None else GrammarVerdicts(vocabulary)
    masks = None if vocabulary is None else MaskService(vocabulary)
    return EngineBlueprint(backend.config, folder, model, backend, report, grammars, masks)


def _tokenizer_folder(config: EngineConfig, folder: Path) -> Path:
    return folder if config.tokenizer is None else _model_folder(config.tokenizer)


def _vocabulary(config: EngineConfig, folder: Path, model: ModelDescription) -> Vocabulary | None:
    """Return the model's tokens, for grammars over them; nothing is read before there is one."""
    if config.skip_tokenizer_init:
        return None

    def read() -> dict[str, Any]:
        return tokenizer_json(_tokenizer_folder(config, folder), model.spec.vocab_size)

    eos_token_ids = frozenset(model.eos_token_ids)
    return Vocabulary(read, vocab_size=model.spec.vocab_size, eos_token_ids=eos_token_ids)


def _report(model: ModelDescription, backend: Backend, plan: MemoryPlan) -> EngineReport:
    config = backend.config
    return EngineReport(
        model=config.model,
        architecture=model.architecture,
        num_layers=len(model.spec.layers),
        backend=backend.name,
        dtype=backend.dtype,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        instruction_set=backend.instruction_set,
        num_threads=backend.num_threads,
        block_size=config.block_size,
        context_length=model.spec.context_length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        plan=plan,
        notices=model.notices + _dtype_notices(model, backend) + ((backend.notice,) if backend.notice else ()),
    )


def _dtype_notices(model: ModelDescription, backend: Backend) -> tuple[str, ...]:
    if model.dtype == "float16" and backend.dtype == "bfloat16" and backend.config.weights == "auto":
        return ("float16 weights run in bfloat16: the range of float32, 8 bits of precision",)
    return ()


def _model_folder(name: str) -> Path:
    if name != GUIDE or Path(name).is_dir():
        return resolve_model(name)
    from quire.guide import GUIDE_FOLDER

    return GUIDE_FOLDER


def _assemble(
    backend: Backend,
    model: ModelDescription,
    memory: MemoryConfig,
    scheduler: SchedulerConfig,
    clock: Clock,
    open_log: Callable[[], StepLogWriter] | None,
) -> EngineCore:
    """Put the planes together. The log is opened last: an engine that cannot be loaded leaves none behind."""
    chunk = 1 + scheduler.max_steps_under_way
    limits = RequestLimits(
        vocab_size=model.spec.vocab_size,
        max_model_len=min(scheduler.max_model_len, model.spec.context_length),
        max_sequence_tokens=max_sequence_tokens(memory.num_blocks, backend.kv_spec, longest_chunk=chunk),
        max_num_seqs=scheduler.max_num_seqs,
        eos_token_ids=tuple(model.eos_token_ids),
    )
    manager = KVCacheManager(backend.kv_spec, memory)
    control = Scheduler(scheduler, manager, limits, eos_token_ids=frozenset(model.eos_token_ids))
    executor = backend.load(memory.num_blocks, memory.num_host_blocks)
    return EngineCore(control, executor, clock, log=open_log and open_log())


# ---- backends -------------------------------------------------------------------------------------------------------


def choose_backend(config: EngineConfig, folder: Path, model: ModelDescription) -> Backend:
    """Return what computes a model that was read, and what it needs; raises for settings that do not fit it.

    Looks at the GPU where one may be used. Reads nothing: weights are looked for in the folder when the backend loads.
    """
    if config.device == "cpu" or config.backend in ("native", "reference"):
        return backend_on("cpu", config.resolved(), folder, model)
    from quire.compute.torch.device import choose_device, look
    from quire.compute.torch.settings import device_needs

    facts = look(os.environ)
    if facts.gpu is None and config.device == "auto":
        return backend_on("cpu", config.resolved(), folder, model)
    backend = backend_on("cuda", config.resolved(facts.total_bytes), folder, model)
    needs = device_needs(model.spec, backend.weight_bytes + backend.activation_bytes)
    choice = choose_device(facts, config.device, needs)
    if choice.device == "cpu":
        return replace(backend_on("cpu", config.resolved(), folder, model), notice=choice.notice)
    return replace(backend, gpu=facts, instruction_set=f"{facts.gpu}, capability {facts.dotted_capability}")


def backend_on(device: str, config: ResolvedConfig, folder: Path, model: ModelDescription) -> Backend:
    """Return what computes on cpu or cuda, whether that is here or not; raises for settings that do not fit."""
    if device == "cuda" or config.backend == "torch":
        return _torch_backend(device, config, folder, model)
    if config.backend == "reference":
        return _reference_backend(config, folder, model)
    try:
        return _native_backend(config, folder, model)
    except ImportError as error:
        if config.backend == "native":
            allowed = "reference: the compiled core cannot be imported; see quire doctor"
            raise InvalidConfigError("backend", "native", allowed) from error
        return _reference_backend(config, folder, model)


def _with_grammars(backend: Backend, masks: MaskService) -> Backend:
    """Return the backend with a worker that holds texts to grammars."""

    def load(num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> Executor:
        executor = backend.load(num_blocks, num_host_blocks, note_loaded)
        if isinstance(executor, Worker):
            executor.use_grammars(masks)
        return executor

    return replace(backend, load=load)


def _armed(backend: Backend, failpoints: Sequence[Failpoint]) -> Backend:
    """Return the backend with faults to order."""
    from quire.compute.worker.failing_runner import FailingRunner

    def load(num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> Executor:
        executor = backend.load(num_blocks, num_host_blocks, note_loaded)
        if not isinstance(executor, Worker):
            raise InvalidConfigError(FAILPOINTS_VARIABLE, ", ".join(map(str, failpoints)), "nothing on this backend")
        executor.runner = FailingRunner(executor.runner, failpoints)
        return executor

    return replace(backend, load=load)


def _native_backend(config: ResolvedConfig, folder: Path, model: ModelDescription) -> Backend:
    from quire.compute.native.load import NativeSettings, activation_bytes, kernels_for, kv_cache_spec
    from quire.compute.native.load import load_worker as load_native_worker

    dtype = config.dtype
    if dtype == "float16":
        raise InvalidConfigError("dtype", dtype, "bfloat16, float32 or auto: only the torch backend knows float16")
    if dtype == "auto":
        dtype = "float32" if model.dtype == "float32" else "bfloat16"
    settings = NativeSettings(
        dtype=dtype,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        block_size=config.block_size,
        num_threads=config.num_threads or usable_cores(),
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        touch_kv_memory=config.touch_kv_memory,
    )

    return Backend(
        name="native",
        config=config,
        dtype=dtype,
        instruction_set=kernels_for(None).name,
        num_threads=settings.num_threads,
        kv_spec=kv_cache_spec(model.spec, config.block_size, settings.stored_kv_dtype),
        weight_bytes=weight_bytes(model.spec, dtype, config.weights),
        activation_bytes=activation_bytes(model.spec, settings),
        load=partial(load_native_worker, folder, model, settings),
    )


def _torch_backend(device: str, config: ResolvedConfig, folder: Path, model: ModelDescription) -> Backend:
    from quire.compute.torch.settings import DTYPES, TorchSettings, activation_bytes, kv_cache_spec
    from quire.compute.torch.start import TorchStart

    if device == "cpu" and find_spec("torch") is None:
        raise InvalidConfigError("backend", "torch", "native or reference: torch is not installed")
    if config.touch_kv_memory and device == "cuda":
        raise InvalidConfigError("touch_kv_memory", True, "False: a GPU gives its memory at once")
    dtype = config.dtype
    if dtype == "auto":
        dtype = model.dtype if model.dtype in DTYPES else "bfloat16"
    settings = TorchSettings(
        device=device,
        dtype=dtype,
        weights=config.weights,
        kv_dtype=config.kv_dtype,
        block_size=config.block_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        attention=config.attention_backend,
        batch_invariant=config.batch_invariant,
        graphs=config.cuda_graphs,
        num_threads=(config.num_threads or usable_cores()) if device == "cpu" else 0,
    )

    start = TorchStart(folder, model, settings)
    return Backend(
        name="torch",
        config=config,
        dtype=dtype,
        instruction_set=device,
        num_threads=settings.num_threads,
        kv_spec=kv_cache_spec(model.spec, settings),
        weight_bytes=weight_bytes(model.spec, "bfloat16" if dtype == "float16" else dtype, config.weights),
        activation_bytes=activation_bytes(model.spec, settings),
        load=start,
        measured=start.measured if device == "cuda" else None,
    )


def _reference_backend(config: ResolvedConfig, folder: Path, model: ModelDescription) -> Backend:
    if config.dtype not in ("auto", "float32"):
        raise InvalidConfigError("dtype", config.dtype, "float32 or auto: the reference backend knows no other")
    if config.touch_kv_memory:
        raise InvalidConfigError("touch_kv_memory", True, "False: the reference backend takes memory as it fills it")
    if config.kv_dtype not in ("auto", "float32", "int8"):
        allowed = "float32, int8 or auto: the reference backend knows no other"
        raise InvalidConfigError("kv_dtype", config.kv_dtype, allowed)

    made = partial(load_worker, folder, block_size=config.block_size, weights=config.weights, kv_dtype=config.kv_dtype)

    def load(num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> Executor:
        return made(num_blocks=num_blocks, num_host_blocks=num_host_blocks)

    spec = model.spec
    heads = spec.attention.num_heads * spec.attention.head_dim
    per_token = 6 * spec.hidden_size + 3 * spec.mlp.intermediate_size + 4 * heads
    num_logits = config.max_num_seqs + MAX_PROMPT_LOGITS
    numbers = config.max_num_batched_tokens * per_token + 2 * num_logits * spec.vocab_size
    return Backend(
        name="reference",
        config=config,
        dtype="float32",
        instruction_set="numpy",
        num_threads=1,
        kv_spec=spec.kv_cache_spec(config.block_size),
        weight_bytes=weight_bytes(spec, weights=config.weights),
        activation_bytes=4 * numbers,
        load=load,
    )


def create_reference_engine(
    model_folder: Path,
    *,
    block_size: int = 16,
    memory: MemoryConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    log: BinaryIO | None = None,
) -> EngineCore:
    """Return an engine of token ids over the reference decoder, with blocks counted rather than planned.

    Raises `CheckpointError` for a folder that cannot be run; nothing is allocated then.
    """
    memory, scheduler = memory or MemoryConfig(), scheduler or SchedulerConfig()
    if not memory.hash_key:
        memory = replace(memory, hash_key=secrets.token_bytes(32))
    model = read_model(model_folder)
    backend = _reference_backend(EngineConfig(block_size=block_size).resolved(), model_folder, model)
    clock = SystemClock()
    open_log = None if log is None else partial(StepLogWriter, log, clock)
    return _assemble(backend, model, memory, scheduler, clock, open_log)
