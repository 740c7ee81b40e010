"""The settings of Granite, Granite-MoE and Granite 4 H in addition to Llama's, in the form of config.json."""

from __future__ import annotations

from quire.compute.gguf.named_settings import WIDTH, Settings, StateSpace, kinds_of_layers, local_experts

POSITIONS = "rope.scaling.finetuned"
SHARED = "expert_shared_feed_forward_length"


def granite(settings: Settings) -> dict[str, object]:
    """Return the settings of Granite."""
    if not settings.file.flag(settings.key(POSITIONS), True):
        raise settings.file.error(settings.key(POSITIONS), "true: no Granite without positions is run")
    return _factors(settings)


def granite_moe(settings: Settings) -> dict[str, object]:
    """Return the settings of Granite-MoE, in some files with an MLP next to the experts."""
    own = {**granite(settings), **local_experts(settings)}
    if not settings.has(SHARED):
        return own
    family = "GraniteMoeSharedForCausalLM"
    return {
        **own,
        "architectures": [family],
        "shared_intermediate_size": settings.size(SHARED),
        "shared_mlp_split": True,
    }


def granite_hybrid(settings: Settings) -> dict[str, object]:
    """Return the settings of Granite 4 H. A layer without key-value heads is a state-space layer.

    Files of Bamba, which has positions, have the rows of queries and keys in an order that no engine computes with.
    """
    if settings.file.flag(settings.key(POSITIONS), True):
        raise settings.file.error(settings.key(POSITIONS), "false: of Bamba, only folders are run")
    count, num_experts = settings.size("block_count"), settings.size("expert_count", 0, low=0)
    return {
        **_factors(settings),
        **(local_experts(settings) if num_experts else {"num_local_experts": 0}),
        "shared_intermediate_size": settings.size(SHARED, 0 if num_experts else settings.size(WIDTH), low=0),
        "shared_mlp_split": True,
        "layer_types": kinds_of_layers(settings, count, "attention", "mamba") or ["attention"] * count,
        **_mamba(settings),
    }


def _mamba(settings: Settings) -> dict[str, object]:
    rule, hidden = StateSpace.of(settings), settings.size("embedding_length")
    inner = rule.num_heads * rule.head_size
    if inner % hidden:
        raise settings.file.error(settings.key("ssm.inner_size"), f"a multiple of embedding_length, {hidden}")
    return {
        "mamba_n_heads": rule.num_heads,
        "mamba_d_head": rule.head_size,
        "mamba_expand": inner // hidden,
        "mamba_n_groups": rule.num_groups,
        "mamba_d_state": rule.state_size,
        "mamba_d_conv": rule.filter_width,
        "mamba_conv_bias": rule.has_bias,
    }


def _factors(settings: Settings) -> dict[str, object]:
    scales = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    given = {field: settings.number(name) for field, name in scales.items() if settings.has(name)}
    return {**given, "attention_multiplier": settings.number("attention.scale", settings.head_size**-0.5)}
