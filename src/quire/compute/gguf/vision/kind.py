"""Kind: how the image encoders of a family are in GGUF files, in the form of Hugging Face.

A file names its kind in `clip.projector_type`. Sizes are settings `clip.vision.*`; the rest follows from the kind, as
llama.cpp has it in code. Old files have the matrices of an MLP under each other's name.

Ollama has image encoders in the file of the text model, with other names: settings are `ARCHITECTURE.vision.*`, and
tensors `v.*` and `mm.*`. What a file of llama.cpp says, and Ollama has elsewhere or in its code, is added to the
settings. A family's module has both forms; kinds.py finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite, prod
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.header import GgufTensor
from quire.compute.gguf.named_settings import Settings, as_written
from quire.compute.gguf.names import key_of
from quire.compute.gguf.row_orders import ColoursLast
from quire.compute.gguf.tensors import PATCH_DIMENSIONS, GgufEntry
from quire.core.errors import CheckpointError

Object = dict[str, object]
DEEP: Final = "v.deepstack."
DEEP_LIST: Final = "model.visual.deepstack_merger_list."
DEEP_PARTS: Final = MappingProxyType({"fc1": "linear_fc1", "fc2": "linear_fc2", "norm": "norm"})
FIRST_ROW: Final = "v.class_embd"
IN_LAYER: Final = "v.blk."
POSITIONS: Final = "v.position_embd.weight"
BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
"""Filters of images, by Pillow's numbers."""
NEXT_TO_IMAGES: Final = ("", "language_model.")
IN_MODEL: Final = ("model.", "model.language_model.")
"""The beginning of the names of a text model's tensors, alone and next to an image encoder."""

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


@dataclass(frozen=True)
class EncoderFile:
    """The settings and tensors of a file; `token` stands for images in the text model, with this id."""

    settings: Settings
    tensors: Mapping[str, GgufTensor]
    token: str
    token_id: int

    def size(self, name: str, default: int | None = None) -> int:
        """Return a size by its name after the dot."""
        return self.settings.size(name, default)

    @cached_property
    def deep(self) -> list[int]:
        """The layers whose states become rows for the text model too."""
        found = self.settings.file.fields.get(self.settings.key("is_deepstack_layers"), [])
        return [layer for layer, is_deep in enumerate(found) if is_deep is True] if isinstance(found, list) else []

    @property
    def merge(self) -> int:
        """The patches per side of the square that becomes one row."""
        return self.settings.size("projector.scale_factor", 2, high=16)

    def rows(self, tensor: str) -> int:
        """Return the rows of a matrix; raises `CheckpointError` if it is missing."""
        if tensor not in self.tensors:
            raise CheckpointError(f"{self.settings.file.where}: tensor {tensor}", "missing", "a matrix")
        return self.tensors[tensor].shape[0]

    @cached_property
    def swaps(self) -> bool:
        """Whether a file has the two matrices of an MLP under each other's name, which shows in their shapes."""
        up, norm = self.tensors.get(f"{IN_LAYER}0.ffn_up.weight"), self.tensors.get(f"{IN_LAYER}0.ln2.weight")
        if up is None or norm is None or len(up.shape) != 2:
            return False
        return up.shape[1] != norm.shape[0] == up.shape[0]

    def tower(self, activation: str) -> Object:
        """Return the sizes of a vision transformer."""
        return {
            "hidden_act": activation,
            "hidden_size": self.size("embedding_length"),
            "image_size": self.size("image_size"),
            "intermediate_size": self.size("feed_forward_length"),
            "layer_norm_eps": self.settings.number("attention.layer_norm_epsilon"),
            "num_attention_heads": self.size("attention.head_count"),
            "num_hidden_layers": self.size("block_count"),
            "patch_size": self.size("patch_size"),
        }

    def pixels(self) -> Object:
        """Return how the numbers of pixels are normalised; the readers of these settings check them."""
        fields, key = self.settings.file.fields, self.settings.key
        return {name: _as_written(fields.get(key(name))) for name in ("image_mean", "image_std")}

    def rows_per_side(self, merge: int) -> int:
        """Return the rows for the text model along an edge of an image of the usual size."""
        return self.size("image_size") // self.size("patch_size") // merge


def _as_written(numbers: object) -> object:
    if isinstance(numbers, list) and all(type(each) is float and isfinite(each) for each in numbers):
        return [as_written(each) for each in numbers]
    return numbers


def _same(text: Object, file: EncoderFile, header: Mapping[str, object]) -> Object:
    """Return the settings of a text model as they are alone."""
    return text


def plain(file: EncoderFile, part: str, tensor: GgufTensor) -> GgufEntry:
    """Return a tensor as it is stored."""
    return GgufEntry(tensor)


def by_pixel(file: EncoderFile, part: str, tensor: GgufTensor) -> GgufEntry:
    """Return a tensor; a patch has the colours one after the other in the file, and pixels in the model."""
    if part != "v.patch_embd" or len(tensor.shape) != PATCH_DIMENSIONS:
        return GgufEntry(tensor)
    shape = tensor.shape[0], prod(tensor.shape[1:])
    return GgufEntry(replace(tensor, shape=shape), order=ColoursLast(tensor.shape[1]))


def _no_more(text: Settings, tensors: Mapping[str, GgufTensor]) -> Object:
    """Return no settings: the file has all that `kind` knows."""
    return {}


@dataclass(frozen=True)
class Kind:
    """One kind of image encoder, and the text models that it is for.

    `family`: of the pair. `texts`: the architecture of a text model → its `model_type` next to this encoder.
    `text_names`: the beginning of the names of its tensors alone, and next to this encoder. `tokens`: the first of them
    in the vocabulary stands for images.

    `tower`, `layers` and `projector`: the modules of the encoder, of its layers in it, and of what makes rows for the
    text model. `in_tower`, `in_layer` and `in_projector`: tensors in a file → their names in these modules; `around`:
    those outside of them. `output`: the matrix that makes the rows, and the dimension of these. `pieces`: tensors that
    are a part of one: which, and of how many. `unused`: tensors of which the text model has a copy. `others`: the
    beginnings of the names of tensors that are not for images. `wrapper`: the end of the names of matrices in layers
    that the names of their bounds lack.

    `config` and `processor` make settings from those of the file, `text` those of the text model from its settings
    alone and in its file, `entry` a tensor in the order of Hugging Face. `families`: other families by the architecture
    of the text model.
    """

    family: str
    texts: Mapping[str, str]
    text_names: tuple[str, str]
    tokens: tuple[str, ...]
    tower: str
    in_projector: Mapping[str, str]
    config: Callable[[EncoderFile], Object]
    processor: Callable[[EncoderFile], Object]
    layers: str = "encoder.layers."
    projector: str = "multi_modal_projector."
    in_tower: Mapping[str, str] = field(default_factory=lambda: AROUND)
    in_layer: Mapping[str, str] = field(default_factory=lambda: LAYER)
    around: Mapping[str, str] = field(default_factory=dict)
    output: tuple[str, int] = ("mm.2.weight", 0)
    entry: Callable[[EncoderFile, str, GgufTensor], GgufEntry] = plain
    text: Callable[[Object, EncoderFile, Mapping[str, object]], Object] = _same
    unused: tuple[str, ...] = ()
    families: Mapping[str, str] = field(default_factory=dict)
    pieces: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    wrapper: str = ""

    @cached_property
    def once(self) -> Mapping[str, str]:
        """The tensors outside of layers, and their names in Hugging Face."""
        parts = ((self.tower, self.in_tower), (self.projector, self.in_projector), ("", self.around))
        return {theirs: module + ours for module, names in parts for theirs, ours in names.items()}

    def name_of(self, stored: str, file: EncoderFile) -> str:
        """Return the name of a tensor in Hugging Face; unknown names stay."""
        if stored in self.once:
            return self.once[stored]
        stem, _, end = stored.rpartition(".")
        if stem in self.once:
            return f"{self.once[stem]}.{end}"
        if stem.startswith(DEEP):
            layer, _, part = stem.removeprefix(DEEP).partition(".")
            known = layer.isdecimal() and len(layer) < 6 and int(layer) in file.deep and part in DEEP_PARTS
            return f"{DEEP_LIST}{file.deep.index(int(layer))}.{DEEP_PARTS[part]}.{end}" if known else stored
        layer, _, part = stem.removeprefix(IN_LAYER).partition(".")
        if not stem.startswith(IN_LAYER) or not {part, f"{part}.{end}"} & self.in_layer.keys():
            return stored
        module = f"{self.tower}{self.layers}{layer}."
        if f"{part}.{end}" in self.in_layer:
            return module + self.in_layer[f"{part}.{end}"]
        name = self.in_layer[SWAPPED.get(part, part) if file.swaps else part]
        return f"{module}{name if end == WEIGHT else name.removesuffix(self.wrapper)}.{end}"

    def stored(self, name: str, file: EncoderFile) -> str:
        """Return the file's name for a tensor; the same name if files have no other."""
        stem, _, end = name.rpartition(".")
        whole, theirs = key_of(self.once, name), key_of(self.once, stem)
        if whole is not None or theirs is not None:
            return whole or f"{theirs}.{end}"
        module = self.tower + self.layers
        layer, _, inner = name.removeprefix(module).partition(".")
        if name.startswith(module) and (theirs := key_of(self.in_layer, inner)) is not None:
            return f"{IN_LAYER}{layer}.{theirs}"
        layer, _, part = stem.removeprefix(module).partition(".")
        theirs = key_of(self.in_layer, part if end == WEIGHT else part + self.wrapper)
        if not stem.startswith(module) or theirs is None:
            return name
        return f"{IN_LAYER}{layer}.{SWAPPED.get(theirs, theirs) if file.swaps else theirs}.{end}"


@dataclass(frozen=True, slots=True)
class OwnEncoder:
    """How the file of a text model has an image encoder: its tensors, and settings by the names that `kind` knows."""

    kind: Kind
    added: Callable[[Settings, Mapping[str, GgufTensor]], Object] = _no_more


WEIGHT: Final = "weight"
SWAPPED: Final = MappingProxyType({"ffn_down": "ffn_up", "ffn_up": "ffn_down"})
