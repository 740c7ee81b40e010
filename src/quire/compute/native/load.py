"""Loads a model for the compiled core: from its description to the parts of a worker."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from quire._native import Decoder, Kernels, ThreadTeam, kernel_names, kernels
from quire._native import activation_bytes as step_bytes
from quire.compute.backend import WorkerParts
from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.native.decoder import PANEL_WIDTH, NativeDecoder
from quire.compute.native.shape import decoder_shape
from quire.compute.sampling.native import NativeSampler
from quire.compute.weights.codes import in_groups
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.weights.weight_file import WeightFile
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.key_centres import BLOCK
from quire.core.errors import InvalidConfigError
from quire.core.executor import NoteLoaded
from quire.core.kv_spec import INT4_GROUP, INT4_VALUES, KV_FORMS, KVCacheSpec
from quire.core.step import MAX_PROMPT_LOGITS

BLOCK_SIZES: Final = (16, 32, 64, 128)
KV_DTYPES: Final = ("float32", "bfloat16", "int8", "k8v4", "int4")
MAX_WHOLE_HEAD_DIM: Final = 1024
"""The sum of this many products of a query and an int8 key fits into 32 bits; see attention.cpp."""


@dataclass(frozen=True, slots=True)
class NativeSettings:
    """How the compiled core runs a model; `instruction_set` None: QUIRE_ISA, else the best of the machine."""

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

    @property
    def stored_kv_dtype(self) -> str:
        """The dtype of keys and values: by default that of the weights."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype


def kernels_for(instruction_set: str | None) -> Kernels:
    """Return the kernels of an instruction set; None: that of QUIRE_ISA, else the best of the machine."""
    names = kernel_names()
    wanted = instruction_set or os.environ.get("QUIRE_ISA") or names[-1]
    if wanted not in names:
        raise InvalidConfigError("instruction set", wanted, f"one of {', '.join(names)} on this machine")
    return kernels(wanted)


def kv_cache_spec(spec: DecoderSpec, block_size: int, dtype: str) -> KVCacheSpec:
    """Return the native layout of a block: heads are padded to a multiple of 16 numbers, or of 32 with 4-bit values."""
    if block_size not in BLOCK_SIZES:
        raise InvalidConfigError("block_size", block_size, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    if dtype not in KV_DTYPES:
        raise InvalidConfigError("kv_dtype", dtype, f"one of {', '.join(KV_DTYPES)}")
    if KV_FORMS[dtype][0].scaled and spec.attention.head_dim > MAX_WHOLE_HEAD_DIM:
        heads = f"heads of at most {MAX_WHOLE_HEAD_DIM} numbers, not {spec.attention.head_dim}"
        raise InvalidConfigError("kv_dtype", dtype, f"another one: {dtype} takes {heads}")
    step = INT4_GROUP if dtype in INT4_VALUES else PANEL_WIDTH
    head_dim = -(-spec.attention.head_dim // step) * step
    return replace(spec.kv_cache_spec(block_size, dtype), head_dim=head_dim)


def activation_bytes(spec: DecoderSpec, settings: NativeSettings) -> int:
    """Return the bytes of activations and logits that steps of the settings' size take."""
    shape = decoder_shape(spec, kv_cache_spec(spec, settings.block_size, settings.stored_kv_dtype))
    num_logits = settings.max_num_seqs + settings.max_step_drafts + MAX_PROMPT_LOGITS
    logits = num_logits * -(-spec.vocab_size // PANEL_WIDTH) * PANEL_WIDTH * 4
    return logits + step_bytes(shape, settings.max_num_batched_tokens, num_logits, settings.num_threads)


def load_parts(
    model: ModelDescription,
    settings: NativeSettings,
    num_blocks: int,
    num_host_blocks: int = 0,
    note_loaded: NoteLoaded | None = None,
) -> WorkerParts:
    """Return the parts of a worker for a model.

    Checks the whole checkpoint before it reads a weight. Then calls `note_loaded` with the progress.
    """
    kv_spec = kv_cache_spec(model.spec, settings.block_size, settings.stored_kv_dtype)
    checkpoint = model.source.tensors()
    touch_threads = settings.num_threads if settings.touch_kv_memory == "start" else 0
    cache = CacheEngine(kv_spec, num_blocks=num_blocks, num_host_blocks=num_host_blocks, touch_threads=touch_threads)
    eos_token_ids = frozenset(model.eos_token_ids)
    return make_parts(model.spec, checkpoint, settings, cache, eos_token_ids=eos_token_ids, note_loaded=note_loaded)


def make_parts(
    spec: DecoderSpec,
    checkpoint: WeightFile,
    settings: NativeSettings,
    cache: CacheEngine,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
    note_loaded: NoteLoaded | None = None,
) -> WorkerParts:
    """Return the parts of a worker for a spec and its checkpoint, with KV memory of `kv_cache_spec`."""
    chosen = kernels_for(settings.instruction_set)
    team = _thread_team(settings.num_threads)
    decoder = Decoder(decoder_shape(spec, cache.spec), chosen, team)
    reader = WeightReader(spec, checkpoint, settings.dtype, in_groups(settings.weights), note_loaded, keeps_blocks=True)
    runner = NativeDecoder(spec, decoder, reader)
    if cache.spec.dtype == "int4":
        runner.centre_keys(kv_cache_spec(spec, BLOCK, "float32"))
    num_logits = settings.max_num_seqs + settings.max_step_drafts + MAX_PROMPT_LOGITS
    decoder.reserve(settings.max_num_batched_tokens, num_logits)
    sampler = NativeSampler(chosen, team, spec.vocab_size)
    touches = settings.touch_kv_memory == "idle"
    return WorkerParts(
        runner, cache, sampler, eos_token_ids=eos_token_ids, on_start=partial(runner.prepare_memory, cache, touches)
    )


def _thread_team(num_threads: int) -> ThreadTeam:
    try:
        return ThreadTeam(num_threads)
    except RuntimeError as error:
        raise InvalidConfigError("num_threads", num_threads, "as many as the system lets this process start") from error
