"""The native engine as a backend: the compiled core, on this machine's CPU."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quire.compute.backend import BackendFacts, WorkerParts, adapter_bytes, needs_on_host
from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.models.distances import num_distances
from quire.compute.models.guess_layer import joined_row_bytes
from quire.compute.models.parts import Part
from quire.compute.models.vision.spec import VisionSpec
from quire.compute.native.images import native_memory
from quire.compute.native.load import (
    NativeSettings,
    activation_bytes,
    block_spec,
    kept_blocks,
    kernels_for,
    load_parts,
)
from quire.compute.vision.encoder import rows_bytes
from quire.compute.vision.weights import vision_bytes
from quire.compute.weights.codes import coded_row_bytes, in_groups
from quire.compute.weights.decoder_weights import NUMBER_BYTES, kept_type, weight_bytes
from quire.core.config import ResolvedConfig
from quire.core.errors import CheckpointError, InvalidConfigError
from quire.core.executor import NoteLoaded
from quire.core.granted import usable_cores
from quire.core.memory_needs import MemoryNeeds
from quire.core.step import MAX_STEP_DRAFTS

STORED: Final = MappingProxyType({"float32": "F32", "bfloat16": "BF16"})
"""A dtype of matrices → the format of a checkpoint's numbers that are mapped for it, not copied."""


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """Implements `Backend` with the compiled core."""

    facts: BackendFacts
    model: ModelDescription
    settings: NativeSettings

    @classmethod
    def of(cls, config: ResolvedConfig, model: ModelDescription) -> NativeBackend:
        """Return the backend for a model; raises `InvalidConfigError` for settings that it does not support."""
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
            max_step_drafts=MAX_STEP_DRAFTS if config.max_drafts else 0,
            touch_kv_memory=config.touch_kv_memory,
            adapter_rank=max(
                [adapter.rank for adapter in model.adapters.values()]
                + [config.max_adapter_rank if config.adapter_memory is not None else 0]
            ),
        )
        block_types = _block_types(model, config)
        models = [model] if model.draft is None else [model, model.draft]
        facts = BackendFacts(
            name="native",
            device="cpu",
            config=config,
            dtype=dtype,
            weights=in_groups(config.weights),
            instruction_set=kernels_for(None).name,
            num_threads=settings.num_threads,
            kv_spec=block_spec(model, settings),
            weight_bytes=sum(_weight_bytes(each, dtype, config) for each in models)
            + model.scorer_bytes
            + (0 if model.vision is None else vision_bytes(model.vision, dtype, _kept(model), compact=_has_compact())),
            activation_bytes=activation_bytes(model.spec, settings)
            + sum(activation_bytes(each.spec, settings.of_draft()) for each in models[1:])
            + sum(joined_row_bytes(each.spec) * config.max_num_batched_tokens for each in models[1:])
            + (0 if model.vision is None else _image_bytes(model.vision, model.spec, settings)),
            block_types=tuple(sorted(set(block_types.values()))),
            compact=_has_compact() and dtype == "bfloat16",
            makes_vectors=True,
            adapter_bytes=adapter_bytes(model, config, dtype),
        )
        return cls(facts, model, settings)

    def needs(self) -> MemoryNeeds:
        """Return the memory that the engine is expected to use."""
        return needs_on_host(self.facts)

    def measured(self, note_loaded: NoteLoaded | None = None) -> MemoryNeeds | None:
        """Return None: this engine takes exactly the memory that `needs` expects."""
        return None

    def load(self, num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> WorkerParts:
        """Load the weights and return the parts of a worker."""
        return load_parts(self.model, self.settings, num_blocks, num_host_blocks, note_loaded)


def _block_types(model: ModelDescription, config: ResolvedConfig) -> Mapping[str, str]:
    """Return the types of the matrices that keep their stored form, by name."""
    return _kept(model) if config.weights == "auto" else {}


def _kept(model: ModelDescription) -> Mapping[str, str]:
    return kept_blocks(model.source.block_types())


def _weight_bytes(model: ModelDescription, dtype: str, config: ResolvedConfig) -> int:
    """Return the bytes of the weights in memory."""
    block_types = _block_types(model, config)
    num_bytes = weight_bytes(model.spec, dtype, in_groups(config.weights), block_types, compact=_has_compact())
    return num_bytes - _table_bytes(model, dtype, block_types) + _bias_bytes(model.spec)


def _has_compact() -> bool:
    return kernels_for(None).has_compact


def _bias_bytes(spec: DecoderSpec) -> int:
    """Return the bytes of the biases of all distances beyond those of the table that they come from."""
    shape = spec.model_parts().get(Part.DISTANCE_BIAS)
    if shape is None:
        return 0
    num_buckets, num_heads = shape.weight
    return num_heads * (num_distances(spec.context_length) - num_buckets) * NUMBER_BYTES["float32"]


def _table_bytes(model: ModelDescription, dtype: str, block_types: Mapping[str, str]) -> int:
    """Return the bytes of the table of layer inputs, if the core leaves it in the file: a step reads a few of its rows.

    The system loads the pages of these rows, and may drop them again.
    """
    shape = model.spec.model_parts().get(Part.LAYER_EMBEDDING)
    if shape is None:
        return 0
    num_rows, size = shape.weight
    if kind := kept_type(model.spec, Part.LAYER_EMBEDDING, shape, block_types, 0):
        return num_rows * coded_row_bytes(kind, size)
    name = f"{model.spec.sources[Part.LAYER_EMBEDDING].stem}.weight"
    is_mapped = _stored_dtype(model, name) == STORED[dtype]
    return num_rows * size * NUMBER_BYTES[dtype] if is_mapped else 0


def _stored_dtype(model: ModelDescription, name: str) -> str:
    """Return the format of a tensor's numbers; that of the model if the tensors are missing or broken."""
    with suppress(CheckpointError):  # loading reports the error
        entries = model.source.tensors().entries
        if name in entries:
            return entries[name].dtype
    return STORED.get(model.dtype, "")


def _image_bytes(vision: VisionSpec, text: DecoderSpec, settings: NativeSettings) -> int:
    """Return the bytes for encoding an image, and for the rows of encoded ones."""
    return native_memory(vision, settings.dtype, settings.num_threads) + rows_bytes(vision, text)
