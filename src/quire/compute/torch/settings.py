"""What the GPU engine is told, and what it will need: known without torch, so that a plan can be made anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.torch.device import DeviceNeeds
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import KVCacheSpec
from quire.core.step import MAX_PROMPT_LOGITS

BLOCK_SIZES: Final = (16, 32, 64, 128)
DTYPES: Final = ("bfloat16", "float16", "float32")
KV_DTYPES: Final = ("bfloat16", "float16", "float32", "int8", "fp8")
MAX_HEAD_DIM: Final = 256
HEAD_DIM_STEP: Final = 8
"""Heads of so many numbers, or a multiple, are loaded 16 bytes at a time."""


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """How torch runs a model; `device` is "cpu" or "cuda", `num_threads` those of a CPU, 0: torch's own choice.

    `graphs`: on a GPU, decodes are recorded at the start and replayed.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    weights: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    batch_invariant: bool = False
    num_threads: int = 0
    graphs: bool = True

    @property
    def stored_kv_dtype(self) -> str:
        """The numbers of keys and values: those of the weights, where nothing else was said."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype


def kv_cache_spec(spec: DecoderSpec, settings: TorchSettings) -> KVCacheSpec:
    """Return what a block holds; raises `InvalidConfigError` for what is not computed with or not stored."""
    if settings.dtype not in DTYPES:
        raise InvalidConfigError("dtype", settings.dtype, f"one of {', '.join(DTYPES)}")
    if settings.block_size not in BLOCK_SIZES:
        raise InvalidConfigError("block_size", settings.block_size, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    if settings.stored_kv_dtype not in KV_DTYPES:
        raise InvalidConfigError("kv_dtype", settings.kv_dtype, f"one of {', '.join(KV_DTYPES)}")
    return spec.kv_cache_spec(settings.block_size, settings.stored_kv_dtype)


def device_needs(spec: DecoderSpec, num_bytes: int) -> DeviceNeeds:
    """Return what an engine of a model, which takes so many bytes beside its KV blocks, asks of a GPU."""
    return DeviceNeeds(spec.attention.head_dim, MAX_HEAD_DIM, HEAD_DIM_STEP, num_bytes)


def activation_bytes(spec: DecoderSpec, settings: TorchSettings) -> int:
    """Return the bytes of activations and logits that steps of the settings' size take; by a formula, an upper bound.

    A layer holds its input, its output and what lies between at once, in float32 where numbers are made exact. Of
    int8 weights one matrix at a time, the head at the largest, is widened.
    """
    attention, mlp = spec.attention, spec.mlp
    heads = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    per_token = 6 * spec.hidden_size + 3 * heads + 3 * mlp.intermediate_size * (2 if mlp.gated else 1)
    num_logits = settings.max_num_seqs + MAX_PROMPT_LOGITS
    widened = 2 * spec.vocab_size * spec.hidden_size if settings.weights == "int8" else 0
    return widened + 4 * (settings.max_num_batched_tokens * per_token + 3 * num_logits * spec.vocab_size)
