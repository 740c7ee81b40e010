"""Loads a model for the compiled core: from its description to the parts of a worker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from quire._native import Decoder, Kernels, ThreadTeam, kernel_names, kernels
from quire._native import activation_bytes as step_bytes
from quire.compute.backend import LATENT_KV, DraftParts, GuessLayerParts, WorkerParts
from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.native.decoder import PANEL_WIDTH, NativeDecoder
from quire.compute.native.images import native_encoder
from quire.compute.native.shape import decoder_shape
from quire.compute.sampling.native import NativeSampler
from quire.compute.weights.codes import in_groups
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.weights.weight_file import WeightFile
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.host_layer import HostLayer
from quire.compute.worker.key_centres import BLOCK
from quire.core.errors import InvalidConfigError, InvariantError
from quire.core.executor import NoteLoaded
from quire.core.kv_spec import INT4_GROUP, INT4_VALUES, KV_FORMS, KVCacheSpec
from quire.core.step import MAX_PROMPT_LOGITS

WIDENED: Final = frozenset({"E4M3"})
"""Types of blocks that the core does not multiply."""
KV_DTYPES: Final = ("float32", "bfloat16", "int8", "k8v4", "int4")
MAX_WHOLE_HEAD_DIM: Final = 1024
"""The sum of this many products of a query and an int8 key fits into 32 bits; see attention.cpp."""


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """The settings of the compiled core; `instruction_set` None: QUIRE_ISA, else the best of the machine."""

    dtype: str = "bfloat16"
    weights: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    num_threads: int = 1
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_step_drafts: int = 0
    touch_kv_memory: str = "use"
    instruction_set: str | None = None
    max_prompt_logits: int = MAX_PROMPT_LOGITS
    adapter_rank: int = 0

    @property
    def stored_kv_dtype(self) -> str:
        """The dtype of keys and values: by default that of the weights."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def num_logits(self) -> int:
        """The most rows of logits of a step."""
        return self.max_num_seqs + self.max_step_drafts + self.max_prompt_logits

    def of_draft(self) -> NativeSettings:
        """Return the settings of a draft model, which also reads the newest token of each row."""
        num_tokens = self.max_num_batched_tokens + self.max_num_seqs
        return replace(self, max_num_batched_tokens=num_tokens, max_step_drafts=0, max_prompt_logits=0, adapter_rank=0)


def kernels_for(instruction_set: str | None) -> Kernels:
    """Return the kernels for an instruction set; None: QUIRE_ISA, else the best of the machine."""
    names = kernel_names()
    wanted = instruction_set or os.environ.get("QUIRE_ISA") or names[-1]
    if wanted not in names:
        raise InvalidConfigError("instruction set", wanted, f"one of {', '.join(names)} on this machine")
    return kernels(wanted)


def kv_cache_spec(spec: DecoderSpec, block_size: int, dtype: str) -> KVCacheSpec:
    """Return the native layout of a block: heads are padded to a multiple of 16 numbers, or of 32 with 4-bit values."""
    if block_size % PANEL_WIDTH:
        raise InvalidConfigError("block_size", block_size, f"a multiple of {PANEL_WIDTH}")
    if dtype not in KV_DTYPES:
        raise InvalidConfigError("kv_dtype", dtype, f"one of {', '.join(KV_DTYPES)}")
    kv_spec = spec.kv_cache_spec(block_size, dtype)
    most = max(kv_spec.heads_of(group).head_dim for group in kv_spec.groups)
    if KV_FORMS[dtype][0].scaled and most > MAX_WHOLE_HEAD_DIM:
        heads = f"heads of at most {MAX_WHOLE_HEAD_DIM} numbers, not {most}"
        raise InvalidConfigError("kv_dtype", dtype, f"another one: {dtype} takes {heads}")
    if KV_FORMS[dtype][0].scaled and spec.attention.latent is not None:
        raise InvalidConfigError("kv_dtype", dtype, LATENT_KV)
    return kv_spec.with_padded_heads(INT4_GROUP if dtype in INT4_VALUES else PANEL_WIDTH)


def activation_bytes(spec: DecoderSpec, settings: NativeSettings) -> int:
    """Return the bytes of activations and logits for steps of the settings' size."""
    shape = decoder_shape(
        spec, kv_cache_spec(spec, settings.block_size, settings.stored_kv_dtype), settings.adapter_rank
    )
    logits = settings.num_logits * -(-spec.vocab_size // PANEL_WIDTH) * PANEL_WIDTH * 4
    return logits + step_bytes(shape, settings.max_num_batched_tokens, settings.num_logits, settings.num_threads)


def load_parts(
    model: ModelDescription,
    settings: NativeSettings,
    num_blocks: int,
    num_host_blocks: int = 0,
    note_loaded: NoteLoaded | None = None,
) -> WorkerParts:
    """Return the parts of a worker for a model, and for its draft model if it has one.

    Checks the entire checkpoint before it reads a weight. Then calls `note_loaded` with the progress.
    """
    kv_spec = block_spec(model, settings)
    checkpoint = model.source.tensors()
    touch_threads = settings.num_threads if settings.touch_kv_memory == "start" else 0
    cache = CacheEngine(kv_spec, num_blocks=num_blocks, num_host_blocks=num_host_blocks, touch_threads=touch_threads)
    parts = make_parts(model.spec, checkpoint, settings, cache, model=model, note_loaded=note_loaded)
    return replace(parts, eos_token_ids=frozenset(model.eos_token_ids))


def block_spec(model: ModelDescription, settings: NativeSettings) -> KVCacheSpec:
    """Return the layout of a block, with the layers of the draft model if there is one."""
    spec = kv_cache_spec(model.spec, settings.block_size, settings.stored_kv_dtype)
    if model.draft is None:
        return spec
    return spec.with_draft(kv_cache_spec(model.draft.spec, settings.block_size, settings.stored_kv_dtype))


def make_parts(
    spec: DecoderSpec,
    checkpoint: WeightFile,
    settings: NativeSettings,
    cache: CacheEngine,
    *,
    model: ModelDescription | None = None,
    note_loaded: NoteLoaded | None = None,
) -> WorkerParts:
    """Return the parts of a worker for a spec and its checkpoint, with KV memory of `block_spec`.

    `model`: the description with the spec, for its draft model and its encoder of images; None: it has neither.
    """
    draft, vision = (None, None) if model is None else (model.draft, model.vision)
    chosen = kernels_for(settings.instruction_set)
    team = _thread_team(settings.num_threads)
    weights, kept = in_groups(settings.weights), kept_blocks(checkpoint.block_types)
    reader = WeightReader(spec, checkpoint, settings.dtype, weights, note_loaded, block_types=kept)
    decoder = Decoder(decoder_shape(spec, cache.spec, settings.adapter_rank), chosen, team)
    runner = _runner(spec, reader, decoder, settings, cache.spec.dtype)
    sampler = NativeSampler(chosen, team, spec.vocab_size)
    has_layer = draft is not None and draft.spec.joins_states
    touches = settings.touch_kv_memory == "idle"
    return WorkerParts(
        runner,
        cache,
        sampler,
        draft=None if draft is None or has_layer else _draft_parts(draft, settings, cache, spec.vocab_size, team),
        layer=_layer_parts(draft, settings, cache, runner, sampler, team) if draft is not None and has_layer else None,
        on_start=partial(runner.prepare_memory, cache, touches),
        adapters=runner,
        has_adapter=runner.has_adapter,
        image_encoder=None
        if vision is None
        else native_encoder(vision, checkpoint, settings.dtype, kept, chosen, team),
    )


def kept_blocks(block_types: Mapping[str, str]) -> dict[str, str]:
    """Return the types of a checkpoint's matrices that stay blocks, by name. Does not mutate."""
    return {name: kind for name, kind in block_types.items() if kind not in WIDENED}


def _runner(
    spec: DecoderSpec, reader: WeightReader, decoder: Decoder, settings: NativeSettings, kv_dtype: str
) -> NativeDecoder:
    """Return a decoder with its weights, and memory for steps of the settings' size."""
    runner = NativeDecoder(spec, decoder, reader)
    if kv_dtype == "int4":
        runner.centre_keys(kv_cache_spec(spec, BLOCK, "float32"))
    decoder.reserve(settings.max_num_batched_tokens, settings.num_logits)
    return runner


def _draft_parts(
    model: ModelDescription, settings: NativeSettings, cache: CacheEngine, vocab_size: int, team: ThreadTeam
) -> DraftParts:
    """Return the parts of the draft model, for a model with this vocabulary size."""
    if cache.draft is None:
        raise InvariantError("the KV memory has no room for the draft model")
    chosen, settings, cache = kernels_for(settings.instruction_set), settings.of_draft(), cache.draft
    spec, weights = model.spec, in_groups(settings.weights)
    tensors = model.source.tensors()
    reader = WeightReader(spec, tensors, settings.dtype, weights, block_types=kept_blocks(tensors.block_types))
    decoder = Decoder(decoder_shape(spec, cache.spec), chosen, team)
    runner = _runner(spec, reader, decoder, settings, cache.spec.dtype)
    sampler = NativeSampler(chosen, team, min(vocab_size, spec.vocab_size))
    return DraftParts(runner, cache, sampler, spec.context_length, settings.max_num_batched_tokens)


def _layer_parts(
    model: ModelDescription,
    settings: NativeSettings,
    cache: CacheEngine,
    ends: NativeDecoder,
    sampler: NativeSampler,
    team: ThreadTeam,
) -> GuessLayerParts:
    """Return the parts of a model's own layer that guesses; `ends`: the model."""
    if cache.draft is None:
        raise InvariantError("the KV memory has no room for the layer that guesses")
    spec, settings, tensors = model.spec, settings.of_draft(), model.source.tensors()
    weights, kept = in_groups(settings.weights), kept_blocks(tensors.block_types)
    reader = WeightReader(spec, tensors, settings.dtype, weights, block_types=kept)
    decoder = Decoder(decoder_shape(spec, cache.draft.spec), kernels_for(settings.instruction_set), team)
    runner = NativeDecoder(spec, decoder, reader)
    decoder.reserve(settings.max_num_batched_tokens, 0)
    return GuessLayerParts(HostLayer(runner, cache.draft, ends), sampler, spec.context_length)


def _thread_team(num_threads: int) -> ThreadTeam:
    try:
        return ThreadTeam(num_threads)
    except RuntimeError as error:
        raise InvalidConfigError("num_threads", num_threads, "as many as the system lets this process start") from error
