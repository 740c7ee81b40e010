"""Nemotron-H: layers with one sublayer each: state-space layers (Mamba-2), attention without positions, MLPs, experts.

MLPs have no gate, and the square of a ReLU; experts are weighed as in DeepSeek-V3. Steps are as large as computed: the
limit `time_step_min`, which transformers applies to prompts only, has no effect. Tensors for guessing several tokens
(`mtp.`) are not used.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import MAX_HEAD_DIM, MAX_HEADS, MAX_LAYERS, activation, llama_like, stem_sources
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.deepseek import v3_experts
from quire.compute.models.mamba import MAX_FILTER, require_no_limits, with_mamba
from quire.compute.models.parts import NormSpec, Part
from quire.compute.models.recurrent import MambaSpec
from quire.compute.models.sublayers import ExpertsSpec

MAMBA: Final = "mamba"
ATTENTION: Final = "attention"
MLP: Final = "mlp"
EXPERTS: Final = "moe"
KINDS: Final = MappingProxyType(
    {
        **{"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS},
        **{kind: kind for kind in (MAMBA, ATTENTION, MLP, EXPERTS)},
        **{"linear_attention": MAMBA, "full_attention": ATTENTION},
    }
)
"""The names of the kinds of layers, in a pattern or a list."""

DEFAULTS: Final = MappingProxyType(
    {
        **{"vocab_size": 131_072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"intermediate_size": 21_504, "max_position_embeddings": 4096, "layer_norm_epsilon": 1e-5},
        **{"mlp_hidden_act": "relu2", "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64},
        **{"n_groups": 8, "conv_kernel": 4, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "n_group": 1, "topk_group": 1},
        **{"routed_scaling_factor": 1.0},
    }
)
PREFIX: Final = "backbone."
LAYER: Final = PREFIX + "layers.{layer}."
MIXER: Final = LAYER + "mixer."
STEMS: Final = MappingProxyType(
    {
        **{Part.EMBEDDING: PREFIX + "embeddings", Part.FINAL_NORM: PREFIX + "norm_f", Part.HEAD: "lm_head"},
        **dict.fromkeys((Part.ATTENTION_NORM, Part.MLP_NORM), LAYER + "norm"),
        **{Part.QUERY: MIXER + "q_proj", Part.KEY: MIXER + "k_proj", Part.VALUE: MIXER + "v_proj"},
        **{Part.OUTPUT: MIXER + "o_proj", Part.UP: MIXER + "up_proj", Part.DOWN: MIXER + "down_proj"},
        **{Part.ROUTER: MIXER + "gate", Part.ROUTER_OFFSET: MIXER + "gate.e_score_correction_bias"},
        **{Part.SHARED_UP: MIXER + "shared_experts.up_proj", Part.SHARED_DOWN: MIXER + "shared_experts.down_proj"},
        Part.EXPERT_UP: MIXER + "experts.{expert}.up_proj",
        Part.EXPERT_DOWN: MIXER + "experts.{expert}.down_proj",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Nemotron-H model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("use_bias", "mamba_proj_bias", "attention_bias", "tie_word_embeddings")
    if config.is_set("moe_latent_size"):
        raise config.error("moe_latent_size", "null: no experts of fewer numbers are run")
    kinds = _kinds(config)
    config = _with_usual_names(config, len(kinds))
    spec = llama_like(config, max_length, [_layer(kind) for kind in kinds])
    spec = replace(
        spec,
        layers=tuple(replace(layer, sparse=kind == EXPERTS) for layer, kind in zip(spec.layers, kinds, strict=True)),
        mlp=replace(
            spec.mlp,
            gated=False,
            bias=config.flag("mlp_bias", False),
            activation=activation(config, "mlp_hidden_act", "relu2"),
        ),
        experts=_experts(config) if EXPERTS in kinds else None,
        sources=stem_sources(STEMS),
        optional_prefix=PREFIX,
        ignored_prefixes=("mtp.",),
    )
    recurrent = [kind == MAMBA for kind in kinds]
    return with_mamba(spec, _rule(config, spec.norm), recurrent, MIXER) if any(recurrent) else spec


def _kinds(config: ConfigFile) -> list[str]:
    """Return the kind of each layer: from a list, or a pattern with a letter for each."""
    field = next((name for name in ("layers_block_type", "layer_types") if config.is_set(name)), None)
    if field is None:
        field, found = "hybrid_override_pattern", config.fields.get("hybrid_override_pattern")
        names: tuple[str, ...] = tuple(found) if isinstance(found, str) else ()
    else:
        names = config.texts(field)
    if not 1 <= len(names) <= MAX_LAYERS or not set(KINDS).issuperset(names):
        raise config.error(field, f"1 to {MAX_LAYERS} of {', '.join(KINDS)}")
    return [KINDS[name] for name in names]


def _layer(kind: str) -> LayerSpec:
    attends = kind in (MAMBA, ATTENTION)
    return LayerSpec(None, None, attends=attends, transforms=not attends)


def _with_usual_names(config: ConfigFile, count: int) -> ConfigFile:
    """Return the settings with the names that Llama has for them."""
    head_dim = config.size("head_dim", config.size("attention_head_dim", 128), high=MAX_HEAD_DIM)
    usual = {"num_hidden_layers": count, "head_dim": head_dim, "rms_norm_eps": config.number("layer_norm_epsilon")}
    return ConfigFile(config.where, {**config.fields, **usual, "hidden_act": None})


def _experts(config: ConfigFile) -> ExpertsSpec:
    experts = v3_experts(config)
    return replace(experts, shared_size=config.size("moe_shared_expert_intermediate_size"))


def _rule(config: ConfigFile, norm: NormSpec) -> MambaSpec:
    config.require("mamba_hidden_act", "silu", None)
    require_no_limits(config)
    return MambaSpec(
        num_heads=config.size("mamba_num_heads", high=MAX_HEADS),
        num_groups=config.size("n_groups", high=MAX_HEADS),
        key_dim=config.size("ssm_state_size", high=MAX_HEAD_DIM),
        value_dim=config.size("mamba_head_dim", high=MAX_HEAD_DIM),
        filter_width=config.size("conv_kernel", high=MAX_FILTER),
        norm=norm,
        filter_bias=config.flag("use_conv_bias", True),
    )
