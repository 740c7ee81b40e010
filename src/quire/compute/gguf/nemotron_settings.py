"""The settings of Nemotron-H, in the form of config.json."""

from __future__ import annotations

from quire.compute.gguf.named_settings import KV_HEADS, WIDTH, Settings, StateSpace
from quire.compute.models.nemotron_h import ATTENTION, EXPERTS, MAMBA, MLP

FURTHER = "nextn_predict_layers"


def nemotron_h(settings: Settings) -> dict[str, object]:
    """Return the settings of a Nemotron-H without experts."""
    if settings.size(FURTHER, 0, low=0):
        raise settings.file.error(settings.key(FURTHER), "0: no layers that predict further tokens are run")
    rule = StateSpace.of(settings)
    return {
        "layers_block_type": _kinds(settings, MLP),
        "mlp_bias": any(name.endswith(".ffn_up.bias") for name in settings.tensors),
        "mamba_num_heads": rule.num_heads,
        "mamba_head_dim": rule.head_size,
        "n_groups": rule.num_groups,
        "ssm_state_size": rule.state_size,
        "conv_kernel": rule.filter_width,
        "use_conv_bias": rule.has_bias,
    }


def nemotron_h_moe(settings: Settings) -> dict[str, object]:
    """Return the settings of a Nemotron-H with experts, all in one group."""
    return {
        **nemotron_h(settings),
        "layers_block_type": _kinds(settings, EXPERTS),
        "n_routed_experts": settings.size("expert_count"),
        "num_experts_per_tok": settings.size("expert_used_count"),
        "moe_intermediate_size": settings.size("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": settings.size("expert_shared_feed_forward_length"),
        "moe_latent_size": settings.size("moe_latent_size", 0, low=0) or None,
        "norm_topk_prob": settings.file.flag(settings.key("expert_weights_norm"), False),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
        "n_group": settings.size("expert_group_count", 1, high=1),
    }


def _kinds(settings: Settings, mlp: str) -> list[str]:
    """Return the kind of each layer: attention if it has key-value heads, or else a state-space layer if no MLP."""
    count = settings.size("block_count")
    lists: list[list[object]] = []
    for name in (KV_HEADS, WIDTH):
        found = settings.file.fields.get(settings.key(name))
        if not isinstance(found, list) or len(found) != count:
            raise settings.file.error(settings.key(name), f"a list with a number for each of the {count} layers")
        lists.append(found)
    return [ATTENTION if heads else mlp if width else MAMBA for heads, width in zip(*lists, strict=True)]
