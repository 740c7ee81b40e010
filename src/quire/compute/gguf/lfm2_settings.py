"""The settings of LFM2 and LFM2-MoE in addition to Llama's, in the form of config.json."""

from __future__ import annotations

from quire.compute.gguf.named_settings import SIGMOID, Settings, kinds_of_layers
from quire.compute.models.lfm2 import CONVOLUTION
from quire.compute.models.rope import FULL


def lfm2(settings: Settings) -> dict[str, object]:
    """Return the settings of LFM2. The size of the MLP needs no adjustment; a layer without heads is a convolution."""
    if settings.size("attention.sliding_window", 0, low=0):
        raise settings.file.error(settings.key("attention.sliding_window"), "none: no LFM2 with a window is run")
    return {
        "norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": settings.size("shortconv.l_cache"),
        "layer_types": kinds_of_layers(settings, settings.size("block_count"), FULL, CONVOLUTION),
    }


def lfm2moe(settings: Settings) -> dict[str, object]:
    """Return the settings of LFM2-MoE: those of LFM2, and of experts after the first layers."""
    if settings.size("expert_gating_func", SIGMOID) != SIGMOID:
        raise settings.file.error(settings.key("expert_gating_func"), f"{SIGMOID}, a sigmoid")
    return {
        **lfm2(settings),
        "num_dense_layers": settings.size("leading_dense_block_count", 0, low=0),
        "num_experts": settings.size("expert_count"),
        "num_experts_per_tok": settings.size("expert_used_count"),
        "moe_intermediate_size": settings.size("expert_feed_forward_length"),
        "norm_topk_prob": settings.file.flag(settings.key("expert_weights_norm"), True),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
        "use_expert_bias": any(".exp_probs_b." in name for name in settings.tensors),
    }
