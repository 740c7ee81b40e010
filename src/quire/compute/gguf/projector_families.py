"""The kinds of image encoders in GGUF files, by family: what their settings become, and the names of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.header import GgufTensor
from quire.compute.gguf.projector_kinds import (
    AROUND,
    FIRST_ROW,
    IN_LAYER,
    LAYER,
    EncoderFile,
    Kind,
    Object,
    in_module,
    pixels,
    rows_per_side,
    tower,
)
from quire.compute.gguf.row_orders import ColoursLast, Order
from quire.compute.gguf.tensors import GgufEntry
from quire.compute.models.common import MAX_LAYERS
from quire.core.errors import CheckpointError

SIDE_OF_TILES: Final = 4
"""The tiles along the longer edge of an image in Idefics 3 and SmolVLM, for files that do not set that edge."""

BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
FEATURE_LAYERS: Final = "feature_layer"
POST_NORM: Final = "v.post_ln.weight"
MERGER: Final = "mm.patch_merger.weight"
MERGERS: Final = (MERGER, "mm.patch_merger.merging_layer.weight")
"""The matrix that joins patches, as llama.cpp and Ollama name it."""
ROPE_BASE: Final = "clip.rope.freq_base"
TILED: Final = ("image_grid_pinpoints", "mm_patch_merge_type")
"""Settings of LLaVA 1.6, which cuts images into tiles."""
PATCHES: Final = "v.patch_embd.weight"
POSITIONS: Final = "v.position_embd.weight"
OLLAMA_POSITIONS: Final = "v.pos_embed.weight"
"""Those of Qwen3-VL in files of Ollama."""


# --- Idefics 3 and SmolVLM ---------------------------------------------------------------------


def _idefics3(file: EncoderFile) -> Object:
    eye = tower(file, "gelu_pytorch_tanh")
    return {"image_token_id": file.token_id, "scale_factor": file.merge, "vision_config": eye}


def _idefics3_processor(file: EncoderFile) -> Object:
    tile = file.size("image_size")
    return pixels(file) | {
        "do_image_splitting": True,
        "image_processor_type": "Idefics3ImageProcessor",
        "image_seq_len": rows_per_side(file, file.merge) ** 2,
        "max_image_size": {"longest_edge": tile},
        "resample": LANCZOS,
        "size": {"longest_edge": file.size("preproc_image_size", SIDE_OF_TILES * tile)},
    }


# --- LLaVA 1.5 ---------------------------------------------------------------------------------


def _llava(file: EncoderFile) -> Object:
    """Return the settings of LLaVA 1.5, whose file leaves out the layers that are not used, and the norm after them."""
    own, is_clip = file.settings, FIRST_ROW in file.tensors
    key = own.key(FEATURE_LAYERS)
    layers = own.file.fields.get(key, [file.size("block_count")])
    for name in map(own.key, TILED):
        if own.file.fields.get(name) not in (None, [], "flat"):
            raise own.file.error(name, "none, as in LLaVA 1.5: quire does not cut images into tiles as LLaVA 1.6")
    if not isinstance(layers, list) or len(layers) != 1:
        raise own.file.error(key, "a list of one layer")
    if POST_NORM in file.tensors:
        raise CheckpointError(f"{own.file.where}: tensor {POST_NORM}", "present", "no norm after the layers")
    is_gelu = own.file.flag("clip.use_gelu", False)
    eye = tower(file, "gelu" if is_gelu else "quick_gelu" if is_clip else "gelu_pytorch_tanh")
    return {
        "image_token_index": file.token_id,
        "vision_config": eye | {"model_type": "clip_vision_model" if is_clip else "siglip_vision_model"},
        "vision_feature_layer": layers[0],
        "vision_feature_select_strategy": "default" if is_clip else "full",
    }


def _llava_processor(file: EncoderFile) -> Object:
    """Return that images are padded to a square, as LLaVA 1.5 was trained; its copies at Hugging Face cut them."""
    size = file.size("image_size")
    return pixels(file) | {
        "crop_size": {"height": size, "width": size},
        "do_pad": True,
        "image_processor_type": "LlavaImageProcessor",
        "image_token": file.token,
        "patch_size": file.size("patch_size"),
        "resample": BICUBIC,
        "size": {"shortest_edge": size},
    }


# --- Gemma 3 -----------------------------------------------------------------------------------


def _gemma3_merge(file: EncoderFile) -> int:
    return file.settings.size("projector.scale_factor", 4, high=16)


def _gemma3(file: EncoderFile) -> Object:
    eye = tower(file, "gelu_pytorch_tanh") | {"model_type": "siglip_vision_model"}
    return {
        "image_token_index": file.token_id,
        "mm_tokens_per_image": rows_per_side(file, _gemma3_merge(file)) ** 2,
        "rms_norm_unit_offset": False,  # GGUF files include the 1
        "vision_config": eye,
    }


def _gemma3_processor(file: EncoderFile) -> Object:
    size = file.size("image_size")
    return pixels(file) | {
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": rows_per_side(file, _gemma3_merge(file)) ** 2,
        "image_token": file.token,
        "resample": BILINEAR,
        "size": {"height": size, "width": size},
    }


# --- Gemma 4 -----------------------------------------------------------------------------------


def _gemma4(file: EncoderFile) -> Object:
    """Return the settings of Gemma 4; files do not have the size of heads, nor of the table of positions."""
    first, positions = f"{IN_LAYER}0.", file.tensors.get(POSITIONS)
    size = file.rows(first + "attn_q_norm.weight")
    if positions is None or len(positions.shape) != GEMMA4_POSITIONS:
        raise CheckpointError(f"{file.settings.file.where}: tensor {POSITIONS}", "missing", "a table for each axis")
    eye = {
        **{"head_dim": size, "num_key_value_heads": file.rows(first + "attn_k.weight") // size},
        **{"hidden_size": file.size("embedding_length"), "intermediate_size": file.size("feed_forward_length")},
        **{"model_type": "gemma4_vision", "num_attention_heads": file.size("attention.head_count")},
        **{"num_hidden_layers": file.size("block_count"), "patch_size": file.size("patch_size")},
        **{"pooling_kernel_size": _gemma4_merge(file), "position_embedding_size": positions.shape[1]},
        "rms_norm_eps": file.settings.number("attention.layer_norm_epsilon"),
        "standardize": "v.std_scale" in file.tensors,
        "use_clipped_linears": first + "attn_q.input_min" in file.tensors,
    }
    return {"image_token_id": file.token_id, "vision_config": eye}


def _gemma4_merge(file: EncoderFile) -> int:
    return file.settings.size("projector.scale_factor", 3, high=16)


def _gemma4_processor(file: EncoderFile) -> Object:
    return {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": file.size("patch_size"),
        "pooling_kernel_size": _gemma4_merge(file),
        "resample": BICUBIC,
    }


def _gemma4_text(text: Object, file: EncoderFile, header: Mapping[str, object]) -> Object:
    """Return the settings of a text model: tokens of an image see one another in those without inputs of layers."""
    return text | {"use_bidirectional_attention": None if text["hidden_size_per_layer_input"] else "vision"}


# --- Mistral Small 3 and Pixtral ---------------------------------------------------------------


def _pixtral(file: EncoderFile) -> Object:
    is_silu = file.settings.file.flag("clip.use_silu", False)
    base = file.settings.file.number(ROPE_BASE, 10_000.0)
    eye = tower(file, "silu" if is_silu else "gelu") | {"model_type": "pixtral", "rope_theta": base}
    config: Object = {"image_token_index": file.token_id, "vision_config": eye, "vision_feature_layer": -1}
    if file.tensors.keys().isdisjoint(MERGERS):
        return config | {"vision_feature_select_strategy": "full"}
    return config | {"spatial_merge_size": file.size("spatial_merge_size", 2)}


def _pixtral_processor(file: EncoderFile) -> Object:
    patch = file.size("patch_size")
    return pixels(file) | {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": patch, "width": patch},
        "resample": BICUBIC,
        "size": {"longest_edge": file.size("image_size")},
        "spatial_merge_size": 1 if file.tensors.keys().isdisjoint(MERGERS) else file.size("spatial_merge_size", 2),
    }


def _mistral(text: Object, file: EncoderFile, header: Mapping[str, object]) -> Object:
    """Return the settings of a text model: those of Mistral Small 3 are Mistral's, also in files as of Ministral 3."""
    return text | {"model_type": "mistral"} if text["architectures"] == ["MistralForCausalLM"] else text


def _pixtral_entry(file: EncoderFile, part: str, tensor: GgufTensor) -> GgufEntry:
    """Return a tensor; the rows of queries and keys are interleaved, as in a text model of Mistral."""
    order = Order(file.size("attention.head_count"))
    is_turned = part in ("attn_k", "attn_q") and tensor.shape[0] % (2 * order.heads) == 0
    return GgufEntry(tensor, order=order if is_turned else None)


# --- LFM2-VL -----------------------------------------------------------------------------------


def _lfm2(file: EncoderFile) -> Object:
    eye = tower(file, "gelu_pytorch_tanh") | {"model_type": "siglip2_vision_model"}
    return {
        "downsample_factor": file.merge,
        "image_token_id": file.token_id,
        "projector_hidden_size": file.rows("mm.1.weight"),
        "projector_use_layernorm": "mm.input_norm.weight" in file.tensors,
        "vision_config": eye | {"num_patches": file.rows(POSITIONS)},
    }


def _lfm2_processor(file: EncoderFile) -> Object:
    return pixels(file) | {
        "downsample_factor": file.merge,
        "encoder_patch_size": file.size("patch_size"),
        "image_processor_type": "Lfm2VlImageProcessor",
        "resample": BILINEAR,
    }


def _by_pixel(file: EncoderFile, part: str, tensor: GgufTensor) -> GgufEntry:
    """Return a tensor; a patch has the colours one after the other in the file, and pixels in the model."""
    if part != "v.patch_embd" or len(tensor.shape) != 4:
        return GgufEntry(tensor)
    shape = tensor.shape[0], prod(tensor.shape[1:])
    return GgufEntry(replace(tensor, shape=shape), order=ColoursLast(tensor.shape[1]))


# --- Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 ------------------------------------------------


def with_sections(text: Object, file: EncoderFile, header: Mapping[str, object]) -> Object:
    """Return the settings of a text model with sections of its positions, which make no difference to texts."""
    name = f"{header['general.architecture']}.rope."  # files of Ollama have the second setting
    sections = header.get(f"{name}dimension_sections", header.get(f"{name}mrope_section"))
    scaling = text.get("rope_scaling")
    kept: Object = scaling if isinstance(scaling, dict) else {"rope_type": "default"}
    return text | {"rope_scaling": kept | {"mrope_section": sections[:3] if isinstance(sections, list) else None}}


def _qwen(file: EncoderFile, activation: str) -> Object:
    return {
        "depth": file.size("block_count"),
        "hidden_act": activation,
        "num_heads": file.size("attention.head_count"),
        "patch_size": file.size("patch_size"),
        "spatial_merge_size": file.size("spatial_merge_size", 2),
        "temporal_patch_size": 2,
    }


def _qwen2(file: EncoderFile) -> Object:
    """Return the settings of Qwen2-VL; files have another size in place of that of its MLPs."""
    size = file.size("embedding_length")
    inner = max(file.rows(f"{IN_LAYER}0.ffn_up.weight"), file.rows(f"{IN_LAYER}0.ffn_down.weight"))
    eye = _qwen(file, "quick_gelu") | {"embed_dim": size, "mlp_ratio": inner // size}
    return {"image_token_id": file.token_id, "vision_config": eye}


def _qwen2_5(file: EncoderFile) -> Object:
    every = file.settings.size("n_wa_pattern", 0, low=0)
    count = file.settings.size("block_count", high=MAX_LAYERS)  # each takes a place in a list
    eye = _qwen(file, "silu") | {
        "fullatt_block_indexes": list(range(every - 1, count, every) if every else range(count)),
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.size("feed_forward_length"),
        "window_size": file.size("window_size", 112),
    }
    return {"image_token_id": file.token_id, "vision_config": eye}


def _qwen3(file: EncoderFile) -> Object:
    eye = _qwen(file, "gelu_pytorch_tanh") | {
        "deepstack_visual_indexes": file.deep,
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.size("feed_forward_length"),
        "num_position_embeddings": file.rows(OLLAMA_POSITIONS if OLLAMA_POSITIONS in file.tensors else POSITIONS),
    }
    return {"image_token_id": file.token_id, "vision_config": eye}


def _qwen_processor(least: int, most: int) -> Callable[[EncoderFile], Object]:
    """Return the settings of images with the makers' bounds of their pixels, which files do not have."""

    def processor(file: EncoderFile) -> Object:
        return pixels(file) | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "max_pixels": file.size("image_max_pixels", most),
            "merge_size": file.size("spatial_merge_size", 2),
            "min_pixels": file.size("image_min_pixels", least),
            "patch_size": file.size("patch_size"),
            "resample": BICUBIC,
        }

    return processor


# -----------------------------------------------------------------------------------------------


IMAGE: Final = ("<image>",)
SMOLVLM, LLAVA, PIXTRAL = "model.vision_model.", "vision_tower.vision_model.", "vision_tower."
LFM2, PROJECTOR = "model.vision_tower.vision_model.", "multi_modal_projector."
GEMMA4: Final = "model.vision_tower."
GEMMA4_POSITIONS: Final = 3
"""The dimensions of its table: column and row, places, numbers."""

NEXT_TO_IMAGES: Final = ("", "language_model.")
PIXTRAL_KIND: Final = Kind(
    family="Mistral3ForConditionalGeneration",
    texts=MappingProxyType({"llama": "mistral", "mistral3": "ministral3"}),
    text_names=NEXT_TO_IMAGES,
    layers=PIXTRAL + "transformer.layers.",
    once={
        **in_module(PIXTRAL, {"v.patch_embd": "patch_conv", "v.pre_ln": "ln_pre"}),
        **in_module(PROJECTOR, {"mm.1": "linear_1", "mm.2": "linear_2", "mm.input_norm": "norm"}),
        "mm.patch_merger": PROJECTOR + "patch_merger.merging_layer",
    },
    layer=MappingProxyType(
        {
            **{f"attn_{part}": f"attention.{part}_proj" for part in "kqv"},
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("down", "gate", "up")},
            **{"attn_out": "attention.o_proj", "ln1": "attention_norm", "ln2": "ffn_norm"},
        }
    ),
    tokens=("[IMG]",),
    config=_pixtral,
    processor=_pixtral_processor,
    entry=_pixtral_entry,
    text=_mistral,
    unused=("v.token_embd.img_break",),
)
PLAIN_KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "gemma3": Kind(
            family="Gemma3ForConditionalGeneration",
            texts=MappingProxyType({"gemma3": "gemma3_text"}),
            text_names=NEXT_TO_IMAGES,
            layers=LLAVA + "encoder.layers.",
            once={
                **in_module(LLAVA, AROUND),
                "mm.input_projection.weight": PROJECTOR + "mm_input_projection_weight",
                "mm.soft_emb_norm": PROJECTOR + "mm_soft_emb_norm",
            },
            layer=LAYER,
            output=("mm.input_projection.weight", 1),
            tokens=("<image_soft_token>", "<unused0>"),
            config=_gemma3,
            processor=_gemma3_processor,
        ),
        "gemma4v": Kind(
            family="Gemma4ForConditionalGeneration",
            texts=MappingProxyType({"gemma4": "gemma4_text"}),
            text_names=("model.", "model.language_model."),
            layers=GEMMA4 + "encoder.layers.",
            once={
                **in_module(
                    GEMMA4,
                    {
                        "v.patch_embd": "patch_embedder.input_proj",
                        POSITIONS: "patch_embedder.position_embedding_table",
                        **{f"v.{name}": name for name in ("std_bias", "std_scale")},
                    },
                ),
                "mm.input_projection": "model.embed_vision.embedding_projection",
            },
            layer={
                **{f"attn_{part}": f"self_attn.{part}_proj.linear" for part in "kqv"},
                **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "kq"},
                **{f"ffn_{part}": f"mlp.{part}_proj.linear" for part in ("down", "gate", "up")},
                **{"attn_out": "self_attn.o_proj.linear", "ln1": "input_layernorm", "ln2": "pre_feedforward_layernorm"},
                **{"attn_post_norm": "post_attention_layernorm", "ffn_post_norm": "post_feedforward_layernorm"},
            },
            output=("mm.input_projection.weight", 0),
            tokens=("<|image|>",),
            config=_gemma4,
            processor=_gemma4_processor,
            entry=_by_pixel,
            text=_gemma4_text,
            others=("a.", "mm.a."),
            wrapper=".linear",
        ),
        "idefics3": Kind(
            family="Idefics3ForConditionalGeneration",
            texts=MappingProxyType({"llama": "llama"}),
            text_names=("model.", "model.text_model."),
            layers=SMOLVLM + "encoder.layers.",
            once={**in_module(SMOLVLM, AROUND), "mm.model.fc": "model.connector.modality_projection.proj"},
            layer=LAYER,
            output=("mm.model.fc.weight", 0),
            tokens=IMAGE,
            config=_idefics3,
            processor=_idefics3_processor,
        ),
        "lfm2": Kind(
            family="Lfm2VlForConditionalGeneration",
            texts=MappingProxyType({"lfm2": "lfm2"}),
            text_names=("model.", "model.language_model."),
            layers=LFM2 + "encoder.layers.",
            once={
                **in_module(LFM2, AROUND),
                **in_module(
                    f"model.{PROJECTOR}", {"mm.1": "linear_1", "mm.2": "linear_2", "mm.input_norm": "layer_norm"}
                ),
            },
            layer=LAYER,
            tokens=IMAGE,
            config=_lfm2,
            processor=_lfm2_processor,
            entry=_by_pixel,
        ),
        "mlp": Kind(
            family="LlavaForConditionalGeneration",
            texts=MappingProxyType({"llama": "llama", "qwen2": "qwen2"}),
            text_names=NEXT_TO_IMAGES,
            layers=LLAVA + "encoder.layers.",
            once={**in_module(LLAVA, AROUND), **in_module(PROJECTOR, {"mm.0": "linear_1", "mm.2": "linear_2"})},
            layer=LAYER,
            tokens=(*IMAGE, "<unk>", "<|reserved_special_token_0|>"),
            config=_llava,
            processor=_llava_processor,
        ),
        "pixtral": PIXTRAL_KIND,
    }
)
"""Those without pieces."""


def _qwen_kind(name: str, config: Callable[[EncoderFile], Object], gated: bool) -> Kind:
    """Return the kind of Qwen2-VL or Qwen2.5-VL, whose queries, keys and values are one matrix."""
    mlp = ("gate_proj", "up_proj", "down_proj") if gated else ("", "fc1", "fc2")
    parts = zip(("ffn_gate", "ffn_up", "ffn_down"), mlp, strict=True)
    return Kind(
        family=name,
        texts=MappingProxyType({"qwen2vl": "qwen2vl"}),
        text_names=("", ""),
        layers="visual.blocks.",
        once={
            **QWEN_PATCHES,
            "v.post_ln": "visual.merger.ln_q",
            **in_module("visual.merger.mlp.", {"mm.0": "0", "mm.2": "2"}),
        },
        layer={
            **dict.fromkeys(QKV, "attn.qkv"),
            **{"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"},
            **{theirs: f"mlp.{ours}" for theirs, ours in parts if ours},
        },
        tokens=PAD,
        config=config,
        processor=_qwen_processor(56 * 56, 12_845_056),
        text=with_sections,
        pieces=MappingProxyType({**FRAMES, **QKV}),
    )


PAD: Final = ("<|image_pad|>",)
FRAMES: Final = MappingProxyType({PATCHES: (0, 2), f"{PATCHES}.1": (1, 2)})
QKV: Final = MappingProxyType({f"attn_{part}": (index, 3) for index, part in enumerate("qkv")})
QWEN_PATCHES: Final = MappingProxyType(dict.fromkeys(FRAMES, "visual.patch_embed.proj.weight"))
KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        **PLAIN_KINDS,
        "qwen2.5vl_merger": _qwen_kind("Qwen2_5_VLForConditionalGeneration", _qwen2_5, gated=True),
        "qwen2vl_merger": _qwen_kind("Qwen2VLForConditionalGeneration", _qwen2, gated=False),
        "qwen3vl_merger": Kind(
            family="Qwen3VLForConditionalGeneration",
            families=MappingProxyType(
                {
                    "qwen35": "Qwen3_5ForConditionalGeneration",
                    "qwen35moe": "Qwen3_5MoeForConditionalGeneration",
                }
            ),
            texts=MappingProxyType({name: name for name in ("qwen3vl", "qwen35", "qwen35moe")}),
            text_names=("model.", "model.language_model."),
            layers="model.visual.blocks.",
            once={
                **{theirs: f"model.{ours}" for theirs, ours in QWEN_PATCHES.items()},
                **in_module("model.visual.", {"v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed"}),
                **in_module("model.visual.merger.", {"v.post_ln": "norm", "mm.0": "linear_fc1", "mm.2": "linear_fc2"}),
            },
            layer={
                **dict.fromkeys(("attn_qkv", *QKV), "attn.qkv"),  # in files that Ollama makes, each is a tensor
                **{"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"},
                **{"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
            },
            tokens=PAD,
            config=_qwen3,
            processor=_qwen_processor(65_536, 16_777_216),
            text=with_sections,
            pieces=MappingProxyType({**FRAMES, **QKV}),
        ),
    }
)
"""`clip.projector_type` → the kind."""

PIXTRAL_12B: Final = replace(
    PIXTRAL_KIND, family="LlavaForConditionalGeneration", texts=MappingProxyType({"llama": "mistral"})
)
"""The first Pixtral, which does not join patches."""


def kind_of(name: str, tensors: Mapping[str, GgufTensor]) -> Kind:
    """Return the kind of a file with these tensors."""
    return PIXTRAL_12B if name == "pixtral" and MERGER not in tensors else KINDS[name]
