"""The image encoders of Gemma 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from quire.compute.gguf.vision.kind import (
    BICUBIC,
    IN_LAYER,
    IN_MODEL,
    POSITIONS,
    EncoderFile,
    Kind,
    Object,
    OwnEncoder,
    by_pixel,
)
from quire.core.errors import CheckpointError

POSITION_DIMENSIONS: Final = 3
"""The dimensions of the table of positions: column and row, places, numbers."""


def _config(file: EncoderFile) -> Object:
    """Return the settings of Gemma 4; files do not have the size of heads, nor of the table of positions."""
    first, positions = f"{IN_LAYER}0.", file.tensors.get(POSITIONS)
    size = file.rows(first + "attn_q_norm.weight")
    if positions is None or len(positions.shape) != POSITION_DIMENSIONS:
        raise CheckpointError(f"{file.settings.file.where}: tensor {POSITIONS}", "missing", "a table for each axis")
    eye = {
        **{"head_dim": size, "num_key_value_heads": file.rows(first + "attn_k.weight") // size},
        **{"hidden_size": file.size("embedding_length"), "intermediate_size": file.size("feed_forward_length")},
        **{"model_type": "gemma4_vision", "num_attention_heads": file.size("attention.head_count")},
        **{"num_hidden_layers": file.size("block_count"), "patch_size": file.size("patch_size")},
        **{"pooling_kernel_size": _merge(file), "position_embedding_size": positions.shape[1]},
        "rms_norm_eps": file.settings.number("attention.layer_norm_epsilon"),
        "standardize": "v.std_scale" in file.tensors,
        "use_clipped_linears": first + "attn_q.input_min" in file.tensors,
    }
    return {"image_token_id": file.token_id, "vision_config": eye}


def _merge(file: EncoderFile) -> int:
    return file.settings.size("projector.scale_factor", 3, high=16)


def _processor(file: EncoderFile) -> Object:
    return {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": file.size("patch_size"),
        "pooling_kernel_size": _merge(file),
        "resample": BICUBIC,
    }


def _text(text: Object, file: EncoderFile, header: Mapping[str, object]) -> Object:
    """Return the settings of a text model: tokens of an image see one another in those without inputs of layers."""
    return text | {"use_bidirectional_attention": None if text["hidden_size_per_layer_input"] else "vision"}


GEMMA4: Final = Kind(
    family="Gemma4ForConditionalGeneration",
    texts={"gemma4": "gemma4_text"},
    text_names=IN_MODEL,
    tower="model.vision_tower.",
    in_tower={
        "v.patch_embd": "patch_embedder.input_proj",
        POSITIONS: "patch_embedder.position_embedding_table",
        **{f"v.{name}": name for name in ("std_bias", "std_scale")},
    },
    projector="model.embed_vision.",
    in_projector={"mm.input_projection": "embedding_projection"},
    in_layer={
        **{f"attn_{part}": f"self_attn.{part}_proj.linear" for part in "kqv"},
        **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "kq"},
        **{f"ffn_{part}": f"mlp.{part}_proj.linear" for part in ("down", "gate", "up")},
        **{"attn_out": "self_attn.o_proj.linear", "ln1": "input_layernorm", "ln2": "pre_feedforward_layernorm"},
        **{"attn_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"},
    },
    output=("mm.input_projection.weight", 0),
    tokens=("<|image|>",),
    config=_config,
    processor=_processor,
    entry=by_pixel,
    text=_text,
    others=("a.", "mm.a."),
    wrapper=".linear",
)
GEMMA4_OF_OLLAMA: Final = OwnEncoder(replace(GEMMA4, unused=("v.clamp_data",)))  # a second copy of all bounds
