"""The image encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.header import GgufTensor
from quire.compute.gguf.named_settings import Settings
from quire.compute.gguf.tensors import PATCH_DIMENSIONS, GgufEntry
from quire.compute.gguf.vision.kind import BICUBIC, IN_LAYER, IN_MODEL, POSITIONS, EncoderFile, Kind, Object, OwnEncoder
from quire.compute.models.common import MAX_LAYERS
from quire.core.images import CHANNELS

OLLAMA_POSITIONS: Final = "v.pos_embed.weight"
"""Those of Qwen3-VL in files of Ollama."""

PAD: Final = ("<|image_pad|>",)
FRAMES: Final = MappingProxyType({"v.patch_embd.weight": (0, 2), "v.patch_embd.weight.1": (1, 2)})
FRAMES_OF_OLLAMA: Final = MappingProxyType({f"v.patch_embd_{frame}.weight": (frame, 2) for frame in range(2)})
QKV: Final = MappingProxyType({f"attn_{part}": (index, 3) for index, part in enumerate("qkv")})
PATCHES: Final = "patch_embed.proj.weight"
MERGER: Final = ("linear_fc1", "linear_fc2", "norm")
MAX_DEEP: Final = 16
"""The most layers of an image encoder whose states become rows; published models have three."""


def _with_sections(text: Object, file: EncoderFile, header: Mapping[str, object]) -> Object:
    """Return the settings of a text model with sections of its positions, which make no difference to texts."""
    name = f"{header['general.architecture']}.rope."  # files of Ollama have the second setting
    sections = header.get(f"{name}dimension_sections", header.get(f"{name}mrope_section"))
    scaling = text.get("rope_scaling")
    kept: Object = scaling if isinstance(scaling, dict) else {"rope_type": "default"}
    return text | {"rope_scaling": kept | {"mrope_section": sections[:3] if isinstance(sections, list) else None}}


def _sizes(file: EncoderFile, activation: str) -> Object:
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
    eye = _sizes(file, "quick_gelu") | {"embed_dim": size, "mlp_ratio": inner // size}
    return {"image_token_id": file.token_id, "vision_config": eye}


def _qwen2_5(file: EncoderFile) -> Object:
    every = file.settings.size("n_wa_pattern", 0, low=0)
    count = file.settings.size("block_count", high=MAX_LAYERS)  # each takes a place in a list
    eye = _sizes(file, "silu") | {
        "fullatt_block_indexes": list(range(every - 1, count, every) if every else range(count)),
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.size("feed_forward_length"),
        "window_size": file.size("window_size", 112),
    }
    return {"image_token_id": file.token_id, "vision_config": eye}


def _qwen3(file: EncoderFile) -> Object:
    eye = _sizes(file, "gelu_pytorch_tanh") | {
        "deepstack_visual_indexes": file.deep,
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": file.size("feed_forward_length"),
        "num_position_embeddings": file.rows(OLLAMA_POSITIONS if OLLAMA_POSITIONS in file.tensors else POSITIONS),
    }
    return {"image_token_id": file.token_id, "vision_config": eye}


def _processor_of(least: int, most: int) -> Callable[[EncoderFile], Object]:
    """Return the settings of images with the makers' bounds of their pixels, which files do not have."""

    def processor(file: EncoderFile) -> Object:
        return file.pixels() | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "max_pixels": file.size("image_max_pixels", most),
            "merge_size": file.size("spatial_merge_size", 2),
            "min_pixels": file.size("image_min_pixels", least),
            "patch_size": file.size("patch_size"),
            "resample": BICUBIC,
        }

    return processor


def _kind(name: str, config: Callable[[EncoderFile], Object], gated: bool) -> Kind:
    """Return the kind of Qwen2-VL or Qwen2.5-VL, whose queries, keys and values are one matrix."""
    mlp = ("gate_proj", "up_proj", "down_proj") if gated else ("", "fc1", "fc2")
    parts = zip(("ffn_gate", "ffn_up", "ffn_down"), mlp, strict=True)
    return Kind(
        family=name,
        texts={"qwen2vl": "qwen2vl"},
        text_names=("", ""),
        tower="visual.",
        layers="blocks.",
        projector="visual.merger.",
        in_tower=dict.fromkeys(FRAMES, PATCHES),
        in_projector={"v.post_ln": "ln_q", "mm.0": "mlp.0", "mm.2": "mlp.2"},
        in_layer={
            **dict.fromkeys(QKV, "attn.qkv"),
            **{"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"},
            **{theirs: f"mlp.{ours}" for theirs, ours in parts if ours},
        },
        tokens=PAD,
        config=config,
        processor=_processor_of(56 * 56, 12_845_056),
        text=_with_sections,
        pieces={**FRAMES, **QKV},
    )


QWEN2_VL: Final = _kind("Qwen2VLForConditionalGeneration", _qwen2, gated=False)
QWEN2_5_VL: Final = _kind("Qwen2_5_VLForConditionalGeneration", _qwen2_5, gated=True)
QWEN3_VL: Final = Kind(
    family="Qwen3VLForConditionalGeneration",
    families={"qwen35": "Qwen3_5ForConditionalGeneration", "qwen35moe": "Qwen3_5MoeForConditionalGeneration"},
    texts={name: name for name in ("qwen3vl", "qwen35", "qwen35moe")},
    text_names=IN_MODEL,
    tower="model.visual.",
    layers="blocks.",
    projector="model.visual.merger.",
    in_tower={
        **dict.fromkeys(FRAMES, PATCHES),
        **{"v.patch_embd": "patch_embed.proj", "v.position_embd": "pos_embed"},
    },
    in_projector={"v.post_ln": "norm", "mm.0": "linear_fc1", "mm.2": "linear_fc2"},
    in_layer={
        **dict.fromkeys(("attn_qkv", *QKV), "attn.qkv"),  # in files that Ollama makes, each is a tensor
        **{"attn_out": "attn.proj", "ln1": "norm1", "ln2": "norm2"},
        **{"ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
    },
    tokens=PAD,
    config=_qwen3,
    processor=_processor_of(65_536, 16_777_216),
    text=_with_sections,
    pieces={**FRAMES, **QKV},
)


def _qwen2_5_added(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
    """Return the size of MLPs, and after how many layers there is one without windows."""
    key, count = text.key("vision.fullatt_block_indexes"), text.size("vision.block_count", high=MAX_LAYERS)
    whole = text.file.fields.get(key, [7, 15, 23, 31])
    every = whole[0] + 1 if isinstance(whole, list) and whole and type(whole[0]) is int and whole[0] >= 0 else 0
    if not every or whole != list(range(every - 1, count, every)):
        raise text.file.error(key, f"layers at equal distances, the first of which tells it, below {count}")
    up = tensors.get("v.blk.0.ffn_up.weight")
    size: Object = {} if up is None else {text.key("vision.feed_forward_length"): up.shape[0]}
    if text.has("vision.max_pixels"):
        size |= {text.key("vision.image_max_pixels"): text.size("vision.max_pixels")}
    return size | {text.key("vision.n_wa_pattern"): every}


def _qwen3_added(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
    """Return the layers whose states become rows, the size of MLPs, and the bounds of images."""
    key, count = text.key("vision.deepstack_visual_indexes"), text.size("vision.block_count", high=MAX_LAYERS)
    deep = text.file.fields.get(key, [])
    places = [each for each in deep if type(each) is int and 0 <= each < count] if isinstance(deep, list) else []
    if places != deep or sorted(set(places)) != places:
        raise text.file.error(key, f"a list of layers below {count}, in their order")
    added: Object = {text.key("vision.is_deepstack_layers"): [layer in places for layer in range(count)]}
    up = tensors.get("v.blk.0.mlp.linear_fc1.weight")
    if up is not None:
        added[text.key("vision.feed_forward_length")] = up.shape[0]
    for theirs, ours in (("shortest_edge", "image_min_pixels"), ("longest_edge", "image_max_pixels")):
        if text.has(f"vision.{theirs}"):
            added[text.key(f"vision.{ours}")] = text.size(f"vision.{theirs}")
    return added


def _text_of_ollama(text: Object, file: EncoderFile, header: Mapping[str, object]) -> Object:
    """Return the settings of a text model with sections of its positions, which only Ollama's code has."""
    usual = {"qwen3vl.rope.mrope_section": header.get("qwen3vl.mrope_sections", [24, 20, 20])}
    return _with_sections(text, file, usual | dict(header))


def _entry_of_ollama(file: EncoderFile, part: str, tensor: GgufTensor) -> GgufEntry:
    """Return a tensor; files have no five dimensions, so that of patches has outputs and colours in one."""
    shape = tensor.shape
    if part != "v.patch_embed" or len(shape) != PATCH_DIMENSIONS or shape[0] % CHANNELS:
        return GgufEntry(tensor)
    return GgufEntry(replace(tensor, shape=(shape[0] // CHANNELS, CHANNELS, *shape[1:])))


QWEN2_5_VL_OF_OLLAMA: Final = OwnEncoder(
    replace(
        QWEN2_5_VL,
        texts={"qwen25vl": "qwen2vl"},
        in_tower=dict.fromkeys(FRAMES_OF_OLLAMA, PATCHES),
        in_projector={f"v.merger.{name}": name for name in ("ln_q", "mlp.0", "mlp.2")},
        output=("v.merger.mlp.2.weight", 0),
        pieces={**FRAMES_OF_OLLAMA, **QKV},
    ),
    _qwen2_5_added,
)
QWEN3_VL_OF_OLLAMA: Final = OwnEncoder(
    replace(
        QWEN3_VL,
        texts={"qwen3vl": "qwen3vl"},
        families={},
        in_tower={
            **{"v.patch_embed": "patch_embed.proj", "v.pos_embed": "pos_embed"},
            **{
                f"v.deepstack_merger.{place}.{name}": f"deepstack_merger_list.{place}.{name}"
                for place in range(MAX_DEEP)
                for name in MERGER
            },
        },
        in_projector={f"v.merger.{name}": name for name in MERGER},
        in_layer={
            **dict.fromkeys(QKV, "attn.qkv"),
            "attn_out": "attn.proj",
            **{name: name for name in ("norm1", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")},
        },
        output=("v.merger.linear_fc2.weight", 0),
        entry=_entry_of_ollama,
        text=_text_of_ollama,
        pieces=QKV,
    ),
    _qwen3_added,
)
