"""The image encoder of Gemma 4: images of any size, layers like those of its text model, the average of nine patches.

A patch has two positions: its column and its row each add a row of a table, and the first half of each head rotates by
the column, the second half by the row. In the smaller models, the inputs and outputs of each matrix are limited.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import MAX_HEAD_DIM, MAX_HEADS, activation, num_layers
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part, WeightSource
from quire.compute.models.rope import plain_frequencies
from quire.compute.models.sublayers import AttentionSpec, MLPSpec, RopeSpec
from quire.compute.models.vision.common import HALF, Frequencies, Normalization, grid_rope, placeholder_of
from quire.compute.models.vision.spec import (
    MAX_PATCH_SIZE,
    MAX_PATCHES,
    Average,
    Matrix,
    Norm,
    Patches,
    Scale,
    VisionSpec,
)
from quire.core.images import CHANNELS

TOWER: Final = "model.vision_tower."
LAYER: Final = TOWER + "encoder.layers.{layer}."
PROJECTOR: Final = "model.embed_vision."
DEFAULTS: Final = MappingProxyType(
    {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12},
        **{"num_key_value_heads": 12, "head_dim": 64, "pooling_kernel_size": 3, "patch_size": 16},
        **{"position_embedding_size": 10_240, "rope_theta": 100.0},
    }
)
NORMS: Final = MappingProxyType(
    {
        Part.ATTENTION_NORM: LAYER + "input_layernorm",
        Part.AFTER_ATTENTION_NORM: LAYER + "post_attention_layernorm",
        Part.MLP_NORM: LAYER + "pre_feedforward_layernorm",
        Part.AFTER_MLP_NORM: LAYER + "post_feedforward_layernorm",
    }
)
MATRICES: Final = MappingProxyType(
    {
        Part.QUERY: LAYER + "self_attn.q_proj",
        Part.KEY: LAYER + "self_attn.k_proj",
        Part.VALUE: LAYER + "self_attn.v_proj",
        Part.OUTPUT: LAYER + "self_attn.o_proj",
        Part.GATE: LAYER + "mlp.gate_proj",
        Part.UP: LAYER + "mlp.up_proj",
        Part.DOWN: LAYER + "mlp.down_proj",
    }
)
HEAD_NORMS: Final = MappingProxyType(
    {Part.QUERY_NORM: LAYER + "self_attn.q_norm", Part.KEY_NORM: LAYER + "self_attn.k_norm"}
)
UNCHANGED: Final = MappingProxyType({"image_mean": [0.0] * CHANNELS, "image_std": [1.0] * CHANNELS})
MAX_MERGE: Final = 16
USUAL_TOKENS: Final = 280
EPSILON: Final = 1e-6


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    vision.require("model_type", "gemma4_vision", None)
    patches = _patches(vision, settings)
    tower = _tower(vision, patches)
    size = tower.hidden_size
    vectors = (TOWER + "std_bias", TOWER + "std_scale") if vision.flag("standardize", False) else ("", "")
    return VisionSpec(
        placeholder=placeholder_of(config, text, 258_880),
        patches=patches,
        tower=tower,
        connector=(
            Average(patches.merge**2),
            Scale(size**0.5, *vectors),
            Norm("", tower.norm, size),
            Matrix.of(PROJECTOR + "embedding_projection", text.hidden_size, size, bias=False),
        ),
        rescale=unchanged_colours(settings),
        mean=HALF,
        deviation=HALF,
        prefixes=(TOWER, PROJECTOR),
    )


def unchanged_colours(settings: ConfigFile) -> float:
    """Return the factor of pixels; raises if the makers' processor normalises them: the model itself does."""
    if settings.flag("do_normalize", False):
        for field, numbers in UNCHANGED.items():
            if settings.fields.get(field, numbers) != numbers:
                raise settings.error(field, f"{numbers}: the model itself normalises pixels")
    return Normalization.read(settings, HALF, HALF).rescale


def most_tokens(settings: ConfigFile, merge: int) -> int:
    """Return the most rows of an image, each of which stands for a square of patches."""
    return settings.size("max_soft_tokens", USUAL_TOKENS, high=MAX_PATCHES // merge**2)


def _patches(vision: ConfigFile, settings: ConfigFile) -> Patches:
    size, merge = vision.size("patch_size", high=MAX_PATCH_SIZE), vision.size("pooling_kernel_size", high=MAX_MERGE)
    num_tokens = most_tokens(settings, merge)
    num_positions = vision.size("position_embedding_size", high=MAX_LENGTH)
    if num_positions < num_tokens * merge:
        raise vision.error("position_embedding_size", f"at least {num_tokens * merge}, the patches of a long image")
    stem = TOWER + "patch_embedder."
    return Patches(
        size,
        merge,
        Matrix.of(stem + "input_proj", vision.size("hidden_size"), CHANNELS * size**2, bias=False),
        None,
        num_tokens * merge**2,
        positions=stem + "position_embedding_table",
        positions_parts=num_positions,
        colours_last=True,
    )


def _tower(vision: ConfigFile, patches: Patches) -> DecoderSpec:
    heads, head_dim = vision.size("num_attention_heads", high=MAX_HEADS), vision.size("head_dim", high=MAX_HEAD_DIM)
    if head_dim % 4:
        raise vision.error("head_dim", "a multiple of 4")
    if vision.flag("attention_bias", False):
        raise vision.error("attention_bias", "false")
    norm = NormSpec(NormKind.RMS, vision.number("rms_norm_eps", EPSILON))
    attention = AttentionSpec(
        heads,
        vision.size("num_key_value_heads", high=MAX_HEADS),
        head_dim,
        scale=1.0,
        qk_norm=norm,
        value_norm=True,
        bidirectional=True,
    )
    return DecoderSpec(
        vocab_size=0,
        hidden_size=vision.size("hidden_size"),
        context_length=patches.max_rows,
        norm=norm,
        attention=attention,
        mlp=MLPSpec(vision.size("intermediate_size"), activation(vision, "hidden_activation", "gelu_pytorch_tanh")),
        layers=(LayerSpec(window=None, rope=_rope(vision, head_dim)),) * num_layers(vision),
        sources=_sources(vision.flag("use_clipped_linears", False), head_dim),
        tied_head=True,
        final_norm=False,
        norm_after=True,
    )


def _rope(vision: ConfigFile, head_dim: int) -> RopeSpec:
    vision.section("rope_parameters").require("rope_type", "axial", "default", None)

    def frequencies(base: float) -> tuple[Frequencies, Frequencies]:
        usual = plain_frequencies(base, head_dim // 2)
        return usual, usual

    rope = grid_rope(vision, frequencies)
    return replace(rope, axes=tuple(1 - axis for axis in rope.axes))  # columns first


def _sources(are_bounded: bool, head_dim: int) -> MappingProxyType[Part, WeightSource]:
    turned = {Part.QUERY, Part.KEY}
    matrices = {
        part: WeightSource(
            f"{stem}.linear", halves=head_dim if part in turned else 0, bounds=stem if are_bounded else ""
        )
        for part, stem in MATRICES.items()
    }
    norms = {part: WeightSource(stem, halves=head_dim) for part, stem in HEAD_NORMS.items()}
    return MappingProxyType({**{part: WeightSource(stem) for part, stem in NORMS.items()}, **matrices, **norms})
