"""The settings and needs of the GPU engine, computed without torch, so that any machine can plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Final

from quire.compute.adapters.room import AdapterRoom
from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.models.vision.spec import VisionSpec
from quire.compute.torch.device import DeviceNeeds
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import INT4_VALUES, KV_FORMS, KVCacheSpec
from quire.core.step import MAX_PROMPT_LOGITS

BLOCK_SIZES: Final = (16, 32, 64, 128)
DTYPES: Final = ("bfloat16", "float16", "float32")
KV_DTYPES: Final = ("bfloat16", "float16", "float32", "int8", "fp8", "k8v4", "int4")
LAUNCH_S: Final = 0.008
"""Seconds of a CPU to launch a step kernel by kernel (benchmarks/RESULTS.md, GPU: what a step costs the processor)."""
PROCESSOR_RATE: Final = 3e12
"""Multiplications and additions per second of one multiprocessor in the products of a step, approximately."""
MOST_NUMBERS: Final = 1 << 31
"""The most numbers of the queries of a step: attention has their places as int32."""
MAX_HEAD_DIM: Final = 512
HEAD_DIM_STEP: Final = 8
"""Heads whose size is a multiple of this are loaded 16 bytes at a time."""
FLASHINFER_HEAD_DIMS: Final = (64, 128, 256)
FLASHINFER_SCRATCH_BYTES: Final = 512 << 20
"""FlashInfer's memory for the parts of split attention: two tiles per multiprocessor, which version 0.6 widens by the
heads of a group. This is enough for groups of 16."""


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """How torch runs a model; `device` is "cpu" or "cuda"; `num_threads` is for a CPU, 0: torch's own choice.

    `graphs`: on a GPU, record steps at the start and replay them. `attention`: "triton", "flashinfer", "plain" or
    "auto", which is triton on a GPU and plain elsewhere. `tensor_parallel`: ranks that compute together; each reads the
    model for `max_model_len` tokens, as it was planned. `tensor_parallel_sums`: "gather" or "reduce".
    `adapter_room`: the slots for adapters; None: no slots. `reads_images`: steps can have rows of images.
    """

    device: str = "cuda"
    dtype: str = "bfloat16"
    weights: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    max_step_drafts: int = 0
    max_prompt_logits: int = MAX_PROMPT_LOGITS
    attention: str = "auto"
    batch_invariant: bool = False
    num_threads: int = 0
    graphs: bool = True
    tensor_parallel: int = 1
    tensor_parallel_sums: str = "gather"
    max_model_len: int | None = None
    adapter_room: AdapterRoom | None = None
    reads_images: bool = False

    @property
    def stored_kv_dtype(self) -> str:
        """The dtype of keys and values: by default that of the weights."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def num_logits(self) -> int:
        """The most rows of logits of a step."""
        return self.max_num_seqs + self.max_step_drafts + self.max_prompt_logits

    def of_draft(self) -> TorchSettings:
        """Return the settings of a draft model, which reports no prompts, has no adapters, and reads texts only."""
        return replace(self, max_prompt_logits=0, adapter_room=None, reads_images=False)


def block_spec(model: ModelDescription, settings: TorchSettings) -> KVCacheSpec:
    """Return the content of a block, with the layers of the draft model if there is one."""
    spec = kv_cache_spec(model.spec, settings)
    return spec if model.draft is None else spec.with_draft(kv_cache_spec(model.draft.spec, settings))


def kv_cache_spec(spec: DecoderSpec, settings: TorchSettings) -> KVCacheSpec:
    """Return the content of a block; raises `InvalidConfigError` for settings that are not supported."""
    if settings.dtype not in DTYPES:
        raise InvalidConfigError("dtype", settings.dtype, f"one of {', '.join(DTYPES)}")
    if settings.block_size not in BLOCK_SIZES:
        raise InvalidConfigError("block_size", settings.block_size, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    if settings.stored_kv_dtype not in KV_DTYPES:
        raise InvalidConfigError("kv_dtype", settings.kv_dtype, f"one of {', '.join(KV_DTYPES)}")
    odd = next((head_dim for head_dim in head_dims(spec) if head_dim % 2), None)
    if settings.kv_dtype in INT4_VALUES and odd is not None:
        heads = f"heads of an even size, not {odd}"
        raise InvalidConfigError("kv_dtype", settings.kv_dtype, f"another dtype: {settings.kv_dtype} needs {heads}")
    most_tokens = MOST_NUMBERS // (spec.attention.num_heads * head_dims(spec)[-1])
    if settings.device == "cuda" and settings.max_num_batched_tokens > most_tokens:
        allowed = f"at most {most_tokens} on a GPU: its kernels number the queries of a step with 32 bits"
        raise InvalidConfigError("max_num_batched_tokens", settings.max_num_batched_tokens, allowed)
    _check_attention(spec, settings)
    return spec.kv_cache_spec(settings.block_size, settings.stored_kv_dtype)


def _check_attention(spec: DecoderSpec, settings: TorchSettings) -> None:
    """Raise `InvalidConfigError` for settings that the chosen attention does not support."""
    if settings.attention in ("triton", "flashinfer") and settings.device != "cuda":
        raise InvalidConfigError("attention_backend", settings.attention, "plain or auto: the others need a GPU")
    if settings.attention != "flashinfer":
        return
    kv_dtype, heads = settings.stored_kv_dtype, ", ".join(map(str, FLASHINFER_HEAD_DIMS))
    unknown = next((head_dim for head_dim in head_dims(spec) if head_dim not in FLASHINFER_HEAD_DIMS), None)
    obstacles = {
        f"supports heads of {heads} numbers, and the model's have {unknown}": unknown is not None,
        "is not used with attention sinks, which the model has": spec.attention.sinks,
        "is not used with attention in chunks, which the model has": spec.attention.chunked,
        "does not compute in float32": settings.dtype == "float32",
        f"supports no scale for each token and head, which {kv_dtype} has": KV_FORMS[kv_dtype][0].scaled,
        f"is not used with {kv_dtype} KV memory and {settings.dtype} activations": kv_dtype != settings.dtype,
        "splits contexts depending on the batch, and batch_invariant is on": settings.batch_invariant,
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise InvalidConfigError("attention_backend", "flashinfer", f"triton or auto: FlashInfer {obstacle}")


def device_needs(spec: DecoderSpec, num_bytes: int) -> DeviceNeeds:
    """Return the GPU requirements of a model's engine that needs this many bytes in addition to its KV blocks."""
    return DeviceNeeds(head_dims(spec), MAX_HEAD_DIM, HEAD_DIM_STEP, num_bytes)


def head_dims(spec: DecoderSpec) -> tuple[int, ...]:
    """Return the sizes of heads in a model, in ascending order."""
    return tuple(sorted({spec.attention_of(layer).head_dim for layer in spec.layers}))


def most_recorded(spec: DecoderSpec, settings: TorchSettings, num_processors: int) -> int:
    """Return the most tokens of a recorded step with prompts: as many as a GPU computes during the launch of a step.

    A larger step hides its launches, and runs without padding to a recorded size.

    >>> from quire.cli.model_shapes import find_settings
    >>> from quire.compute.models import read_model
    >>> settings = TorchSettings(max_num_batched_tokens=8192)
    >>> [most_recorded(read_model(find_settings(name)).spec, settings, 132) for name in ("qwen3-0.6b", "llama-3.1-8b")]
    [3596, 226]
    """
    numbers = 0
    for layer in spec.layers:
        numbers += sum(prod(part.weight) for part in spec.layer_parts(layer).values())
        if spec.experts is not None and layer.sparse:
            each = sum(prod(part.weight) for part in spec.expert_parts().values())
            numbers += spec.experts.experts_per_token * each
    seconds = 2 * numbers / (num_processors * PROCESSOR_RATE)
    return min(settings.max_num_batched_tokens, int(LAUNCH_S / seconds))


def activation_bytes(spec: DecoderSpec, settings: TorchSettings) -> int:
    """Return an upper bound, by formula, for the bytes of activations and logits in steps of the settings' size.

    A layer holds its input, its output and all intermediate numbers at once, some of them in float32. With int8
    weights, one matrix at a time is widened; the head is the largest.
    """
    each = [spec.attention_of(layer) for layer in spec.layers]
    heads = max((one.num_heads + 2 * one.num_kv_heads) * one.head_dim for one in each)
    width = 2 if spec.mlp.gated else 1
    between = 3 * spec.most_intermediate * width
    if spec.experts is not None:
        between_experts = 3 * spec.experts.intermediate_size * width + 2 * spec.hidden_size
        between = max(between, spec.experts.experts_per_token * between_experts)
    inputs = 0 if spec.layer_inputs is None else spec.layer_inputs.size * len(spec.layers)
    # The inputs of all layers are kept, and made from five times as many numbers before the first layer.
    per_token = max(6 * spec.hidden_size + 3 * heads + between + inputs, spec.hidden_size + 5 * inputs)
    if settings.reads_images:
        per_token += (1 + spec.deep_rows) * spec.hidden_size
    widened = 2 * spec.vocab_size * spec.hidden_size if settings.weights == "int8" else 0
    scratch = FLASHINFER_SCRATCH_BYTES if settings.attention == "flashinfer" else 0
    return (
        scratch
        + widened
        + 4 * (settings.max_num_batched_tokens * per_token + 3 * settings.num_logits * spec.vocab_size)
        + 4 * settings.max_num_seqs * spec.vocab_size  # counts of the tokens of texts
    )


def image_bytes(vision: VisionSpec, settings: TorchSettings) -> int:
    """Return about the bytes that the largest image takes while it is encoded, without the weights.

    Most numbers of a layer are there in the dtype of its rows and in float32.
    """
    tower, rows = vision.tower, vision.patches.max_rows
    heads = tower.attention.num_heads * tower.attention.head_dim
    width = 2 if tower.mlp.gated else 1
    of_layer = 8 * tower.hidden_size + 12 * heads + 4 * tower.mlp.intermediate_size * width
    of_products = (count * (each.num_inputs + 3 * each.num_outputs) for each, count in vision.products())
    return 4 * max(rows * of_layer, *of_products) + rows * 2 * heads * (4 if settings.dtype == "float32" else 2)
