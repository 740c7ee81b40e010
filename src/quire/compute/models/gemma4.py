"""Gemma 4: wide heads in layers with full attention, and, in the small sizes, inputs of its own for each layer.

Layers with full attention have heads of `global_head_dim` numbers, perhaps another number of key-value heads, and
perhaps no values: then the keys, before they are normalised and rotated, are the values too (`attention_k_eq_v`). The
last `num_kv_shared_layers` layers attend to the keys and values of the last layer of their kind before them; their MLPs
can be twice as wide. transformers saves the heads of single layers as `per_layer_config`. One size has experts next to
the MLP of each layer; both have norms of their own.

The models are published with encoders of images (vision/gemma4.py) and sound; the weights for sound are ignored.
Tokens of an image attend to one another in the larger sizes, but only in layers with a window. In the smaller ones, the
inputs of layers for an image's rows are those of the padding token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import (
    LAYER,
    MAX_HEAD_DIM,
    MAX_HEADS,
    PREFIX,
    activation,
    llama_like,
    mixed_windows,
    num_layers,
    with_head_norms,
    with_stems,
)
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.gemma2 import STEMS as NORMS
from quire.compute.models.multimodal import below, text_config, with_other_tensors
from quire.compute.models.parts import Part
from quire.compute.models.rope import FULL, FULL_BASE, LOCAL_BASE, SLIDING, rope_spec
from quire.compute.models.sublayers import ExpertsSpec, LayerInputsSpec
from quire.core.kv_spec import KVHeads

ROPES: Final = "rope_parameters"
DEFAULTS: Final = MappingProxyType(
    {
        **{"vocab_size": 262_144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512},
        **{"max_position_embeddings": 131_072, "sliding_window": 512, "tie_word_embeddings": True},
        **{"hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0},
        ROPES: {
            SLIDING: {"rope_type": "default", "rope_theta": LOCAL_BASE},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": FULL_BASE},
        },
    }
)
STEMS: Final = MappingProxyType({**NORMS, Part.LAYER_SCALE: LAYER + "layer_scalar"})
INPUT_STEMS: Final = MappingProxyType(
    {
        Part.LAYER_EMBEDDING: PREFIX + "embed_tokens_per_layer",
        Part.LAYER_INPUTS: PREFIX + "per_layer_model_projection",
        Part.LAYER_INPUTS_NORM: PREFIX + "per_layer_projection_norm",
        Part.INPUT_GATE: LAYER + "per_layer_input_gate",
        Part.INPUT_OUTPUT: LAYER + "per_layer_projection",
        Part.AFTER_INPUT_NORM: LAYER + "post_per_layer_input_norm",
    }
)
EXPERT_STEMS: Final = MappingProxyType(
    {
        **{Part.SHARED_GATE: LAYER + "mlp.gate_proj", Part.SHARED_UP: LAYER + "mlp.up_proj"},
        Part.SHARED_DOWN: LAYER + "mlp.down_proj",
        Part.AFTER_SHARED_NORM: LAYER + "post_feedforward_layernorm_1",
        **{Part.ROUTER: LAYER + "router.proj", Part.ROUTER_NORM: LAYER + "router.scale"},
        Part.EXPERTS_NORM: LAYER + "pre_feedforward_layernorm_2",
        Part.EXPERT_FACTORS: LAYER + "router.per_expert_scale",
        **{
            part: LAYER + "experts.{expert}." + name
            for part, name in (
                (Part.EXPERT_GATE, "gate_proj"),
                (Part.EXPERT_UP, "up_proj"),
                (Part.EXPERT_DOWN, "down_proj"),
            )
        },
        Part.AFTER_EXPERTS_NORM: LAYER + "post_feedforward_layernorm_2",
    }
)
HEADS: Final = frozenset({"head_dim", "num_key_value_heads"})
UNUSED: Final = ("k_proj", "v_proj", "k_norm")
TEXT: Final = "model.language_model."
OTHERS: Final = tuple(
    f"model.{name}." for name in ("vision_tower", "vision_embedder", "embed_vision", "audio_tower", "embed_audio")
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Gemma 4 model, or of its text model; refuses settings that quire does not interpret."""
    return gemma4_like(config, DEFAULTS, max_length)


def gemma4_like(config: ConfigFile, defaults: Mapping[str, object], max_length: int | None) -> DecoderSpec:
    """Return the spec of a model whose settings have these defaults, or of its text model."""
    if not config.is_set("text_config"):
        return _text_spec(_over(config, defaults), max_length)
    return with_other_tensors(_text_spec(_over(text_config(config), defaults), max_length), below(TEXT), OTHERS)


def _over(config: ConfigFile, defaults: Mapping[str, object]) -> ConfigFile:
    """Return the settings over their defaults; transformers replaces null for the positions too."""
    found = config.over(defaults)
    return found if found.is_set(ROPES) else ConfigFile(found.where, {**found.fields, ROPES: defaults[ROPES]})


def _text_spec(config: ConfigFile, max_length: int | None) -> DecoderSpec:
    config.require("use_bidirectional_attention", "vision", None)  # the former concerns images only
    layers = _layers(config, max_length)
    spec = gemma4_form(config, with_stems(with_head_norms(llama_like(config, max_length, layers)), STEMS))
    spec = replace(
        spec,
        attention=replace(spec.attention, ahead_in_windows=True),
        layer_scale=True,
        ignored_tensors=spec.ignored_tensors | unused_keys(layers),
    )
    return with_layer_inputs(config, _with_experts(config, spec) if config.flag("enable_moe_block", False) else spec)


def gemma4_form(config: ConfigFile, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with the norms, scales, activation and soft cap that Gemma 3n and 4 have."""
    return replace(
        spec,
        norm_after=True,
        attention=replace(spec.attention, scale=1.0, value_norm=True),
        mlp=replace(spec.mlp, activation=activation(config, "hidden_activation", "gelu_pytorch_tanh")),
        embedding_scale=spec.hidden_size**0.5,
        logit_soft_cap=config.number("final_logit_softcapping") if config.is_set("final_logit_softcapping") else None,
    )


def _layers(config: ConfigFile, max_length: int | None) -> list[LayerSpec]:
    window = config.size("sliding_window", high=MAX_LENGTH)
    windows = mixed_windows(config, window, lambda layer: (layer + 1) % 6 != 0)
    windows[-1] = None  # whatever the settings say
    usual, wide, of_layers = _heads(config)
    values_are_keys = config.flag("attention_k_eq_v", False)
    owners = key_owners(config, windows)
    width = 2 * config.size("intermediate_size") if config.flag("use_double_wide_mlp", False) else None
    layers = []
    for index, (kept, owner) in enumerate(zip(windows, owners, strict=True)):
        is_full = kept is None
        heads = of_layers.get(index, wide if is_full else usual)
        kind, base = (FULL, FULL_BASE) if is_full else (SLIDING, LOCAL_BASE)
        layers.append(
            LayerSpec(
                window=kept,
                rope=rope_spec(config, heads.head_dim, max_length, layer_type=kind, default_base=base),
                heads=None if heads == usual else heads,
                keys_of=owner,
                keys_are_values=is_full and values_are_keys,
                intermediate_size=width if owner is not None else None,
            )
        )
    return layers


def _heads(config: ConfigFile) -> tuple[KVHeads, KVHeads, dict[int, KVHeads]]:
    """Return the heads of layers with a window, of those with full attention, and of single layers."""
    usual = _heads_in(ConfigFile(config.where, {field: config.fields[field] for field in HEADS}), KVHeads(1, 1))
    wide = KVHeads(usual.num_kv_heads, config.size("global_head_dim", high=MAX_HEAD_DIM))
    if config.flag("attention_k_eq_v", False) and config.is_set("num_global_key_value_heads"):
        wide = replace(wide, num_kv_heads=config.size("num_global_key_value_heads", high=MAX_HEADS))
    single = config.section("per_layer_config")
    if not single.fields:
        return usual, wide, {}
    indices = [str(index) for index in range(num_layers(config))]
    if not single.fields.keys() <= set(indices):
        raise config.error("per_layer_config", f"settings for layers 0 to {len(indices) - 1}")
    of_layers = {int(index): _heads_in(single.section(index), usual) for index in single.fields}
    return usual, usual, of_layers


def _heads_in(section: ConfigFile, usual: KVHeads) -> KVHeads:
    """Return the heads that these settings name, each number the usual one if they do not."""
    if not section.fields.keys() <= HEADS:
        raise section.error(next(iter(section.fields.keys() - HEADS)), f"only {', '.join(sorted(HEADS))}")
    return KVHeads(
        section.size("num_key_value_heads", usual.num_kv_heads, high=MAX_HEADS),
        section.size("head_dim", usual.head_dim, high=MAX_HEAD_DIM),
    )


def key_owners(config: ConfigFile, windows: Sequence[int | None]) -> list[int | None]:
    """Return the layer whose keys and values each layer attends to; None: its own."""
    first = len(windows) - config.size("num_kv_shared_layers", low=0, high=len(windows) - 1)
    last = {window: layer for layer, window in enumerate(windows[:first])}
    if not last.keys() >= set(windows):
        raise config.error("num_kv_shared_layers", "a number that leaves a layer of each kind its keys and values")
    return [None] * first + [last[window] for window in windows[first:]]


def _with_experts(config: ConfigFile, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with experts next to the MLP of each layer."""
    if any(layer.intermediate_size is not None for layer in spec.layers):
        raise config.error("use_double_wide_mlp", "false in a model with experts")
    experts = ExpertsSpec(
        num_experts=config.size("num_experts"),
        experts_per_token=config.size("top_k_experts"),
        intermediate_size=config.size("moe_intermediate_size"),
        normalize_weights=True,
        shared_size=spec.mlp.intermediate_size,
        own_norms=True,
        score_scale=spec.hidden_size**-0.5,
        factors=True,
    )
    layers = tuple(replace(layer, sparse=True) for layer in spec.layers)
    return with_stems(replace(spec, experts=experts, layers=layers), EXPERT_STEMS)


def with_layer_inputs(config: ConfigFile, spec: DecoderSpec, num_tokens: int | None = None) -> DecoderSpec:
    """Return the spec with inputs for each layer, if the settings have them.

    `num_tokens`: the rows of their table, if the family allows another number than all tokens.
    """
    size = config.size("hidden_size_per_layer_input", 0, low=0)
    if size == 0:
        return spec
    if num_tokens is None and config.size("vocab_size_per_layer_input", spec.vocab_size) != spec.vocab_size:
        raise config.error("vocab_size_per_layer_input", f"vocab_size, which is {spec.vocab_size}")
    padding = config.size("pad_token_id", 0, low=0, high=spec.vocab_size - 1)
    scales = {"embedding_scale": size**0.5, "input_scale": spec.hidden_size**-0.5, "scale": 2**-0.5}
    rows = None if num_tokens == spec.vocab_size else num_tokens
    inputs = LayerInputsSpec(size, **scales, given_token=padding, num_tokens=rows)
    return with_stems(replace(spec, layer_inputs=inputs), INPUT_STEMS)


def unused_keys(layers: Sequence[LayerSpec]) -> frozenset[str]:
    """Return the names of tensors that checkpoints have for layers with the keys and values of others."""
    stem = LAYER + "self_attn.{name}.weight"
    shared = [index for index, layer in enumerate(layers) if layer.keys_of is not None]
    return frozenset(stem.format(layer=index, name=name) for index in shared for name in UNUSED)
