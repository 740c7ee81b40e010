"""DeepSeek-V2 and V3: one latent for all heads (MLA), and experts in most layers, next to an MLP for every token.

V2-Lite and Moonlight have these too. V3 scores each expert alone, and chooses among groups of experts. Names and
roundings are those of transformers. Its RMS norms of latents have their own epsilon, which is not in the settings.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import (
    LAYER,
    MAX_HEAD_DIM,
    MAX_HEADS,
    llama_like,
    num_layers,
    rotary_layers,
    with_stems,
)
from quire.compute.models.config_file import MAX_SIZE, ConfigFile
from quire.compute.models.guess_layer import NEXTN, with_guess_layer
from quire.compute.models.parts import NormKind, NormSpec, Part, WeightSource
from quire.compute.models.rope import score_factor
from quire.compute.models.sublayers import MAX_EXPERTS, ExpertsSpec, LatentSpec, Scoring

V2: Final = "DeepseekV2ForCausalLM"
LATENT_NORM: Final = NormSpec(NormKind.RMS, 1e-6)
DEFAULTS: Final = MappingProxyType(
    {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
)
V2_DEFAULTS: Final = MappingProxyType({"first_k_dense_replace": 0, "n_shared_experts": 2, "num_experts_per_tok": 6})
V3_DEFAULTS: Final = MappingProxyType({"first_k_dense_replace": 3, "n_shared_experts": 1, "num_experts_per_tok": 8})
FURTHER: Final = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
MAX_FURTHER: Final = 8
ATTENTION: Final = LAYER + "self_attn."
EXPERT: Final = LAYER + "mlp.experts.{expert}."
LATENT_STEMS: Final = MappingProxyType(
    {
        Part.QUERY_DOWN: ATTENTION + "q_a_proj",
        Part.QUERY_DOWN_NORM: ATTENTION + "q_a_layernorm",
        Part.LATENT_NORM: ATTENTION + "kv_a_layernorm",
    }
)
STEMS: Final = MappingProxyType(
    {
        Part.ROUTER: LAYER + "mlp.gate",
        Part.ROUTER_OFFSET: LAYER + "mlp.gate.e_score_correction_bias",
        Part.SHARED_GATE: LAYER + "mlp.shared_experts.gate_proj",
        Part.SHARED_UP: LAYER + "mlp.shared_experts.up_proj",
        Part.SHARED_DOWN: LAYER + "mlp.shared_experts.down_proj",
        Part.EXPERT_GATE: EXPERT + "gate_proj",
        Part.EXPERT_UP: EXPERT + "up_proj",
        Part.EXPERT_DOWN: EXPERT + "down_proj",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a DeepSeek model; refuses settings that quire does not interpret."""
    is_v3 = config.texts("architectures")[0] != V2
    config = config.over({**DEFAULTS, **(V3_DEFAULTS if is_v3 else V2_DEFAULTS)})
    spec = latent_like(config, max_length, has_pairs=config.flag("rope_interleave", True))
    spec = replace(
        with_stems(spec, STEMS),
        mlp=replace(spec.mlp, bias=not is_v3 and config.flag("mlp_bias", False)),
        layers=sparse_after(config, spec.layers),
        experts=v3_experts(config) if is_v3 else _v2_experts(config),
    )
    return without_further_layers(config, spec)


def latent_like(config: ConfigFile, max_length: int | None, *, has_pairs: bool) -> DecoderSpec:
    """Return the spec of a model with latents and an MLP in each layer.

    `has_pairs`: the two dimensions that rotate together are adjacent.
    """
    heads, latent = config.size("num_attention_heads", high=MAX_HEADS), _latent(config)
    if config.size("num_key_value_heads", heads) != heads:
        raise config.error("num_key_value_heads", f"{heads}, as num_attention_heads")
    rotated = ConfigFile(config.where, {**config.fields, "head_dim": latent.rope_dim})
    sizes = {"head_dim": latent.rank + latent.rope_dim, "num_key_value_heads": 1}
    layers = rotary_layers(rotated, max_length)
    spec = llama_like(ConfigFile(config.where, {**config.fields, **sizes}), max_length, [])
    scale = latent.query_dim**-0.5 * score_factor(config)
    spec = with_stems(spec, LATENT_STEMS)
    return replace(
        spec,
        attention=replace(spec.attention, scale=scale, latent=latent),
        layers=layers,
        sources=MappingProxyType({**spec.sources, **_latent_sources(latent, config, has_pairs=has_pairs)}),
    )


def without_further_layers(config: ConfigFile, spec: DecoderSpec) -> DecoderSpec:
    """Return the spec, which ignores the tensors of the last layers: they predict further tokens.

    Only the first of them is ever run, as the layer that guesses.
    """
    count = config.size("num_nextn_predict_layers", 0, low=0, high=MAX_FURTHER)
    num_experts = 0 if spec.experts is None else spec.experts.num_experts
    names: set[str] = set()
    for layer in range(len(spec.layers), len(spec.layers) + count):
        stems = {LAYER.format(layer=layer) + each for each in FURTHER}
        for source in spec.sources.values():
            if "{layer}" in source.stem:
                experts = range(num_experts if "{expert}" in source.stem else 1)
                stems |= {source.stem_of(layer, expert) for expert in experts}
        names |= {f"{stem}.{kind}" for stem in stems for kind in ("weight", "bias")}
    spec = replace(spec, ignored_tensors=spec.ignored_tensors | names)
    if not count:
        return spec
    first = LAYER.format(layer=len(spec.layers))
    return with_guess_layer(spec, first, {part: first + name for part, name in NEXTN.items()})


def _latent(config: ConfigFile) -> LatentSpec:
    rank = config.size("kv_lora_rank", high=MAX_HEAD_DIM // 2)
    return LatentSpec(
        rank=rank,
        rope_dim=config.size("qk_rope_head_dim", high=MAX_HEAD_DIM // 2),
        plain_dim=config.size("qk_nope_head_dim", high=MAX_HEAD_DIM // 2),
        value_dim=config.size("v_head_dim", high=MAX_HEAD_DIM),
        norm=LATENT_NORM,
        query_rank=config.size("q_lora_rank") if config.is_set("q_lora_rank") else None,
    )


def _latent_sources(latent: LatentSpec, config: ConfigFile, *, has_pairs: bool) -> dict[Part, WeightSource]:
    """Return the sources of queries, latents, keys and values; rotating dimensions are in pairs at the end."""
    query = ATTENTION + ("q_proj" if latent.query_rank is None else "q_b_proj")
    key, value, period = latent.plain_dim, latent.value_dim, latent.plain_dim + latent.value_dim

    def turned(stem: str, size: int, start: int) -> WeightSource:
        return WeightSource(stem, adjacent=(size, latent.rope_dim) if has_pairs else None, adjacent_from=start)

    up = {Part.KEY_UP: WeightSource(ATTENTION + "k_b_proj"), Part.VALUE_UP: WeightSource(ATTENTION + "v_b_proj")}
    if not config.flag("kv_b_split", False):  # only GGUF files have two tensors
        stem = ATTENTION + "kv_b_proj"
        up[Part.KEY_UP] = WeightSource(stem, run=key, period=period)
        up[Part.VALUE_UP] = WeightSource(stem, first_row=key, run=value, period=period)
    return up | {
        Part.QUERY: turned(query, latent.query_dim, latent.plain_dim),
        Part.LATENT: turned(ATTENTION + "kv_a_proj_with_mqa", latent.rank + latent.rope_dim, latent.rank),
    }


def sparse_after(config: ConfigFile, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers: dense first, then sparse."""
    if config.size("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "1: experts in every layer after the first dense ones")
    num_dense = config.size("first_k_dense_replace", low=0)
    return tuple(replace(layer, sparse=index >= num_dense) for index, layer in enumerate(layers))


def _v2_experts(config: ConfigFile) -> ExpertsSpec:
    config.require("scoring_func", "softmax", None)
    config.require("topk_method", "greedy", "group_limited_greedy", None)
    if config.flag("norm_topk_prob", False):
        raise config.error("norm_topk_prob", "false: versions of transformers differ in its effect")
    in_groups = config.fields.get("topk_method") == "group_limited_greedy"
    return replace(
        _experts(config, 64, 1407),
        normalize_weights=False,
        num_groups=config.size("n_group") if in_groups else 1,
        groups_per_token=config.size("topk_group") if in_groups else 1,
        scale=config.number("routed_scaling_factor", 1.0),
    )


def v3_experts(config: ConfigFile) -> ExpertsSpec:
    """Return experts that are scored one by one, and chosen among the best groups."""
    config.require("scoring_func", "sigmoid", None)
    config.require("topk_method", "noaux_tc", None)
    experts = _experts(config, 256, 2048)
    num_groups = config.size("n_group", 8, high=experts.num_experts)
    return replace(
        experts,
        scoring=Scoring.SIGMOID,
        offset=True,
        num_groups=num_groups,
        groups_per_token=config.size("topk_group", 4),
        group_best=min(2, experts.num_experts // num_groups),
        scale=config.number("routed_scaling_factor", 2.5),
    )


def _experts(config: ConfigFile, num_experts: int, intermediate_size: int) -> ExpertsSpec:
    """Return the experts as far as V2 and V3 agree; the numbers are defaults for missing settings."""
    num_experts = config.size("n_routed_experts", num_experts, high=MAX_EXPERTS // num_layers(config))
    size, num_shared = config.size("moe_intermediate_size", intermediate_size), config.size("n_shared_experts")
    if size * num_shared > MAX_SIZE:
        raise config.error("n_shared_experts", f"MLPs of {size} numbers that have at most {MAX_SIZE} together")
    return ExpertsSpec(
        num_experts=num_experts,
        experts_per_token=config.size("num_experts_per_tok", high=num_experts),
        intermediate_size=size,
        normalize_weights=config.flag("norm_topk_prob", True),
        shared_size=size * num_shared,
    )
