"""Decoder specs that no family of ours uses yet, with random weights: every option of a spec is run by some test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.parts import STREAM_INS, STREAM_OUTS, NormKind, NormScope, NormSpec, Part, WeightSource
from quire.compute.models.recurrent import ConvolutionSpec, DeltaSpec, MambaSpec
from quire.compute.models.source import ModelFolder
from quire.compute.models.sublayers import (
    Activation,
    AttentionSpec,
    ExpertsSpec,
    LatentSpec,
    LayerInputsSpec,
    MLPSpec,
    RopeSpec,
    Scoring,
    StreamsSpec,
)
from quire.compute.torch.missing import missing
from quire.compute.weights.decoder_weights import expected_tensors
from quire.core.kv_spec import KVHeads
from support.tiny_checkpoint import write_model_weights

ONCE = (
    *(
        Part.EMBEDDING,
        Part.TOKEN_NORM,
        Part.STATE_NORM,
        Part.EMBEDDING_IN,
        Part.POSITIONS,
        Part.FINAL_NORM,
        Part.EMBEDDING_OUT,
        Part.HEAD,
    ),
    *(Part.LAYER_EMBEDDING, Part.LAYER_INPUTS, Part.LAYER_INPUTS_NORM, Part.TOKEN_TYPES, Part.EMBEDDING_NORM),
    *(Part.DISTANCE_BIAS, *STREAM_INS, *STREAM_OUTS),
)
HEAD_NORMS = (Part.QUERY_NORM, Part.KEY_NORM)
OF_EXPERTS = (Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN)


def rope(base: float, rotary_dim: int, scale: float = 1.0) -> RopeSpec:
    """Return plain rotary positions."""
    frequencies = base ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return RopeSpec(rotary_dim, tuple(map(float, frequencies.astype(np.float32))), scale)


def _stem(part: Part) -> str:
    layer = "" if part in ONCE else ".{layer}"
    return f"model.{part.value}{layer}" + (".{expert}" if part in OF_EXPERTS else "")


SOURCES = MappingProxyType({part: WeightSource(_stem(part)) for part in Part})
FULL, NEAR = LayerSpec(None, rope(10_000.0, 16)), LayerSpec(20, rope(500.0, 16))
NO_ROPE, RECURRENT = LayerSpec(None, None), LayerSpec(None, None, recurrent=True)
PLAIN = DecoderSpec(
    vocab_size=64,
    hidden_size=32,
    context_length=512,
    norm=NormSpec(NormKind.RMS, 1e-6),
    attention=AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25),
    mlp=MLPSpec(48, Activation.SILU),
    layers=(FULL, FULL),
    sources=SOURCES,
)
LATENT = LatentSpec(rank=32, rope_dim=16, plain_dim=12, value_dim=16, norm=NormSpec(NormKind.RMS, 1e-6))
LATENT_SOURCES = SOURCES | {
    Part.KEY_UP: WeightSource("model.key_value_up.{layer}", run=12, period=28),
    Part.VALUE_UP: WeightSource("model.key_value_up.{layer}", first_row=12, run=16, period=28),
}
SCORED_EXPERTS = ExpertsSpec(
    num_experts=6,
    experts_per_token=2,
    intermediate_size=16,
    normalize_weights=True,
    scoring=Scoring.SIGMOID,
    scale=1.5,
    offset=True,
    num_groups=3,
    groups_per_token=2,
    group_best=2,
    shared_size=16,
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
    # As in Arcee: a plain MLP, whose activation is squared.
    "squared": replace(PLAIN, mlp=MLPSpec(48, Activation.RELU_SQUARED, gated=False)),
    # As in Apertus: a plain MLP, whose activation has numbers of its own in each layer.
    "xielu": replace(PLAIN, mlp=MLPSpec(48, Activation.XIELU, gated=False, bias=True)),
    # As in OLMo 2 and Phi: norms after the sublayers only, part of each head rotates, one kv head.
    "partial": replace(
        PLAIN,
        norm_before=False,
        norm_after=True,
        attention=replace(PLAIN.attention, num_kv_heads=1, qk_norm=NormSpec(NormKind.LAYER, 1e-5)),
        layers=(LayerSpec(None, rope(10_000.0, 6)), LayerSpec(7, rope(10_000.0, 6))),
    ),
    # As in OLMo 2: norms on all queries and on all keys of a token, none before a sublayer, layers without rope.
    "whole-norms": replace(
        PLAIN,
        norm_before=False,
        norm_after=True,
        attention=replace(PLAIN.attention, qk_norm=NormSpec(NormKind.RMS, 1e-6), qk_norm_scope=NormScope.ALL_HEADS),
        layers=(NEAR, NO_ROPE),
    ),
    # As in Hunyuan: heads are normalised after they rotate.
    "norms-after-rope": replace(
        PLAIN,
        attention=replace(PLAIN.attention, qk_norm=NormSpec(NormKind.RMS, 1e-6), rotates_first=True),
        layers=(LayerSpec(20, rope(10_000.0, 12)), NO_ROPE),
    ),
    # As in Command R+: both sublayers read one layer norm without bias, each head has its own norm, neighbours turn
    # together, logits are scaled. As in Command A+: the second one can be experts next to an MLP.
    "parallel": replace(
        PLAIN,
        norm=NormSpec(NormKind.LAYER, 1e-5, bias=False),
        parallel=True,
        shared_norm=True,
        attention=replace(
            PLAIN.attention,
            qk_norm=NormSpec(NormKind.LAYER, 1e-5, bias=False),
            qk_norm_scope=NormScope.EACH_HEAD,
            bias=True,
        ),
        layers=(LayerSpec(20, rope(10_000.0, 12)), replace(NO_ROPE, sparse=True)),
        experts=ExpertsSpec(
            num_experts=4, experts_per_token=2, intermediate_size=16, normalize_weights=True, shared_size=32
        ),
        tied_head=True,
        logit_scale=0.0625,
        sources=SOURCES
        | {part: replace(SOURCES[part], adjacent=(16, 12)) for part in (Part.QUERY, Part.KEY, *HEAD_NORMS)},
    ),
    # As in GPT-NeoX and Falcon: both sublayers read the same stream, each by a norm; queries, keys and values take
    # turns in one tensor; the head has a bias. As in Granite: what is added to the stream is scaled.
    "turns": replace(
        PLAIN,
        norm=NormSpec(NormKind.LAYER, 1e-5),
        norm_after=True,
        parallel=True,
        residual_scale=0.22,
        attention=replace(PLAIN.attention, bias=True, output_bias=True),
        mlp=MLPSpec(48, Activation.GELU, gated=False, bias=True),
        layers=(LayerSpec(None, rope(10_000.0, 4)),) * 2,
        head_bias=True,
        sources=SOURCES
        | {
            Part.QUERY: WeightSource("model.qkv.{layer}", run=32, period=64),
            Part.KEY: WeightSource("model.qkv.{layer}", first_row=32, run=16, period=64),
            Part.VALUE: WeightSource("model.qkv.{layer}", first_row=48, run=16, period=64),
        },
    ),
    # As in OPT-350m: norms on the residual stream and none before the head, small embeddings projected in and out.
    "joined": replace(
        PLAIN,
        norm=NormSpec(NormKind.LAYER, 1e-5),
        norm_before=False,
        norm_joined=True,
        final_norm=False,
        embedding_size=24,
        mlp=MLPSpec(48, Activation.RELU, gated=False, bias=True),
        layers=(NO_ROPE,) * 2,
        learned_positions=2,
        tied_head=True,
    ),
    # As in Phi-3: query, key and value in one tensor, gate and up in another; part of a head turns, and is scaled.
    "fused": replace(
        PLAIN,
        layers=(LayerSpec(None, rope(10_000.0, 12, scale=1.19)),) * 2,
        sources=SOURCES
        | {
            Part.QUERY: WeightSource("model.qkv.{layer}"),
            Part.KEY: WeightSource("model.qkv.{layer}", first_row=64),
            Part.VALUE: WeightSource("model.qkv.{layer}", first_row=96),
            Part.GATE: WeightSource("model.gate_up.{layer}"),
            Part.UP: WeightSource("model.gate_up.{layer}", first_row=48),
        },
    ),
    # As in Ministral 3: queries grow with their position. In the second layer, a part of each head does not turn.
    "growing": replace(
        PLAIN,
        layers=(
            replace(FULL, rope=replace(rope(10_000.0, 16), query_growth=0.5, growth_length=16)),
            LayerSpec(20, replace(rope(500.0, 12, scale=1.1), query_growth=0.25, growth_length=5)),
            NO_ROPE,
        ),
    ),
    # As in Llama 4: chunks, also shorter than a tile; a layer without positions, whose queries grow and have no norm;
    # experts whose inputs are weighed.
    "chunks": replace(
        PLAIN,
        attention=replace(PLAIN.attention, qk_norm=NormSpec(NormKind.RMS, 1e-6), rotates_first=True, chunked=True),
        layers=(
            replace(NEAR, sparse=True),
            LayerSpec(None, RopeSpec(0, (), query_growth=0.5, growth_length=16, growth_offset=1), head_norms=False),
            replace(NEAR, window=72),
        ),
        experts=ExpertsSpec(
            *(4, 2, 16),
            normalize_weights=False,
            scoring=Scoring.SIGMOID,
            shared_size=24,
            weighs_inputs=True,
        ),
    ),
    # As in GPT-2: the same, with biases, and all matrices of a layer stored as [in, out].
    "transposed": replace(
        PLAIN,
        norm=NormSpec(NormKind.LAYER, 1e-5),
        attention=replace(PLAIN.attention, num_kv_heads=4, bias=True, output_bias=True),
        mlp=MLPSpec(48, Activation.GELU_TANH, gated=False, bias=True),
        layers=(NO_ROPE,) * 2,
        learned_positions=0,
        tied_head=True,
        optional_prefix="model.",
        sources=SOURCES
        | {
            Part.QUERY: WeightSource("model.qkv.{layer}", transposed=True),
            Part.KEY: WeightSource("model.qkv.{layer}", first_row=64, transposed=True),
            Part.VALUE: WeightSource("model.qkv.{layer}", first_row=128, transposed=True),
            Part.OUTPUT: WeightSource("model.output.{layer}", transposed=True),
            Part.UP: WeightSource("model.up.{layer}", transposed=True),
            Part.DOWN: WeightSource("model.down.{layer}", transposed=True),
        },
    ),
    # As in Qwen3-MoE: experts in some layers, their weights normalised.
    "experts": replace(
        PLAIN,
        layers=(replace(FULL, sparse=True), FULL, replace(NEAR, sparse=True)),
        experts=ExpertsSpec(num_experts=8, experts_per_token=3, intermediate_size=16, normalize_weights=True),
    ),
    # As in Qwen2-MoE: experts next to an MLP for every token, whose output has a weight of its own.
    "shared-expert": replace(
        PLAIN,
        attention=replace(PLAIN.attention, bias=True),
        layers=(replace(FULL, sparse=True), FULL),
        experts=ExpertsSpec(
            num_experts=6,
            experts_per_token=2,
            intermediate_size=16,
            normalize_weights=False,
            shared_size=32,
            shared_router=True,
        ),
    ),
    # As in GLM-4.5: each expert scored alone, and chosen among groups with a number added.
    "scored-experts": replace(
        PLAIN,
        layers=(FULL, replace(FULL, sparse=True)),
        experts=SCORED_EXPERTS,
    ),
    # As in PhiMoE: experts chosen one after another, each weighed among those with a similar score.
    "mixed-experts": replace(
        PLAIN,
        norm=NormSpec(NormKind.LAYER, 1e-5),
        layers=(FULL, replace(FULL, sparse=True)),
        experts=ExpertsSpec(
            num_experts=4,
            experts_per_token=2,
            intermediate_size=16,
            normalize_weights=False,
            scoring=Scoring.SPARSE_MIXER,
            margin=0.5,
            scale=1.5,
            shared_size=16,
        ),
    ),
    # Plain experts next to an MLP, all with that have biases and no gate.
    "shared-plain": replace(
        PLAIN,
        mlp=MLPSpec(48, Activation.RELU, gated=False, bias=True),
        layers=(replace(FULL, sparse=True),),
        experts=ExpertsSpec(4, experts_per_token=2, intermediate_size=16, normalize_weights=True, shared_size=24),
    ),
    # As in gpt-oss: a sink in each head, windows in every other layer, experts and router with biases, a clamped gate.
    # Larger norms than there, so that some numbers reach the clamps.
    "sinks": replace(
        PLAIN,
        norm=NormSpec(NormKind.RMS, 1e-5, unit_offset=True),
        attention=replace(PLAIN.attention, bias=True, output_bias=True, sinks=True),
        mlp=MLPSpec(16, Activation.CLAMPED_SWIGLU),
        layers=(replace(NEAR, sparse=True), replace(FULL, sparse=True)),
        experts=ExpertsSpec(4, experts_per_token=3, intermediate_size=16, normalize_weights=True, bias=True),
    ),
    # As in Qwen3.5: linear attention with states, next to attention with a gate.
    "recurrent": replace(
        PLAIN,
        norm=NormSpec(NormKind.RMS, 1e-6, unit_offset=True),
        attention=replace(PLAIN.attention, gated=True, qk_norm=NormSpec(NormKind.RMS, 1e-6, unit_offset=True)),
        layers=(RECURRENT, RECURRENT, FULL, RECURRENT, RECURRENT, NEAR),
        delta=DeltaSpec(*(6, 2, 32, 80), filter_width=3, norm=NormSpec(NormKind.RMS, 1e-5), outputs_in_turns=True),
    ),
    # The same with experts, a value for each key, and a filter of one token; as in OLMo Hybrid, larger rates, and norms
    # after the sublayers of a layer with attention.
    "recurrent-experts": replace(
        PLAIN,
        layers=(replace(RECURRENT, sparse=True), replace(FULL, norms_after=True)),
        delta=DeltaSpec(*(2, 2, 48, 16), filter_width=1, norm=NormSpec(NormKind.RMS, 1e-6), rate_scale=2.0),
        experts=ExpertsSpec(num_experts=4, experts_per_token=2, intermediate_size=16, normalize_weights=True),
    ),
    # As in DeepSeek-V2: a latent of each token for all heads, experts next to an MLP for every token, in the best
    # groups of experts; neighbours turn together, in the last numbers of a head.
    "latent": replace(
        PLAIN,
        attention=AttentionSpec(4, num_kv_heads=1, head_dim=48, scale=0.2, latent=LATENT),
        layers=(FULL, replace(FULL, sparse=True), replace(NEAR, sparse=True)),
        experts=ExpertsSpec(
            num_experts=8,
            experts_per_token=3,
            intermediate_size=16,
            normalize_weights=False,
            scale=1.5,
            num_groups=4,
            groups_per_token=2,
            shared_size=24,
        ),
        sources=LATENT_SOURCES
        | {
            Part.QUERY: WeightSource("model.query.{layer}", adjacent=(28, 16), adjacent_from=12),
            Part.LATENT: WeightSource("model.latent.{layer}", adjacent=(48, 16), adjacent_from=32),
        },
    ),
    # As in DeepSeek-V3: queries from a few numbers, each expert scored alone, and chosen with a number added.
    "latent-queries": replace(
        PLAIN,
        attention=AttentionSpec(
            *(6, 1, 48),
            scale=0.3,
            bias=True,
            output_bias=True,
            score_soft_cap=5.0,
            latent=replace(LATENT, query_rank=24),
        ),
        layers=(replace(FULL, sparse=True), NO_ROPE),
        experts=replace(SCORED_EXPERTS, scale=2.5),
        sources=LATENT_SOURCES,
    ),
    # As in Granite 4 H, state-space layers next to attention without positions; as in Nemotron-H, layers with one
    # sublayer, and experts; as in Falcon-H1, attention that reads the rows of the states before it.
    "mamba": replace(
        PLAIN,
        layers=(
            *(replace(NO_ROPE, transforms=False), RECURRENT),
            *(replace(RECURRENT, transforms=False), replace(FULL, skips_previous=True)),
            replace(NO_ROPE, attends=False, sparse=True),
        ),
        mamba=MambaSpec(*(8, 2, 32, 112), filter_width=3, norm=NormSpec(NormKind.RMS, 1e-5)),
        experts=ExpertsSpec(4, experts_per_token=2, intermediate_size=16, normalize_weights=True, shared_size=16),
    ),
    # Short convolutions next to attention with a window, whose gate is one number for each head.
    "convolution": replace(
        PLAIN,
        attention=replace(PLAIN.attention, gated=True),
        layers=(RECURRENT, FULL, RECURRENT, NEAR),
        convolution=ConvolutionSpec(96, 3),
        norm_after=True,
        sources=SOURCES | {Part.ATTENTION_GATE: WeightSource(_stem(Part.ATTENTION_GATE), repeats=16)},
    ),
    # Layers with other heads, with keys that are also the values, and with the keys of others; inputs for each layer.
    "mixed-layers": replace(
        PLAIN,
        attention=replace(PLAIN.attention, qk_norm=PLAIN.norm, value_norm=True, output_bias=True),
        layers=(
            NEAR,
            replace(NEAR, heads=KVHeads(4, 16)),
            replace(FULL, heads=KVHeads(1, 32), keys_are_values=True),
            replace(NEAR, keys_of=0, intermediate_size=80),
            replace(NO_ROPE, heads=KVHeads(1, 32), keys_of=2),
            replace(NEAR, heads=KVHeads(4, 16), keys_of=1),
        ),
        layer_inputs=LayerInputsSpec(16, embedding_scale=4.0, input_scale=0.2, scale=0.7),
        layer_scale=True,
        tied_head=True,
    ),
    # As in Gemma 3n: four residual streams, LAuReL, thresholds of gates, a table of layer inputs for most tokens.
    "streams": replace(
        PLAIN,
        attention=replace(PLAIN.attention, qk_norm=PLAIN.norm, value_norm=True),
        mlp=MLPSpec(48, Activation.GELU_TANH),
        layers=(
            replace(NEAR, gate_threshold=1.2),
            replace(FULL, intermediate_size=72),
            replace(NEAR, keys_of=0, gate_threshold=0.0),
            replace(FULL, keys_of=1),
        ),
        norm_after=True,
        layer_inputs=LayerInputsSpec(16, embedding_scale=4.0, input_scale=0.2, scale=0.7, num_tokens=60),
        streams=StreamsSpec(),
        laurel_rank=8,
        tied_head=True,
    ),
    # Experts and an MLP next to them that each have norms, factors of experts.
    "own-norms": replace(
        PLAIN,
        layers=(replace(FULL, sparse=True), FULL),
        experts=ExpertsSpec(
            num_experts=5,
            experts_per_token=2,
            intermediate_size=16,
            normalize_weights=True,
            shared_size=40,
            own_norms=True,
            score_scale=0.3,
            factors=True,
        ),
        norm_after=True,
    ),
    # Experts without a gate and with an exact GELU, their weights as the softmax gives them.
    "raw-experts": replace(
        PLAIN,
        mlp=MLPSpec(48, Activation.GELU, gated=False),
        layers=(replace(FULL, sparse=True),) * 2,
        experts=ExpertsSpec(num_experts=5, experts_per_token=2, intermediate_size=16, normalize_weights=False),
    ),
}

ENCODERS = {
    # As in XLM-RoBERTa: norms on the residual stream and on the embedding, learned positions and token types.
    "bert": replace(
        PLAIN,
        norm=NormSpec(NormKind.LAYER, 1e-6),
        attention=AttentionSpec(4, 4, 8, 8**-0.5, bias=True, output_bias=True, bidirectional=True),
        mlp=MLPSpec(48, Activation.GELU, gated=False, bias=True),
        layers=(NO_ROPE, NO_ROPE),
        tied_head=True,
        norm_before=False,
        norm_joined=True,
        final_norm=False,
        learned_positions=2,
        token_types=2,
        separator=9,
        embedding_norm=True,
    ),
    # As in EmbeddingGemma: windows to both sides, and fewer key-value heads.
    "near": replace(
        PLAIN,
        attention=replace(PLAIN.attention, bidirectional=True),
        layers=(NEAR, FULL, NEAR),
        tied_head=True,
        norm_after=True,
    ),
    # As in ModernBERT: other positions in layers with windows, and no norm before the first attention.
    "modern": replace(
        PLAIN,
        norm=NormSpec(NormKind.LAYER, 1e-6, bias=False),
        attention=replace(PLAIN.attention, bidirectional=True),
        mlp=MLPSpec(48, Activation.GELU),
        layers=(replace(FULL, attention_norm=False), NEAR, FULL),
        tied_head=True,
        embedding_norm=True,
    ),
    # As in MPNet: biases by distance; here also with windows, soft caps and fewer key-value heads.
    "distances": replace(
        PLAIN,
        attention=replace(PLAIN.attention, bidirectional=True, distance_bias=True, score_soft_cap=4.0),
        layers=(FULL, NEAR),
        tied_head=True,
    ),
}
"""Specs whose texts must be computed in one step."""

ON_TORCH = tuple(name for name, spec in SPECS.items() if not missing(spec))
"""Those that the torch engine runs."""
WITHOUT_LATENTS = tuple(name for name, spec in SPECS.items() if spec.attention.latent is None)
"""Those whose keys and values may have fewer bits than bfloat16."""


def write_spec_model(folder: Path, spec: DecoderSpec) -> dict[str, NDArray[np.float32]]:
    """Write random weights for a spec into a folder and return them."""
    tensors = random_tensors(expected_tensors(spec))
    write_model_weights(folder, tensors)
    return tensors


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
    """Return random weights of these shapes, by name."""
    random = np.random.default_rng(0)
    return {name: _random_tensor(shape, random) for name, shape in shapes.items()}


def write_model_of(folder: Path, config: Mapping[str, object]) -> Path:
    """Write a folder with these settings and random weights, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_spec_model(folder, read_model(ModelFolder(folder)).spec)
    return folder


def _random_tensor(shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    noise = random.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return np.float32(0.5) + np.float32(0.2) * noise
    return noise * np.float32(1.5 / np.sqrt(shape[-1]))
