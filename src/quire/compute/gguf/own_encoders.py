"""The image encoders that Ollama has in the file of the text model, with other names than llama.cpp's.

Settings are `ARCHITECTURE.vision.*`, and tensors `v.*` and `mm.*`. What a file of llama.cpp says, and Ollama has
elsewhere or in its code, is added to the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.header import GgufHeader, GgufTensor
from quire.compute.gguf.named_settings import Settings
from quire.compute.gguf.projector_families import (
    KINDS,
    LLAVA,
    PATCHES,
    PIXTRAL,
    PIXTRAL_KIND,
    PROJECTOR,
    QKV,
    QWEN_PATCHES,
    ROPE_BASE,
    with_sections,
)
from quire.compute.gguf.projector_kinds import DEEP_LIST, EncoderFile, Kind, Object, in_module, plain
from quire.compute.gguf.tensors import IMAGES, PATCH_DIMENSIONS, GgufEntry
from quire.compute.models.common import MAX_LAYERS
from quire.compute.models.config_file import ConfigFile
from quire.core.images import CHANNELS

LAYERS: Final = "vision.block_count"
VISUAL: Final = "model.visual."
MERGER: Final = ("linear_fc1", "linear_fc2", "norm")
MAX_DEEP: Final = 16
"""The most layers of an image encoder whose states become rows; published models have three."""

FRAMES: Final = MappingProxyType({f"v.patch_embd_{frame}.weight": (frame, 2) for frame in range(2)})


@dataclass(frozen=True, slots=True)
class OwnEncoder:
    """How the file of a text model has an image encoder: its tensors, and settings by the names that `kind` knows."""

    kind: Kind
    added: Callable[[Settings, Mapping[str, GgufTensor]], Object]


def own_encoder_of(header: GgufHeader) -> OwnEncoder | None:
    """Return how a file has an image encoder next to its text model; None if it has none that quire runs."""
    architecture = header.settings.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in OWN_ENCODERS:
        return None
    has_tensors = any(name.startswith(IMAGES[architecture]) for name in header.tensors)
    return OWN_ENCODERS[architecture] if has_tensors and f"{architecture}.{LAYERS}" in header.settings else None


def own_settings(header: GgufHeader, own: OwnEncoder) -> Settings:
    """Return the settings of the image encoder in the file of a text model. Does not mutate."""
    architecture = str(header.settings["general.architecture"])
    file = ConfigFile(str(header.path), dict(header.settings))
    text = Settings(file, architecture, header.tensors.keys())
    added = ConfigFile(file.where, {**file.fields, **own.added(text, header.tensors)})
    return Settings(added, f"{architecture}.vision", header.tensors.keys())


def _gemma3(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
    """Return how many patches per side become one row, which follows from the rows of an image."""
    key = text.key("mm.tokens_per_image")
    patches = text.size("vision.image_size") // text.size("vision.patch_size")
    side = isqrt(text.size("mm.tokens_per_image", 256))
    if side**2 != text.size("mm.tokens_per_image", 256) or patches < side or patches % side:
        raise text.file.error(key, f"a square, with a root that divides {patches}")
    return {text.key("vision.projector.scale_factor"): patches // side}


def _gemma4(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
    """Return nothing: files have the settings and names of llama.cpp, and a second copy of all bounds."""
    return {}


def _mistral3(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
    """Return what files of llama.cpp say of all models with this encoder."""
    return {
        text.key("vision.attention.layer_norm_epsilon"): text.number("vision.attention.layer_norm_epsilon", 1e-5),
        text.key("vision.spatial_merge_size"): text.size("spatial_merge_size", 2),
        ROPE_BASE: text.number("vision.rope.freq_base", 10_000.0),
        "clip.use_silu": True,
    }


def _qwen25vl(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
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


def _qwen3vl(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
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


def _qwen3vl_text(text: Object, file: EncoderFile, header: Mapping[str, object]) -> Object:
    """Return the settings of a text model with sections of its positions, which only Ollama's code has."""
    usual = {"qwen3vl.rope.mrope_section": header.get("qwen3vl.mrope_sections", [24, 20, 20])}
    return with_sections(text, file, usual | dict(header))


def _qwen3vl_entry(file: EncoderFile, part: str, tensor: GgufTensor) -> GgufEntry:
    """Return a tensor; files have no five dimensions, so that of patches has outputs and colours in one."""
    shape = tensor.shape
    if part != "v.patch_embed" or len(shape) != PATCH_DIMENSIONS or shape[0] % CHANNELS:
        return GgufEntry(tensor)
    return GgufEntry(replace(tensor, shape=(shape[0] // CHANNELS, CHANNELS, *shape[1:])))


OWN_ENCODERS: Final[Mapping[str, OwnEncoder]] = MappingProxyType(
    {
        "gemma3": OwnEncoder(
            replace(
                KINDS["gemma3"],
                once={
                    **in_module(
                        LLAVA,
                        {
                            "v.patch_embedding": "embeddings.patch_embedding",
                            "v.position_embedding": "embeddings.position_embedding",
                            "v.post_layernorm": "post_layernorm",
                        },
                    ),
                    "mm.mm_input_projection.weight": PROJECTOR + "mm_input_projection_weight",
                    "mm.mm_soft_emb_norm": PROJECTOR + "mm_soft_emb_norm",
                },
                layer={
                    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "kqv"},
                    **{"attn_output": "self_attn.out_proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"},
                    **{"layer_norm1": "layer_norm1", "layer_norm2": "layer_norm2"},
                },
                output=("mm.mm_input_projection.weight", 1),
            ),
            _gemma3,
        ),
        "gemma4": OwnEncoder(replace(KINDS["gemma4v"], unused=("v.clamp_data",)), _gemma4),
        "mistral3": OwnEncoder(
            replace(
                PIXTRAL_KIND,
                texts=MappingProxyType({"mistral3": "ministral3"}),
                once={
                    **in_module(PIXTRAL, {"v.patch_conv": "patch_conv", "v.encoder_norm": "ln_pre"}),
                    **in_module(PROJECTOR, {f"mm.{name}": name for name in ("linear_1", "linear_2", "norm")}),
                    "mm.patch_merger.merging_layer": PROJECTOR + "patch_merger.merging_layer",
                },
                layer={
                    **{f"attn_{part}": f"attention.{part}_proj" for part in "kqv"},
                    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("down", "gate", "up")},
                    **{"attn_output": "attention.o_proj", "attn_norm": "attention_norm", "ffn_norm": "ffn_norm"},
                },
                output=("mm.linear_2.weight", 0),
                entry=plain,  # only those of the text model are interleaved
                unused=(),
            ),
            _mistral3,
        ),
        "qwen25vl": OwnEncoder(
            replace(
                KINDS["qwen2.5vl_merger"],
                texts=MappingProxyType({"qwen25vl": "qwen2vl"}),
                once={
                    **dict.fromkeys(FRAMES, QWEN_PATCHES[PATCHES]),
                    **in_module("visual.merger.", {f"v.merger.{name}": name for name in ("ln_q", "mlp.0", "mlp.2")}),
                },
                output=("v.merger.mlp.2.weight", 0),
                pieces=MappingProxyType({**FRAMES, **QKV}),
            ),
            _qwen25vl,
        ),
        "qwen3vl": OwnEncoder(
            replace(
                KINDS["qwen3vl_merger"],
                texts=MappingProxyType({"qwen3vl": "qwen3vl"}),
                families=MappingProxyType({}),
                once={
                    **in_module(VISUAL, {"v.patch_embed": "patch_embed.proj", "v.pos_embed": "pos_embed"}),
                    **in_module(f"{VISUAL}merger.", {f"v.merger.{name}": name for name in MERGER}),
                    **{
                        f"v.deepstack_merger.{place}.{name}": f"{DEEP_LIST}{place}.{name}"
                        for place in range(MAX_DEEP)
                        for name in MERGER
                    },
                },
                layer={
                    **dict.fromkeys(QKV, "attn.qkv"),
                    "attn_out": "attn.proj",
                    **{name: name for name in ("norm1", "norm2", "mlp.linear_fc1", "mlp.linear_fc2")},
                },
                output=("v.merger.linear_fc2.weight", 0),
                entry=_qwen3vl_entry,
                text=_qwen3vl_text,
                pieces=QKV,
            ),
            _qwen3vl,
        ),
    }
)
"""`general.architecture` → its image encoder in the same file."""
