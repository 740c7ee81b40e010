"""The images of Gemma 4 12B: a patch of 48 × 48 pixels becomes a row by a matrix, between norms, without layers.

Its column and its row each add a row of a table, as in the other sizes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.parts import NormKind, NormSpec
from quire.compute.models.sublayers import Activation, AttentionSpec, MLPSpec
from quire.compute.models.vision.common import placeholder_of
from quire.compute.models.vision.gemma4 import EPSILON, MAX_MERGE, PROJECTOR, most_tokens, unchanged_colours
from quire.compute.models.vision.spec import MAX_PATCH_SIZE, Matrix, Norm, Patches, VisionSpec
from quire.core.images import CHANNELS

EMBEDDER: Final = "model.vision_embedder."
DEFAULTS: Final = MappingProxyType(
    {
        **{"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 3840, "mm_posemb_size": 1120},
        "output_proj_dims": 3840,
    }
)
PATCH_NORM: Final = NormSpec(NormKind.LAYER, 1e-5)


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of what makes rows of images; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    vision.require("model_type", "gemma4_unified_vision", None)
    patches = _patches(vision, settings)
    size = patches.matrix.num_outputs
    if vision.size("output_proj_dims") != size:
        raise vision.error("output_proj_dims", f"mm_embed_dim, which is {size}")
    norm = NormSpec(NormKind.RMS, vision.number("rms_norm_eps", EPSILON))
    return VisionSpec(
        placeholder=placeholder_of(config, text, 258_880),
        patches=patches,
        tower=_no_layers(patches, norm),
        connector=(
            Norm(EMBEDDER + "pos_norm", PATCH_NORM, size),
            Norm("", norm, size),
            Matrix.of(PROJECTOR + "embedding_projection", text.hidden_size, size, bias=False),
        ),
        rescale=unchanged_colours(settings),
        mean=(0.0,) * CHANNELS,
        deviation=(1.0,) * CHANNELS,
        prefixes=(EMBEDDER, PROJECTOR),
    )


def _patches(vision: ConfigFile, settings: ConfigFile) -> Patches:
    size = vision.size("patch_size", high=MAX_PATCH_SIZE) * vision.size("pooling_kernel_size", high=MAX_MERGE)
    if size > MAX_PATCH_SIZE:
        raise vision.error("patch_size", f"a cell of at most {MAX_PATCH_SIZE} pixels")
    num_tokens, num_numbers = most_tokens(settings, merge=1), CHANNELS * size**2
    num_positions, row = vision.size("mm_posemb_size", high=MAX_LENGTH), vision.size("mm_embed_dim")
    if num_positions < num_tokens:
        raise vision.error("mm_posemb_size", f"at least {num_tokens}, the patches of a long image")
    return Patches(
        size,
        1,
        Matrix.of(EMBEDDER + "patch_dense", row, num_numbers, bias=True),
        None,
        num_tokens,
        positions=EMBEDDER + "pos_embedding",
        positions_parts=num_positions,
        positions_axis=1,
        colours_last=True,
        norm_before=Norm(EMBEDDER + "patch_ln1", PATCH_NORM, num_numbers),
        norm_after=Norm(EMBEDDER + "patch_ln2", PATCH_NORM, row),
    )


def _no_layers(patches: Patches, norm: NormSpec) -> DecoderSpec:
    """Return a tower without layers; the settings of these have no meaning."""
    size = patches.matrix.num_outputs
    return DecoderSpec(
        vocab_size=0,
        hidden_size=size,
        context_length=patches.max_rows,
        norm=norm,
        attention=AttentionSpec(1, 1, size, 1.0, bidirectional=True),
        mlp=MLPSpec(size, Activation.GELU_TANH),
        layers=(),
        sources=MappingProxyType({}),
        tied_head=True,
        final_norm=False,
    )
