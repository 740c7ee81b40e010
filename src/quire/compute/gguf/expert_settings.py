"""The settings of architectures with experts in most layers, weighed one by one, in the form of config.json."""

from __future__ import annotations

from quire.compute.gguf.named_settings import SIGMOID, Settings, listed_windows, local_experts, turned
from quire.compute.models.common import MAX_LAYERS

GATING = "expert_gating_func"
WIDTH = "expert_feed_forward_length"
SHARED_WIDTH = "expert_shared_feed_forward_length"
FURTHER = "nextn_predict_layers"
CHUNK = 8192
"""The tokens of a chunk in Llama 4."""

WITHOUT_HEAD_NORMS = 128
"""The number of experts in the Llama 4 without norms on heads."""

INTERVAL = 4
"""In files of AFMoE without a list: of how many layers the last one has no window."""


def experts_after(settings: Settings) -> dict[str, object]:
    """Return the settings of experts in most layers, next to an MLP for every token."""
    return {
        "first_k_dense_replace": settings.size("leading_dense_block_count", 0, low=0),
        "n_routed_experts": settings.size("expert_count"),
        "n_shared_experts": settings.size("expert_shared_count"),
        "num_experts_per_tok": settings.size("expert_used_count"),
        "moe_intermediate_size": settings.size(WIDTH),
        "routed_scaling_factor": settings.number("expert_weights_scale", 1.0),
        "norm_topk_prob": settings.file.flag(settings.key("expert_weights_norm"), False),
        "n_group": settings.size("expert_group_count", 1),
        "topk_group": settings.size("expert_group_used_count", 1),
    }


def require_sigmoid(settings: Settings) -> None:
    """Raise unless each expert is scored alone."""
    if settings.size(GATING, SIGMOID) != SIGMOID:
        raise settings.file.error(settings.key(GATING), f"{SIGMOID}, a sigmoid")


def without_further(settings: Settings) -> dict[str, object]:
    """Return the number of layers; files count those that predict further tokens, too."""
    num_further = settings.size(FURTHER, 0, low=0)
    return {
        "num_hidden_layers": settings.size("block_count", low=num_further + 1) - num_further,
        "num_nextn_predict_layers": num_further,
    }


def afmoe(settings: Settings) -> dict[str, object]:
    """Return the settings of AFMoE, whose embeddings are scaled in every file."""
    require_sigmoid(settings)
    experts = experts_after(settings)
    return {
        **{"head_dim": settings.head_size, "mup_enabled": True, "global_attn_every_n_layers": INTERVAL},
        **listed_windows(settings),
        "num_dense_layers": experts["first_k_dense_replace"],
        "num_experts": experts["n_routed_experts"],
        "num_shared_experts": experts["n_shared_experts"],
        "num_experts_per_tok": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
        "route_scale": experts["routed_scaling_factor"],
        "route_norm": settings.file.flag(settings.key("expert_weights_norm"), True),
    }


def dots1(settings: Settings) -> dict[str, object]:
    """Return the settings of Dots."""
    require_sigmoid(settings)
    return {**experts_after(settings), "head_dim": settings.head_size}


def ernie4_5_moe(settings: Settings) -> dict[str, object]:
    """Return the settings of ERNIE 4.5 with experts."""
    width = settings.size(WIDTH)
    return {
        **{"head_dim": settings.head_size, "use_bias": "blk.0.attn_q.bias" in settings.tensors},
        "moe_num_experts": settings.size("expert_count"),
        "moe_k": settings.size("expert_used_count"),
        "moe_intermediate_size": width,
        "moe_num_shared_experts": settings.size(SHARED_WIDTH, 0, low=0) // width,
        "moe_layer_start_index": settings.size("leading_dense_block_count", 0, low=0),
        "moe_layer_interval": settings.size("interleave_moe_layer_step", 1),
    }


def exaone_moe(settings: Settings) -> dict[str, object]:
    """Return the settings of EXAONE-MoE."""
    require_sigmoid(settings)
    experts = experts_after(settings)
    usual = {"num_experts": experts["n_routed_experts"], "num_shared_experts": experts["n_shared_experts"]}
    return {**experts, **usual, **without_further(settings), **listed_windows(settings)}


def hunyuan_moe(settings: Settings) -> dict[str, object]:
    """Return the settings of Hunyuan-MoE."""
    width = settings.size(WIDTH)
    return {
        "num_experts": settings.size("expert_count"),
        "moe_topk": settings.size("expert_used_count"),
        "moe_intermediate_size": width,
        "num_shared_expert": settings.size(SHARED_WIDTH, width) // width,
    }


def llama4(settings: Settings) -> dict[str, object]:
    """Return the settings of Llama 4, of which files have few: others follow from the number of experts.

    A window of 0 stands for positions and full attention in each layer, as in the small models without experts.
    """
    num_experts = settings.size("expert_count", 0, low=0)
    is_whole = settings.size("attention.sliding_window", CHUNK, low=0) == 0
    has_norms = settings.file.flag(settings.key("use_qk_norm"), num_experts != WITHOUT_HEAD_NORMS)  # in those of Ollama
    return {
        **(local_experts(settings) if num_experts else {"moe_layers": []}),
        "head_dim": settings.head_size,
        "intermediate_size": settings.size(WIDTH),
        "intermediate_size_mlp": settings.size("feed_forward_length"),
        "interleave_moe_layer_step": settings.size("interleave_moe_layer_step", 1, low=0) or 1,
        "attention_chunk_size": None if is_whole else settings.size("attention.chunk_size", CHUNK),
        "no_rope_layers": [1] * settings.size("block_count", high=MAX_LAYERS) if is_whole else None,
        "use_qk_norm": has_norms,
    }


def minimax_m2(settings: Settings) -> dict[str, object]:
    """Return the settings of MiniMax-M2."""
    require_sigmoid(settings)
    return {**turned(settings), **local_experts(settings), "intermediate_size": settings.size(WIDTH)}
