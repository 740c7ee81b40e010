"""The code that most families share: Llama's layers, weight names and common settings.

Mistral, Qwen, Gemma and others use Llama's names for modules and for the settings of sizes. A family starts
from `llama_like` and replaces the differences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part, WeightSource
from quire.compute.models.rope import FULL, SLIDING, context_length, growing, rope_spec
from quire.compute.models.sublayers import Activation, AttentionSpec, MLPSpec

MAX_LAYERS: Final = 1000
MAX_HEADS: Final = 1 << 16
MAX_HEAD_DIM: Final = 4096
PREFIX: Final = "model."
LAYER: Final = "model.layers.{layer}."
HEAD_TENSOR: Final = "lm_head.weight"
LLAMA_STEMS: Final = MappingProxyType(
    {
        Part.EMBEDDING: "model.embed_tokens",
        Part.ATTENTION_NORM: LAYER + "input_layernorm",
        Part.QUERY: LAYER + "self_attn.q_proj",
        Part.KEY: LAYER + "self_attn.k_proj",
        Part.VALUE: LAYER + "self_attn.v_proj",
        Part.OUTPUT: LAYER + "self_attn.o_proj",
        Part.MLP_NORM: LAYER + "post_attention_layernorm",
        Part.GATE: LAYER + "mlp.gate_proj",
        Part.UP: LAYER + "mlp.up_proj",
        Part.DOWN: LAYER + "mlp.down_proj",
        Part.FINAL_NORM: "model.norm",
        Part.HEAD: "lm_head",
    }
)
ACTIVATIONS: Final = MappingProxyType(
    {
        "silu": Activation.SILU,
        "swish": Activation.SILU,
        "gelu": Activation.GELU,
        "gelu_new": Activation.GELU_TANH,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "relu": Activation.RELU,
        "relu2": Activation.RELU_SQUARED,
    }
)


def stem_sources(stems: Mapping[Part, str]) -> Mapping[Part, WeightSource]:
    """Return the sources of parts that each have their own tensor."""
    return MappingProxyType({part: WeightSource(stem) for part, stem in stems.items()})


def llama_like(config: ConfigFile, max_length: int | None, layers: Sequence[LayerSpec]) -> DecoderSpec:
    """Return the spec that Llama's descendants start from: RMS norms before sublayers, a gated MLP, an untied head."""
    tied = config.flag("tie_word_embeddings", False)
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        context_length=context_length(config, max_length),
        norm=NormSpec(NormKind.RMS, config.number("rms_norm_eps", 1e-6)),
        attention=_attention(config),
        mlp=MLPSpec(config.size("intermediate_size"), activation(config, "hidden_act", "silu")),
        layers=tuple(layers),
        sources=stem_sources(LLAMA_STEMS),
        ignored_tensors=unused_tensors(len(layers), tied_head=tied),
        optional_prefix=PREFIX,
        tied_head=tied,
    )


def _attention(config: ConfigFile) -> AttentionSpec:
    heads, size = config.size("num_attention_heads", high=MAX_HEADS), head_dim(config)
    kv_heads, bias = config.size("num_key_value_heads", heads, high=MAX_HEADS), config.flag("attention_bias", False)
    if heads % kv_heads:
        raise config.error("num_attention_heads", f"a multiple of the {kv_heads} kv heads")
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        scale=size**-0.5,
        bias=bias,
        output_bias=bias,
    )


def with_stems(spec: DecoderSpec, stems: Mapping[Part, str]) -> DecoderSpec:
    """Return the spec with these parts added or renamed."""
    return replace(spec, sources=MappingProxyType({**spec.sources, **stem_sources(stems)}))


def with_head_norms(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec with a norm on every query and key head."""
    stems = {Part.QUERY_NORM: LAYER + "self_attn.q_norm", Part.KEY_NORM: LAYER + "self_attn.k_norm"}
    return with_stems(replace(spec, attention=replace(spec.attention, qk_norm=spec.norm)), stems)


def with_runs(spec: DecoderSpec, stem: str) -> DecoderSpec:
    """Return the spec of a checkpoint that has queries, keys and values in one tensor.

    Each key and each value follow the queries that read them.
    """
    attention = spec.attention
    key = attention.head_dim
    query = attention.num_heads // attention.num_kv_heads * key
    starts = {Part.QUERY: (0, query), Part.KEY: (query, key), Part.VALUE: (query + key, key)}
    fused = {
        part: WeightSource(stem, first_row=first, run=run, period=query + 2 * key)
        for part, (first, run) in starts.items()
    }
    return replace(spec, sources=MappingProxyType({**spec.sources, **fused}))


def with_fused_attention(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of a checkpoint that has all queries, then all keys, then all values in one tensor."""
    attention, stem = spec.attention, LAYER + "self_attn.qkv_proj"
    query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    starts = {Part.QUERY: 0, Part.KEY: query, Part.VALUE: query + key}
    fused = {part: WeightSource(stem, first_row=first) for part, first in starts.items()}
    return replace(spec, sources=MappingProxyType({**spec.sources, **fused}))


def with_fused_gate(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of a checkpoint that has the gate, then the up projection in one tensor."""
    stem = LAYER + "mlp.gate_up_proj"
    fused = {Part.GATE: WeightSource(stem), Part.UP: WeightSource(stem, first_row=spec.mlp.intermediate_size)}
    return replace(spec, sources=MappingProxyType({**spec.sources, **fused}))


def with_adjacent_pairs(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of a checkpoint that has the two dimensions of each rotating pair next to each other."""
    rotary_dim = max((layer.rope.rotary_dim for layer in spec.layers if layer.rope is not None), default=0)
    pairs, parts = (spec.attention.head_dim, rotary_dim), (Part.QUERY, Part.KEY, Part.QUERY_NORM, Part.KEY_NORM)
    turned = {part: replace(spec.sources[part], adjacent=pairs) for part in parts if part in spec.sources}
    return replace(spec, sources=MappingProxyType({**spec.sources, **turned}))


def rotary_layers(
    config: ConfigFile,
    max_length: int | None = None,
    windows: Sequence[int | None] | None = None,
    *,
    partial: bool = False,
    grows: bool = False,
) -> tuple[LayerSpec, ...]:
    """Return layers with the same rotary positions, on a part of each head if `partial`.

    Without `windows`, layers have full attention. `grows`: queries may grow with their position.
    """
    rope = rope_spec(config, head_dim(config), max_length, partial=partial)
    rope = growing(config, rope) if grows else rope
    return tuple(LayerSpec(window, rope) for window in windows or [None] * num_layers(config))


def same_windows(config: ConfigFile, window: int | None) -> list[int | None]:
    """Return the window of each layer of a family whose layers are all alike."""
    kind = FULL if window is None else SLIDING
    if config.is_set("layer_types") and set(config.texts("layer_types")) != {kind}:
        raise config.error("layer_types", f"null, or {kind} for all layers")
    return [window] * num_layers(config)


def mixed_windows(config: ConfigFile, window: int | None, is_sliding: Callable[[int], bool]) -> list[int | None]:
    """Return the window of each layer, by `layer_types`, or by its index if that is missing."""
    count = num_layers(config)
    if not config.is_set("layer_types"):
        return [window if is_sliding(layer) else None for layer in range(count)]
    kinds = config.texts("layer_types")
    if len(kinds) != count or not {FULL, SLIDING}.issuperset(kinds):
        raise config.error("layer_types", f"{count} of {FULL}, {SLIDING}")
    if window is None and SLIDING in kinds:
        raise config.error("sliding_window", "a window size for sliding layers")
    return [window if kind == SLIDING else None for kind in kinds]


def optional_window(config: ConfigFile) -> int | None:
    """Return `sliding_window`, None if it is null."""
    return config.size("sliding_window", high=MAX_LENGTH) if config.is_set("sliding_window") else None


def activation(config: ConfigFile, field: str, default: str) -> Activation:
    """Return the activation of the MLP; the default replaces a missing field or null."""
    name = config.fields[field] if config.is_set(field) else default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise config.error(field, f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def num_layers(config: ConfigFile, field: str = "num_hidden_layers") -> int:
    """Return the number of layers, with a limit so that a list of layers cannot fill the memory."""
    return config.size(field, high=MAX_LAYERS)


def head_dim(config: ConfigFile) -> int:
    """Return the size of a head: its own setting, or the hidden size divided by the number of heads."""
    if config.is_set("head_dim"):
        return config.size("head_dim", high=MAX_HEAD_DIM)
    return divided_head_dim(config, "hidden_size", "num_attention_heads")


def divided_head_dim(config: ConfigFile, hidden_field: str, heads_field: str) -> int:
    """Return the hidden size divided by the number of heads."""
    hidden, heads = config.size(hidden_field), config.size(heads_field, high=MAX_HEADS)
    if hidden % heads or hidden // heads > MAX_HEAD_DIM:
        raise config.error(hidden_field, f"a multiple of the {heads} heads, at most {MAX_HEAD_DIM} for each")
    return hidden // heads


def unused_tensors(num_layers: int, *, tied_head: bool) -> frozenset[str]:
    """Return tensors that a checkpoint may have but quire ignores: a tied head, frequencies of the first Llamas."""
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(num_layers)}
    return frozenset(frequencies | ({HEAD_TENSOR} if tied_head else set()))
