"""The code that image encoders share: vision transformers like CLIP and SigLIP, and the normalisation of pixels.

Both are encoders with layer norms before sublayers, biases and learned positions. CLIP has a vector before all
patches, a norm before its layers, and no bias in the matrix of its patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import activation as usual_activation
from quire.compute.models.common import divided_head_dim, num_layers, stem_sources
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.sublayers import Activation, AttentionSpec, MLPSpec, RopeSpec
from quire.compute.models.vision.spec import MAX_IMAGE_SIZE, MAX_PATCH_SIZE, MAX_PATCHES, Matrix, Patches
from quire.core.images import CHANNELS

USUAL_RESCALE: Final = 1 / 255
HALF: Final = (0.5, 0.5, 0.5)
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)
USUAL_BASE: Final = 10_000.0
MOST: Final = 1e6
LEAST_DEVIATION: Final = 1e-6
Frequencies: TypeAlias = tuple[float, ...]
QUICK_GELU: Final = "quick_gelu"


@dataclass(frozen=True, slots=True)
class Normalization:
    """How the numbers of pixels become those of rows: times `rescale`, minus `mean`, divided by `deviation`."""

    rescale: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @classmethod
    def read(cls, settings: ConfigFile, mean: tuple[float, ...], deviation: tuple[float, ...]) -> Normalization:
        """Return the settings; `mean` and `deviation` replace missing ones."""
        rescale = settings.number("rescale_factor", USUAL_RESCALE) if settings.flag("do_rescale", True) else 1.0
        if not settings.flag("do_normalize", True):
            return cls(rescale, (0.0,) * CHANNELS, (1.0,) * CHANNELS)
        return cls(
            rescale,
            _colours(settings, "image_mean", mean, -MOST),
            _colours(settings, "image_std", deviation, LEAST_DEVIATION),
        )


def _colours(settings: ConfigFile, field: str, default: tuple[float, ...], low: float) -> tuple[float, ...]:
    """Return a number for each colour, not below `low`."""
    numbers = settings.fields[field] if settings.is_set(field) else list(default)
    if (
        not isinstance(numbers, list)
        or len(numbers) != CHANNELS
        or not all(type(number) in (int, float) and low <= number <= MOST for number in numbers)
    ):
        raise settings.error(field, f"{CHANNELS} numbers from {low:g} to {MOST:g}, one for each colour")
    return tuple(map(float, numbers))


def activation(config: ConfigFile, field: str, default: str) -> Activation:
    """Return an activation; the default replaces a missing field or null."""
    if (config.fields[field] if config.is_set(field) else default) == QUICK_GELU:
        return Activation.QUICK_GELU
    return usual_activation(config, field, default)


def grid_rope(config: ConfigFile, frequencies: Callable[[float], tuple[Frequencies, Frequencies]]) -> RopeSpec:
    """Return rotary positions by row and column, whose frequencies for each depend on the base in the settings."""
    section = config.section("rope_parameters")
    base = section.number("rope_theta", config.number("rope_theta", USUAL_BASE))
    by_row, by_column = frequencies(base)
    if not all(map(math.isfinite, by_row + by_column)):
        raise config.error("rope_theta", "a value that gives finite frequencies")
    axes = (0,) * len(by_row) + (1,) * len(by_column)
    return RopeSpec(2 * len(axes), by_row + by_column, axes=axes)


def placeholder_of(config: ConfigFile, text: DecoderSpec, usual: int) -> int:
    """Return the token that stands for a row of an image; it has one of two names."""
    field = "image_token_index" if config.is_set("image_token_index") else "image_token_id"
    return config.size(field, usual, low=0, high=text.vocab_size - 1)


def require_colours(config: ConfigFile, field: str = "num_channels") -> None:
    """Raise unless images have three colours."""
    if config.size(field, CHANNELS) != CHANNELS:
        raise config.error(field, str(CHANNELS))


def square_patches(config: ConfigFile, prefix: str, merge: int, *, first: str = "", bias: bool = True) -> Patches:
    """Return the patches of images that all have the same height and width; their tensors have this prefix."""
    require_colours(config)
    size, image_size = config.size("patch_size", high=MAX_PATCH_SIZE), config.size("image_size", high=MAX_IMAGE_SIZE)
    side = image_size // size
    if not side or side % merge or side**2 > MAX_PATCHES:
        allowed = f"at most {MAX_PATCHES} patches of {size} pixels, a multiple of {merge} per side"
        raise config.error("image_size", allowed)
    stem = prefix + "patch_embedding"
    shape = (config.size("hidden_size"), CHANNELS, size, size)
    matrix = Matrix(f"{stem}.weight", shape, f"{stem}.bias" if bias else "")
    return Patches(size, merge, matrix, image_size, side**2, prefix + "position_embedding.weight", first)


def vision_transformer(
    config: ConfigFile, stems: Mapping[Part, str], epsilon: float, patches: Patches, usual: str
) -> DecoderSpec:
    """Return a tower like CLIP or SigLIP, for settings in which it has a `layer_norm_eps` of `epsilon` by default.

    `usual`: its activation by default. The norms before and after all layers are those that `stems` has.
    """
    heads, head_dim = config.size("num_attention_heads"), divided_head_dim(config, "hidden_size", "num_attention_heads")
    return DecoderSpec(
        vocab_size=0,
        hidden_size=config.size("hidden_size"),
        context_length=patches.max_rows,
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_eps", epsilon)),
        attention=AttentionSpec(
            heads, heads, head_dim, head_dim**-0.5, bias=True, output_bias=True, bidirectional=True
        ),
        mlp=MLPSpec(config.size("intermediate_size"), activation(config, "hidden_act", usual), gated=False, bias=True),
        layers=(LayerSpec(window=None, rope=None),) * num_layers(config),
        sources=stem_sources(stems),
        tied_head=True,
        final_norm=Part.FINAL_NORM in stems,
        embedding_norm=Part.EMBEDDING_NORM in stems,
    )


def layer_stems(prefix: str) -> Mapping[Part, str]:
    """Return the names of the parts of a layer in CLIP and SigLIP."""
    layer = prefix + "encoder.layers.{layer}."
    return MappingProxyType(
        {
            Part.ATTENTION_NORM: layer + "layer_norm1",
            Part.QUERY: layer + "self_attn.q_proj",
            Part.KEY: layer + "self_attn.k_proj",
            Part.VALUE: layer + "self_attn.v_proj",
            Part.OUTPUT: layer + "self_attn.out_proj",
            Part.MLP_NORM: layer + "layer_norm2",
            Part.UP: layer + "mlp.fc1",
            Part.DOWN: layer + "mlp.fc2",
        }
    )
