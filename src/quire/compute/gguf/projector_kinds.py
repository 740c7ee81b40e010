"""The kinds of image encoders in GGUF files: their settings and names in the form of Hugging Face.

A file names its kind in `clip.projector_type`. Sizes are settings `clip.vision.*`; the rest follows from the kind, as
llama.cpp has it in code. Some files of LLaVA have the matrices of an MLP under each other's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.header import GgufTensor
from quire.compute.gguf.named_settings import Settings, as_written
from quire.core.errors import CheckpointError

Object = dict[str, object]
SIDE_OF_TILES: Final = 4
"""The tiles along the longer edge of an image in Idefics 3 and SmolVLM, for files that do not set that edge."""

LANCZOS, BICUBIC = 1, 3
FEATURE_LAYERS: Final = "feature_layer"
POST_NORM: Final = "v.post_ln.weight"
FIRST_ROW: Final = "v.class_embd"
TILED: Final = ("image_grid_pinpoints", "mm_patch_merge_type")
"""Settings of LLaVA 1.6, which cuts images into tiles."""

LAYER: Final = MappingProxyType(
    {
        "attn_k": "self_attn.k_proj",
        "attn_out": "self_attn.out_proj",
        "attn_q": "self_attn.q_proj",
        "attn_v": "self_attn.v_proj",
        "ffn_down": "mlp.fc2",
        "ffn_up": "mlp.fc1",
        "ln1": "layer_norm1",
        "ln2": "layer_norm2",
    }
)
AROUND: Final = MappingProxyType(
    {
        FIRST_ROW: "embeddings.class_embedding",
        "v.patch_embd": "embeddings.patch_embedding",
        "v.position_embd": "embeddings.position_embedding",
        "v.post_ln": "post_layernorm",
        "v.pre_ln": "pre_layrnorm",
    }
)
"""Tensors of CLIP and SigLIP outside of layers."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of image encoder, and the text models that it is for.

    `family`: of the pair. `texts`: the architecture of a text model → its `model_type` next to this encoder.
    `text_names`: the beginning of the names of its tensors alone, and next to this encoder. `layers`: the beginning of
    the names of the tower's layers. `output`: the matrix that makes the rows for the text model. `tokens`: the first of
    them in the vocabulary stands for images. `config` and `processor` make settings from those of the file.
    """

    family: str
    texts: Mapping[str, str]
    text_names: tuple[str, str]
    layers: str
    once: Mapping[str, str]
    layer: Mapping[str, str]
    output: str
    tokens: Sequence[str]
    config: Callable[[Settings, int], Object]
    processor: Callable[[Settings, str], Object]

    def name_of(self, stored: str, *, swaps: bool) -> str:
        """Return the name of a tensor in Hugging Face; unknown names stay. `swaps`: the file swaps those of an MLP."""
        stem, _, end = stored.rpartition(".")
        if end not in ("weight", "bias"):
            stem, end = stored, ""
        end = end and f".{end}"
        if stem in self.once:
            return self.once[stem] + end
        layer, _, part = stem.removeprefix("v.blk.").partition(".")
        if not stem.startswith("v.blk.") or part not in self.layer:
            return stored
        return f"{self.layers}{layer}.{self.layer[SWAPPED.get(part, part) if swaps else part]}{end}"

    def stored(self, name: str, *, swaps: bool) -> str:
        """Return the file's name for a tensor; the same name if files have no other."""
        stem, _, end = name.rpartition(".")
        found = _key_of(self.once, stem) or _key_of(self.once, name)
        if found is not None:
            return found if name in self.once.values() else f"{found}.{end}"
        layer, _, part = stem.removeprefix(self.layers).partition(".")
        theirs = _key_of(self.layer, part)
        if not stem.startswith(self.layers) or theirs is None:
            return name
        return f"v.blk.{layer}.{SWAPPED.get(theirs, theirs) if swaps else theirs}.{end}"


SWAPPED: Final = MappingProxyType({"ffn_down": "ffn_up", "ffn_up": "ffn_down"})


def swaps_mlp(tensors: Mapping[str, GgufTensor]) -> bool:
    """Return whether a file has the two matrices of an MLP under each other's name, which shows in their shapes."""
    up = tensors.get("v.blk.0.ffn_up.weight")
    norm = tensors.get("v.blk.0.ln2.weight")
    return up is not None and norm is not None and len(up.shape) == 2 and up.shape[1] != norm.shape[0] == up.shape[0]


def _key_of(names: Mapping[str, str], ours: str) -> str | None:
    return next((theirs for theirs, name in names.items() if name == ours), None)


def _tower(settings: Settings) -> Object:
    """Return the sizes of a vision transformer."""
    return {
        "hidden_size": settings.size("embedding_length"),
        "image_size": settings.size("image_size"),
        "intermediate_size": settings.size("feed_forward_length"),
        "layer_norm_eps": settings.number("attention.layer_norm_epsilon"),
        "num_attention_heads": settings.size("attention.head_count"),
        "num_hidden_layers": settings.size("block_count"),
        "patch_size": settings.size("patch_size"),
    }


def _pixels(settings: Settings) -> Object:
    """Return how the numbers of pixels are normalised; the readers of these settings check them."""
    return {key: _as_written(settings.file.fields.get(settings.key(key))) for key in ("image_mean", "image_std")}


def _as_written(numbers: object) -> object:
    if isinstance(numbers, list) and all(type(each) is float and isfinite(each) for each in numbers):
        return [as_written(each) for each in numbers]
    return numbers


def _merge(settings: Settings) -> int:
    return settings.size("projector.scale_factor", 2, high=16)


def _idefics3(settings: Settings, token: int) -> Object:
    eye = _tower(settings) | {"hidden_act": "gelu_pytorch_tanh"}
    return {"image_token_id": token, "scale_factor": _merge(settings), "vision_config": eye}


def _idefics3_processor(settings: Settings, token: str) -> Object:
    tile = settings.size("image_size")
    return _pixels(settings) | {
        "do_image_splitting": True,
        "image_processor_type": "Idefics3ImageProcessor",
        "image_seq_len": (tile // settings.size("patch_size") // _merge(settings)) ** 2,
        "max_image_size": {"longest_edge": tile},
        "resample": LANCZOS,
        "size": {"longest_edge": settings.size("preproc_image_size", SIDE_OF_TILES * tile)},
    }


def _llava(settings: Settings, token: int) -> Object:
    """Return the settings of LLaVA 1.5, whose file leaves out the layers that are not used, and the norm after them."""
    count, is_clip = settings.size("block_count"), FIRST_ROW in settings.tensors
    key = settings.key(FEATURE_LAYERS)
    layers = settings.file.fields.get(key, [count])
    for name in map(settings.key, TILED):
        if settings.file.fields.get(name) not in (None, [], "flat"):
            raise settings.file.error(name, "none, as in LLaVA 1.5: quire does not cut images into tiles as LLaVA 1.6")
    if not isinstance(layers, list) or len(layers) != 1:
        raise settings.file.error(key, "a list of one layer")
    if POST_NORM in settings.tensors:
        raise CheckpointError(f"{settings.file.where}: tensor {POST_NORM}", "given", "no norm after the layers")
    is_gelu = settings.file.flag("clip.use_gelu", False)
    eye = _tower(settings) | {
        "hidden_act": "gelu" if is_gelu else "quick_gelu" if is_clip else "gelu_pytorch_tanh",
        "model_type": "clip_vision_model" if is_clip else "siglip_vision_model",
    }
    return {
        "image_token_index": token,
        "vision_config": eye,
        "vision_feature_layer": layers[0],
        "vision_feature_select_strategy": "default" if is_clip else "full",
    }


def _llava_processor(settings: Settings, token: str) -> Object:
    """Return that images are padded to a square, as LLaVA 1.5 was trained; Hugging Face's copies of it cut them."""
    size = settings.size("image_size")
    return _pixels(settings) | {
        "crop_size": {"height": size, "width": size},
        "do_pad": True,
        "image_processor_type": "LlavaImageProcessor",
        "image_token": token,
        "patch_size": settings.size("patch_size"),
        "resample": BICUBIC,
        "size": {"shortest_edge": size},
    }


def _in(prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: prefix + ours for theirs, ours in names.items()}


IMAGE: Final = ("<image>",)
SMOLVLM, LLAVA = "model.vision_model.", "vision_tower.vision_model."
KINDS: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "idefics3": Kind(
            family="Idefics3ForConditionalGeneration",
            texts=MappingProxyType({"llama": "llama"}),
            text_names=("model.", "model.text_model."),
            layers=SMOLVLM + "encoder.layers.",
            once={**_in(SMOLVLM, AROUND), "mm.model.fc": "model.connector.modality_projection.proj"},
            layer=LAYER,
            output="mm.model.fc.weight",
            tokens=IMAGE,
            config=_idefics3,
            processor=_idefics3_processor,
        ),
        "mlp": Kind(
            family="LlavaForConditionalGeneration",
            texts=MappingProxyType({"llama": "llama", "qwen2": "qwen2"}),
            text_names=("", "language_model."),
            layers=LLAVA + "encoder.layers.",
            once={
                **_in(LLAVA, AROUND),
                **_in("multi_modal_projector.", {"mm.0": "linear_1", "mm.2": "linear_2"}),
            },
            layer=LAYER,
            output="mm.2.weight",
            tokens=(*IMAGE, "<unk>", "<|reserved_special_token_0|>"),
            config=_llava,
            processor=_llava_processor,
        ),
    }
)
"""`clip.projector_type` → the kind."""
