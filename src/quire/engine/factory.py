"""The factory: the only file that joins the control plane and the compute plane.

    EngineConfig ──► ModelSource ──► ModelDescription  ──► Backend ──► MemoryPlan        plan_engine: takes no memory
                                                              │            │
    WorkerParts: weights, KV arrays ──► Worker (an Executor) ─┤            │
    KVCacheManager ──► Scheduler ─────────────────────────────┴► EngineCore ◄            EngineBlueprint.build

`plan_engine` refuses every mistake that the settings alone reveal. On a GPU, `EngineBlueprint.measured` then loads the
weights and plans the memory again, from the measured memory of a step.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

from quire.compute.adapters.folder import Adapter, read_adapter
from quire.compute.adapters.loading import AdapterLoader
from quire.compute.backend import Backend, BackendFacts, WorkerParts
from quire.compute.choice import backend_on, choose_backend
from quire.compute.grammar import GrammarVerdicts, MaskService, Vocabulary
from quire.compute.models import ModelDescription, read_model
from quire.compute.models.draft import require_same_tokens, with_auto_layer, with_draft, with_own_layer
from quire.compute.models.hub import GUIDE, place_notices, resolve_model
from quire.compute.models.labels import labels_of_tokens, separator_of
from quire.compute.models.pooling import pooling_of
from quire.compute.models.source import ModelFolder, ModelSource
from quire.compute.speculation import create_proposer
from quire.compute.vision.encoder import most_rows
from quire.compute.vision.weights import fitted
from quire.compute.weights.classifier import read_classifier
from quire.compute.weights.decoder_weights import WeightReader, weight_bytes
from quire.compute.weights.dense import read_dense
from quire.compute.worker.failing_runner import FailingRunner
from quire.compute.worker.image_queue import EncodedImages, ImageQueue
from quire.compute.worker.store.slot_file import SlotFile
from quire.compute.worker.worker import Worker
from quire.core.adapters import AdapterFacts
from quire.core.clock import Clock, SystemClock
from quire.core.config import MTP, NO_IMAGES, SPECULATIONS, EngineConfig, MemoryConfig, ResolvedConfig, SchedulerConfig
from quire.core.errors import CheckpointError, DoesNotFitError, InvalidConfigError, InvariantError
from quire.core.executor import Executor, NoteLoaded
from quire.core.failpoints import FAILPOINTS_VARIABLE, Failpoint, parse_failpoints
from quire.core.images import MIN_IMAGE_TOKENS
from quire.core.kept_block import KeptBlock
from quire.core.model_files import ModelFiles
from quire.core.pooling import FIRST
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.core.what_fits import flags_that_fit
from quire.engine.core import EngineCore, EngineExtras
from quire.engine.images.reader import ImageReader
from quire.engine.memory_plan import MemoryPlan, plan_memory, require_host
from quire.engine.process.adapter_set import first_that_fit
from quire.engine.records.report import EngineReport
from quire.engine.records.step_log import StepLogWriter
from quire.engine.records.step_log_file import StepLogFile, step_log_notices
from quire.engine.text.tokenizer_files import tokenizer_json
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_sequence_tokens
from quire.scheduler.scheduler import Scheduler

FLOAT32_BYTES: Final = 4


@dataclass(frozen=True, slots=True)
class EngineBlueprint:
    """The plan of an engine that can be built."""

    config: ResolvedConfig
    model: ModelDescription
    backend: Backend
    report: EngineReport
    grammars: GrammarVerdicts | None
    """Checks grammars; None without a tokenizer. Loads nothing before the first grammar."""
    masks: MaskService | None
    """Makes the masks for grammars; None without a tokenizer."""
    failpoints: tuple[Failpoint, ...] = ()

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the model."""
        return self.model.spec.vocab_size

    @property
    def tokenizer_files(self) -> ModelFiles:
        """The files of the tokenizer."""
        return _tokenizer_files(self.config, self.model)

    @property
    def images(self) -> ImageReader | None:
        """Reads the images of requests; None if the engine takes texts only."""
        vision = self.model.vision
        if vision is None or self.config.skip_tokenizer_init:
            return None

        def num_rows(height: int, width: int, wanted: int) -> int:
            try:
                return vision.num_placeholders(height, width, wanted)
            except InvariantError:  # no such size reaches the engine
                return 0

        longest, patches = self.report.plan.max_model_len, vision.patches.max_patches
        return ImageReader.open(
            self.model.source,
            max_tokens=longest,
            num_rows=num_rows,
            max_patches=patches,
            placeholder_id=vision.placeholder,
        )

    @property
    def pooling(self) -> str:
        """How the model's vectors are pooled; empty: neither its folder nor the settings specify it."""
        return pooling_of(self.model.source) if self.config.pooling == "auto" else self.config.pooling

    @property
    def fingerprint(self) -> str:
        """A digest of everything that the results depend on: on one machine, equal digests mean equal bits."""
        from quire.compute.worker.store.identity import files_digest, fingerprint, identity_of

        return fingerprint(identity_of(self.model, self.backend.facts, files_digest))

    @property
    def adapters(self) -> dict[str, AdapterFacts]:
        """The adapters that the settings name, by name."""
        return {name: self._facts_of(adapter) for name, adapter in self.model.adapters.items()}

    @property
    def adapter_budget(self) -> int:
        """The bytes of adapters that can be in memory at once."""
        return self.backend.facts.adapter_bytes

    @property
    def default_sampling(self) -> SamplingParams:
        """The model's own sampling defaults, for requests that set none; without a tokenizer, no stop strings."""
        given = {name: value for name, value in asdict(self.model.generation).items() if value is not None}
        if self.config.skip_tokenizer_init:
            given["stop"] = ()
        return SamplingParams(**given)

    @property
    def limits(self) -> RequestLimits:
        """The limits of requests by this plan; on a GPU, `measured` can change them."""
        plan = self.report.plan
        scheduler = self.config.scheduler_config(plan.max_model_len)
        return _request_limits(self.backend.facts, self.model, plan.num_blocks, scheduler)

    def within(self, memory_bytes: int) -> EngineBlueprint:
        """Return the blueprint of an engine that uses at most this much memory; reads no files.

        Raises `InvalidConfigError` if it does not fit.
        """
        config = replace(self.config, max_memory=memory_bytes)
        needs = self.report.plan.needs
        plan = plan_memory(config, self.backend.facts.kv_spec, self.model.spec.context_length, needs)
        return replace(self, config=config, report=replace(self.report, plan=plan))

    def measured(self, note_loaded: NoteLoaded | None = None) -> EngineBlueprint:
        """Return the blueprint, planned again from measured memory on a GPU; on a CPU, the blueprint itself.

        Loads the weights, and keeps them for `build`. Raises `InvalidConfigError` if they do not fit.
        """
        needs = self.backend.measured(note_loaded)
        if needs is None:
            return self
        plan = plan_memory(self.config, self.backend.facts.kv_spec, self.model.spec.context_length, needs)
        return replace(self, report=replace(self.report, plan=plan))

    def check_weights(self) -> int:
        """Return the number of the model's tensors; raises `CheckpointError` if loading would refuse them.

        Reads only the headers of the files. Does not mutate.
        """
        checkpoint = self.model.source.tensors()
        WeightReader(self.model.spec, checkpoint, "float32", self.config.weights)
        if self.model.draft is not None and self.model.draft.spec.joins_states:
            WeightReader(self.model.draft.spec, checkpoint, "float32", self.config.weights)
        if self.model.vision is not None:
            fitted(self.model.vision, checkpoint)
        return len(checkpoint.entries)

    def build(
        self,
        clock: Clock,
        note_loaded: NoteLoaded | None = None,
        make_executor: Callable[[WorkerParts], Executor] = Worker,
        *,
        hash_key: bytes = b"",
    ) -> EngineCore:
        """Load the weights, allocate the memory, and return the engine. Does not mutate the blueprint.

        Calls `note_loaded` with the progress of the weights, if the backend reports it, as the native one does.
        `make_executor`: for instruments that change the parts or watch the worker. `hash_key`: a key that several
        engines share; empty: a new one.
        """
        plan = self.report.plan
        key, path = hash_key or secrets.token_bytes(32), self.config.step_log
        memory = self.config.memory_config(plan.num_blocks, plan.num_host_blocks, key, plan.num_disk_slots)
        scheduler = self.config.scheduler_config(plan.max_model_len)

        parts = self.backend.load(memory.num_blocks, memory.num_host_blocks, note_loaded)
        if self.model.vision is not None:
            room = EncodedImages(most_rows(self.model.vision, self.model.spec))
            parts = replace(parts, encoded_images=room)
        store = self.open_store()
        kept = () if store is None else store.kept
        control = _make_scheduler(self.backend.facts, self.model, memory, scheduler, kept)
        parts = replace(parts, masks=self.masks, proposer=create_proposer(self.config.speculation), store=store)
        if self.failpoints:
            parts = parts.with_runner(FailingRunner(parts.runner, self.failpoints))
        if self.model.labels is not None:
            classifier = read_classifier(self.model.labels, self.model.spec, self.model.source.tensors())
            parts = replace(parts, classifier=classifier)
        parts = replace(parts, dense=tuple(read_dense(self.model.dense, self.model.source)))
        loader = None
        if parts.adapters is not None and self.backend.facts.adapter_bytes:
            first = {facts.digest for facts in first_that_fit(self.adapters.values(), self.adapter_budget)}
            loader = AdapterLoader(parts.adapters, self._read_adapter)
            loader.load_now(adapter for adapter in self.model.adapters.values() if adapter.digest in first)
            parts = replace(parts, has_adapter=loader.has_adapter)
        executor = make_executor(parts)
        # The log is opened last, so that an engine that fails to load creates none.
        log = None if path is None else StepLogFile(path, clock)
        disk_store = "" if store is None else store.path
        images = None if parts.image_encoder is None else ImageQueue(parts.image_encoder, parts.encoded_images)
        return EngineCore(control, executor, clock, log=log, extras=EngineExtras(loader, images, disk_store))

    def _read_adapter(self, folder: str, digest: str | None = None) -> Adapter:
        return read_adapter(Path(folder), self.model.spec, self.config.max_adapter_rank, digest)

    def check_adapter(self, folder: str) -> AdapterFacts:
        """Read the adapter in a folder and return its facts; raises `CheckpointError` unless it fits."""
        adapter, room = self._read_adapter(folder), self.backend.facts.adapter_room
        if room is not None:
            room.require(adapter)
        for _ in adapter.read():  # reading refuses numbers that are not finite
            pass
        return self._facts_of(adapter)

    def _facts_of(self, adapter: Adapter) -> AdapterFacts:
        facts = self.backend.facts
        num_bytes = adapter.num_bytes(4 if facts.dtype == "float32" else 2)
        if facts.adapter_room is not None:
            num_bytes = facts.adapter_room.slot_bytes
        return AdapterFacts(str(adapter.folder), adapter.digest, adapter.rank, num_bytes, adapter.base)

    def open_store(self) -> SlotFile | None:
        """Return the store of the disk cache, which the worker closes; None without a disk cache."""
        if self.config.disk_cache is None:
            return None
        from quire.compute.worker.store.opened import open_store  # imported late, for a faster start

        plan, budget = self.report.plan, int(self.config.disk_cache_size)
        folder = Path(self.config.disk_cache)
        return open_store(folder, self.model, self.backend.facts, num_slots=plan.num_disk_slots, budget=budget)


def _require_fit(model: ModelDescription, config: EngineConfig) -> None:
    backend, _ = choose_backend(config, model)
    plan_memory(backend.facts.config, backend.facts.kv_spec, model.spec.context_length, backend.needs())


def plan_engine(config: EngineConfig) -> EngineBlueprint:
    """Plan an engine with these settings; reads the model's settings but no weights, and allocates no memory.

    Raises `CheckpointError` for a model that cannot be run, `InvalidConfigError` for settings that do not fit it or
    this machine.
    """
    source = _model_source(config.model, config.mmproj)
    model = read_model(source, config.max_model_len, images=config.mmproj != NO_IMAGES)
    model = model.with_image_limit(config.max_image_patches)
    guessing = with_auto_layer(config, model, source)
    if guessing is not config:
        with suppress(DoesNotFitError):
            return _planned(guessing, model, source)
    return _planned(config, model, source)


def _planned(config: EngineConfig, model: ModelDescription, source: ModelSource) -> EngineBlueprint:
    """Return the plan of an engine for a model that has been read."""
    model = replace(model, spec=model.spec.with_guesses(config.max_drafts))
    if config.guesses_by_model:
        model = with_draft_model(config, model)
    elif config.speculation == MTP:
        model = with_own_layer(model, source.tensors().entries)
    if config.adapter:
        model = with_adapters(config, model)
    if config.score_tokens is not None:
        if model.labels is not None or not model.generates:
            has = "its own labels" if model.labels is not None else "no head, so it scores no tokens"
            raise InvalidConfigError("score_tokens", config.score_tokens, f"none: the model has {has}")
        tokenizer = tokenizer_json(_tokenizer_files(config, model), model.spec.vocab_size)
        model = replace(model, labels=labels_of_tokens(config.score_tokens, tokenizer))
    if model.labels is not None and model.spec.token_types > 1 and not config.skip_tokenizer_init:
        separator = separator_of(tokenizer_json(_tokenizer_files(config, model), model.spec.vocab_size))
        model = replace(model, spec=replace(model.spec, separator=separator))
    if config.pooling == FIRST and not model.spec.attention.bidirectional:
        allowed = "auto, last or mean: the first token of this model reads only itself"
        raise InvalidConfigError("pooling", FIRST, allowed)
    backend, notice = choose_backend(config, model)
    if model.labels is not None and not backend.facts.makes_vectors:
        raise InvalidConfigError("backend", backend.facts.name, "native or reference for a model with labels")
    config = backend.facts.config
    require_host(config, backend.facts.name)
    try:
        plan = plan_memory(config, backend.facts.kv_spec, model.spec.context_length, backend.needs())
    except DoesNotFitError as error:
        error.flags = error.flags or flags_that_fit(config, partial(_require_fit, model))
        raise
    failpoints = tuple(parse_failpoints(os.environ.get(FAILPOINTS_VARIABLE, "")))
    notices = place_notices(config.model, model.source, images=config.mmproj != NO_IMAGES) + model.notices
    notices += _quantization_notices(model, backend.facts) + _dtype_notices(model, backend.facts)
    notices += (notice,) if notice else ()
    notices += step_log_notices(config.step_log) + _disk_notices(config)
    notices += tuple(f"{FAILPOINTS_VARIABLE}: {failpoint} is armed; steps will fail" for failpoint in failpoints)
    vocabulary = _vocabulary(config, model)
    most_forced = 0 if config.speculation == "ngram" else config.max_drafts
    return EngineBlueprint(
        config,
        model,
        backend,
        _report(model, backend.facts, plan, notices),
        grammars=None if vocabulary is None else GrammarVerdicts(vocabulary),
        masks=None if vocabulary is None else MaskService(vocabulary, most_forced=most_forced),
        failpoints=failpoints,
    )


def with_adapters(config: EngineConfig, model: ModelDescription) -> ModelDescription:
    """Return a model with the adapters in the settings; raises `CheckpointError` if one does not fit the model.

    Reads their settings and the headers of their weights.
    """
    adapters, notices = dict[str, Adapter](), list[str]()
    for name, folder in config.adapter_folders.items():
        adapter = adapters[name] = read_adapter(Path(folder), model.spec, config.max_adapter_rank)
        notices.append(f"adapter {name}: rank {adapter.rank}, {len(adapter.matrices)} matrices, from {folder}")
        base = Path(adapter.base).name
        if base and base != Path(config.model).resolve().name:
            notices.append(f"adapter {name} was trained for {adapter.base}")
    return replace(model, adapters=adapters, notices=model.notices + tuple(notices))


def with_draft_model(config: EngineConfig, model: ModelDescription) -> ModelDescription:
    """Return a model with the draft model that `speculation` names; reads no weights.

    Raises `InvalidConfigError` if that draft model does not exist or does not fit.
    """
    name = config.speculation
    try:
        draft = read_model(_model_source(name), images=False)
    except CheckpointError as error:
        allowed = f"{', '.join(SPECULATIONS)}, or a model's folder or name ({error})"
        raise InvalidConfigError("speculation", name, allowed) from error
    if model.spec.attention.bidirectional or draft.spec.attention.bidirectional:
        raise InvalidConfigError("speculation", name, "a model that generates text, to guess for another one that does")
    sizes = [each.spec.vocab_size for each in (model, draft)]
    if not config.skip_tokenizer_init:
        tokenizers = [
            tokenizer_json(files, size)
            for files, size in zip((_tokenizer_files(config, model), draft.source), sizes, strict=True)
        ]
        require_same_tokens(name, tokenizers[0], tokenizers[1], min(sizes))
    elif sizes[0] != sizes[1]:
        raise InvalidConfigError("speculation", name, f"a model with {sizes[0]} tokens, not {sizes[1]}")
    return with_draft(model, draft, name)


def _tokenizer_files(config: EngineConfig, model: ModelDescription) -> ModelFiles:
    return model.source if config.tokenizer is None else _model_source(config.tokenizer)


def _vocabulary(config: EngineConfig, model: ModelDescription) -> Vocabulary | None:
    """Return the model's tokens, for grammars; reads no file before the first grammar."""
    if config.skip_tokenizer_init:
        return None

    def read() -> dict[str, Any]:
        return tokenizer_json(_tokenizer_files(config, model), model.spec.vocab_size)

    eos_token_ids = frozenset(model.eos_token_ids)
    return Vocabulary(read, vocab_size=model.spec.vocab_size, eos_token_ids=eos_token_ids)


def _report(model: ModelDescription, facts: BackendFacts, plan: MemoryPlan, notices: tuple[str, ...]) -> EngineReport:
    config = facts.config
    return EngineReport(
        model=config.model,
        architecture=model.architecture,
        num_layers=len(model.spec.layers),
        backend=facts.name,
        dtype=facts.dtype,
        weights=", ".join(facts.block_types) or config.weights,
        kv_dtype=config.kv_dtype,
        instruction_set=facts.instruction_set,
        num_threads=facts.num_threads,
        block_size=config.block_size,
        context_length=model.spec.context_length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        plan=plan,
        itl_slo_ms=config.itl_slo_ms,
        speculation=config.speculation,
        notices=notices,
        file_format="gguf" if model.source.type else "safetensors",
        weight_type=model.weight_type,
        num_parameters=weight_bytes(model.spec, "float32") // FLOAT32_BYTES,
        recommends_sampling=model.generation.recommends_sampling,
        disk_cache=config.disk_cache or "",
        has_host_cache=bool(config.host_cache),
        labels=() if model.labels is None else model.labels.names,
        reads_images=model.vision is not None and not config.skip_tokenizer_init,
    )


def _quantization_notices(model: ModelDescription, facts: BackendFacts) -> tuple[str, ...]:
    if not model.quantization:
        return ()
    kept = f"kept as {', '.join(facts.block_types)} where that is exact" if facts.block_types else "widened"
    return (f"weights quantised by {model.quantization}: {kept}",)


def _disk_notices(config: EngineConfig) -> tuple[str, ...]:
    if config.disk_cache is None:
        return ()
    return (f"prompts are kept in {config.disk_cache}, readable by this user only and not encrypted",)


def _dtype_notices(model: ModelDescription, facts: BackendFacts) -> tuple[str, ...]:
    if model.dtype == "float16" and facts.dtype == "bfloat16" and facts.config.weights == "auto":
        return ("float16 weights run in bfloat16: the range of float32, 8 bits of precision",)
    return ()


def _model_source(name: str, images: str = NO_IMAGES) -> ModelSource:
    if name != GUIDE or Path(name).is_dir():
        return resolve_model(name, images)
    from quire.guide import GUIDE_FOLDER

    return ModelFolder(GUIDE_FOLDER)


def _make_scheduler(
    facts: BackendFacts,
    model: ModelDescription,
    memory: MemoryConfig,
    config: SchedulerConfig,
    kept: Sequence[KeptBlock] = (),
) -> Scheduler:
    """Return the control plane of an engine; `kept`: the blocks on its disk."""
    limits = _request_limits(facts, model, memory.num_blocks, config)
    if limits.one_step:
        memory = replace(memory, prefix_index="none")
    manager = KVCacheManager(facts.kv_spec, memory, kept=kept)
    return Scheduler(config, manager, limits)


def _request_limits(
    facts: BackendFacts, model: ModelDescription, num_blocks: int, config: SchedulerConfig
) -> RequestLimits:
    chunk, one_step = 1 + config.max_steps_under_way, model.spec.attention.bidirectional
    longest = min(config.max_model_len, model.spec.context_length)
    return RequestLimits(
        vocab_size=model.spec.vocab_size,
        max_model_len=min(longest, config.max_num_batched_tokens) if one_step else longest,
        max_sequence_tokens=max_sequence_tokens(num_blocks, facts.kv_spec, longest_chunk=chunk),
        max_num_seqs=config.max_num_seqs,
        eos_token_ids=tuple(model.eos_token_ids),
        vector_size=model.vector_size if facts.makes_vectors else 0,
        num_labels=0 if model.labels is None else len(model.labels.names),
        generates=model.generates,
        one_step=one_step,
        max_images=0 if model.vision is None else longest // MIN_IMAGE_TOKENS,
    )


def create_reference_engine(
    source: ModelSource,
    *,
    block_size: int = 16,
    memory: MemoryConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    log: BinaryIO | None = None,
) -> EngineCore:
    """Return an engine of token ids over the reference decoder, with a given number of blocks.

    Raises `CheckpointError` for a model that cannot be run, before it allocates memory.
    """
    memory, scheduler = memory or MemoryConfig(), scheduler or SchedulerConfig()
    if not memory.hash_key:
        memory = replace(memory, hash_key=secrets.token_bytes(32))
    model = read_model(source)
    model = replace(model, spec=model.spec.with_guesses(scheduler.max_drafts))
    backend = backend_on("cpu", EngineConfig(backend="reference", block_size=block_size).resolved(), model)
    control = _make_scheduler(backend.facts, model, memory, scheduler)
    worker = Worker(backend.load(memory.num_blocks, memory.num_host_blocks))
    clock = SystemClock()
    return EngineCore(control, worker, clock, log=None if log is None else StepLogWriter(log, clock))
