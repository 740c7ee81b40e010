"""The image encoders of Pixtral, Mistral Small 3 and Ministral 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from quire.compute.gguf.header import GgufTensor
from quire.compute.gguf.named_settings import Settings
from quire.compute.gguf.row_orders import Order
from quire.compute.gguf.tensors import GgufEntry
from quire.compute.gguf.vision.kind import BICUBIC, NEXT_TO_IMAGES, EncoderFile, Kind, Object, OwnEncoder, plain

MERGER: Final = "mm.patch_merger.weight"
MERGERS: Final = (MERGER, "mm.patch_merger.merging_layer.weight")
"""The matrix that joins patches, as llama.cpp and Ollama name it."""

ROPE_BASE: Final = "clip.rope.freq_base"


def _config(file: EncoderFile) -> Object:
    is_silu = file.settings.file.flag("clip.use_silu", False)
    base = file.settings.file.number(ROPE_BASE, 10_000.0)
    eye = file.tower("silu" if is_silu else "gelu") | {"model_type": "pixtral", "rope_theta": base}
    config: Object = {"image_token_index": file.token_id, "vision_config": eye, "vision_feature_layer": -1}
    if file.tensors.keys().isdisjoint(MERGERS):
        return config | {"vision_feature_select_strategy": "full"}
    return config | {"spatial_merge_size": file.size("spatial_merge_size", 2)}


def _processor(file: EncoderFile) -> Object:
    patch = file.size("patch_size")
    return file.pixels() | {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": patch, "width": patch},
        "resample": BICUBIC,
        "size": {"longest_edge": file.size("image_size")},
        "spatial_merge_size": 1 if file.tensors.keys().isdisjoint(MERGERS) else file.size("spatial_merge_size", 2),
    }


def _text(text: Object, file: EncoderFile, header: Mapping[str, object]) -> Object:
    """Return the settings of a text model: those of Mistral Small 3 are Mistral's, also in files as of Ministral 3."""
    return text | {"model_type": "mistral"} if text["architectures"] == ["MistralForCausalLM"] else text


def _entry(file: EncoderFile, part: str, tensor: GgufTensor) -> GgufEntry:
    """Return a tensor; the rows of queries and keys are interleaved, as in a text model of Mistral."""
    order = Order(file.size("attention.head_count"))
    is_turned = part in ("attn_k", "attn_q") and tensor.shape[0] % (2 * order.heads) == 0
    return GgufEntry(tensor, order=order if is_turned else None)


PIXTRAL: Final = Kind(
    family="Mistral3ForConditionalGeneration",
    texts={"llama": "mistral", "mistral3": "ministral3"},
    text_names=NEXT_TO_IMAGES,
    tower="vision_tower.",
    layers="transformer.layers.",
    in_tower={"v.patch_embd": "patch_conv", "v.pre_ln": "ln_pre"},
    in_layer={
        **{f"attn_{part}": f"attention.{part}_proj" for part in "kqv"},
        **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("down", "gate", "up")},
        **{"attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm"},
    },
    in_projector={
        **{"mm.1": "linear_1", "mm.2": "linear_2", "mm.input_norm": "norm"},
        "mm.patch_merger": "patch_merger.merging_layer",
    },
    tokens=("[IMG]",),
    config=_config,
    processor=_processor,
    entry=_entry,
    text=_text,
    unused=("v.token_embd.img_break",),
)
PIXTRAL_12B: Final = replace(PIXTRAL, family="LlavaForConditionalGeneration", texts={"llama": "mistral"})
"""The first Pixtral, which does not join patches."""


def _added(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
    """Return what files of llama.cpp say of all models with this encoder."""
    return {
        text.key("vision.attention.layer_norm_epsilon"): text.number("vision.attention.layer_norm_epsilon", 1e-5),
        text.key("vision.spatial_merge_size"): text.size("spatial_merge_size", 2),
        ROPE_BASE: text.number("vision.rope.freq_base", 10_000.0),
        "clip.use_silu": True,
    }


PIXTRAL_OF_OLLAMA: Final = OwnEncoder(
    replace(
        PIXTRAL,
        texts={"mistral3": "ministral3"},
        in_tower={"v.patch_conv": "patch_conv", "v.encoder_norm": "ln_pre"},
        in_layer={
            **{part: ours for part, ours in PIXTRAL.in_layer.items() if part not in ("attn_out", "ln1", "ln2")},
            **{"attn_output": "attention.o_proj", "attn_norm": "attention_norm", "ffn_norm": "ffn_norm"},
        },
        in_projector={f"mm.{ours}": ours for ours in PIXTRAL.in_projector.values()},
        output=("mm.linear_2.weight", 0),
        entry=plain,  # only those of the text model are interleaved
        unused=(),
    ),
    _added,
)
