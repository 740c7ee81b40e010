"""Decoder specs that no family of ours uses yet, with random weights: every option of a spec is run by some test."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from quire.compute.models.base import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormKind,
    NormSpec,
    Part,
    RopeSpec,
)
from quire.compute.weights.decoder_weights import expected_tensors
from support.tiny_checkpoint import write_model_weights

ONCE = (Part.EMBEDDING, Part.POSITIONS, Part.FINAL_NORM, Part.HEAD)
NAMES = MappingProxyType({part: part.value if part in ONCE else f"{part.value}.{{layer}}" for part in Part})
FULL, NEAR = LayerSpec(None, RopeSpec(10_000.0, 16)), LayerSpec(20, RopeSpec(500.0, 16))
PLAIN = DecoderSpec(
    vocab_size=64,
    hidden_size=32,
    context_length=512,
    norm=NormSpec(NormKind.RMS, 1e-6),
    attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25),
    mlp=MLPSpec(48, Activation.SILU),
    layers=(FULL, FULL),
    names=NAMES,
)
SPECS = {
    "plain": PLAIN,
    # As in Gemma 2: 1 + w norms on both sides, soft caps, scaled embedding, alternating windows.
    "caps": replace(
        PLAIN,
        norm=NormSpec(NormKind.RMS, 1e-6, unit_offset=True),
        norm_after=True,
        attention=replace(PLAIN.attention, score_soft_cap=5.0, scale=0.3),
        mlp=MLPSpec(48, Activation.GELU_TANH),
        layers=(NEAR, FULL, NEAR, FULL),
        tied_head=True,
        embedding_scale=32**0.5,
        logit_soft_cap=3.0,
    ),
    # As in OPT: layer norms and biases, learned positions with an offset, a plain MLP.
    "learned": replace(
        PLAIN,
        norm=NormSpec(NormKind.LAYER, 1e-5),
        attention=replace(PLAIN.attention, num_kv_heads=4, bias=True, output_bias=True),
        mlp=MLPSpec(48, Activation.RELU, gated=False, bias=True),
        layers=(LayerSpec(None, None),) * 2,
        learned_positions=2,
    ),
    # As in OLMo 2 and Phi: norms after the sublayers only, part of each head rotates, one kv head.
    "partial": replace(
        PLAIN,
        norm_before=False,
        norm_after=True,
        attention=replace(PLAIN.attention, num_kv_heads=1, qk_norm=NormSpec(NormKind.LAYER, 1e-5)),
        layers=(LayerSpec(None, RopeSpec(10_000.0, 6)), LayerSpec(7, RopeSpec(10_000.0, 6))),
    ),
}


def write_spec_model(folder: Path, spec: DecoderSpec) -> dict[str, NDArray[np.float32]]:
    """Write random weights for a spec into a folder and return them."""
    random = np.random.default_rng(0)
    tensors = {name: _random_tensor(shape, random) for name, shape in expected_tensors(spec).items()}
    write_model_weights(folder, tensors)
    return tensors


def _random_tensor(shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    noise = random.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return np.float32(0.5) + np.float32(0.2) * noise
    return noise * np.float32(1.5 / np.sqrt(shape[-1]))
