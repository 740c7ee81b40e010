"""The reference engine as a backend: a model in numpy, slow and simple. All other engines are compared with it."""

from __future__ import annotations

from dataclasses import dataclass

from quire.compute.backend import LATENT_KV, BackendFacts, WorkerParts, adapter_bytes, needs_on_host
from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.models.guess_layer import joined_row_bytes
from quire.compute.models.vision.spec import VisionSpec
from quire.compute.reference.images import reference_memory
from quire.compute.reference.load import block_spec, load_parts
from quire.compute.vision.encoder import rows_bytes
from quire.compute.vision.weights import vision_bytes
from quire.compute.weights.codes import in_groups
from quire.compute.weights.decoder_weights import weight_bytes
from quire.compute.weights.int4 import KV_ROUNDINGS
from quire.core.config import ResolvedConfig
from quire.core.errors import InvalidConfigError
from quire.core.executor import NoteLoaded
from quire.core.memory_needs import MemoryNeeds
from quire.core.step import MAX_PROMPT_LOGITS


@dataclass(frozen=True, slots=True)
class ReferenceBackend:
    """Implements `Backend` with the reference decoder."""

    facts: BackendFacts
    model: ModelDescription

    @classmethod
    def of(cls, config: ResolvedConfig, model: ModelDescription) -> ReferenceBackend:
        """Return the backend for a model; raises `InvalidConfigError` for settings that it does not support."""
        if config.dtype not in ("auto", "float32"):
            raise InvalidConfigError("dtype", config.dtype, "float32 or auto: the reference backend supports no other")
        if config.touch_kv_memory == "start":
            raise InvalidConfigError(
                "touch_kv_memory", "start", "idle or use: the reference backend takes memory as it fills it"
            )
        if config.kv_dtype not in ("auto", "float32", *KV_ROUNDINGS):
            allowed = f"one of auto, float32, {', '.join(KV_ROUNDINGS)}: the reference backend supports no other"
            raise InvalidConfigError("kv_dtype", config.kv_dtype, allowed)
        specs = [each.spec for each in (model, model.draft) if each is not None]
        if config.kv_dtype in KV_ROUNDINGS and any(spec.attention.latent is not None for spec in specs):
            raise InvalidConfigError("kv_dtype", config.kv_dtype, LATENT_KV)
        facts = BackendFacts(
            name="reference",
            device="cpu",
            config=config,
            dtype="float32",
            weights=in_groups(config.weights),
            instruction_set="numpy",
            num_threads=1,
            kv_spec=block_spec(model, config.block_size),
            weight_bytes=sum(weight_bytes(spec, weights=in_groups(config.weights)) for spec in specs)
            + model.scorer_bytes
            + (0 if model.vision is None else vision_bytes(model.vision, "float32")),
            activation_bytes=sum(_activation_bytes(spec, config) for spec in specs)
            + (0 if model.vision is None else _image_bytes(model.vision, model.spec)),
            makes_vectors=True,
            adapter_bytes=adapter_bytes(model, config, "float32"),
        )
        return cls(facts, model)

    def needs(self) -> MemoryNeeds:
        """Return the memory that the engine is expected to use."""
        return needs_on_host(self.facts)

    def measured(self, note_loaded: NoteLoaded | None = None) -> MemoryNeeds | None:
        """Return None: this engine takes exactly the memory that `needs` expects."""
        return None

    def load(self, num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> WorkerParts:
        """Load the weights and return the parts of a worker."""
        config = self.facts.config
        return load_parts(
            self.model,
            block_size=config.block_size,
            num_blocks=num_blocks,
            num_host_blocks=num_host_blocks,
            weights=config.weights,
            kv_dtype=config.kv_dtype,
        )


def _activation_bytes(spec: DecoderSpec, config: ResolvedConfig) -> int:
    """Return the bytes of activations and logits for steps of the settings' size."""
    heads = spec.attention.num_heads * max(spec.attention_of(layer).head_dim for layer in spec.layers)
    inputs = 0 if spec.layer_inputs is None else 2 * spec.layer_inputs.size * len(spec.layers)
    per_token = 6 * spec.hidden_size + 3 * spec.most_intermediate + 4 * heads + inputs + joined_row_bytes(spec) // 4
    num_logits = config.max_num_seqs + MAX_PROMPT_LOGITS
    return 4 * (config.max_num_batched_tokens * per_token + 2 * num_logits * spec.vocab_size)


def _image_bytes(vision: VisionSpec, text: DecoderSpec) -> int:
    """Return about the bytes for encoding an image, and for the rows of encoded ones."""
    return reference_memory(vision) + rows_bytes(vision, text)
