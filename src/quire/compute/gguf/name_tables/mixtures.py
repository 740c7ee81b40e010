"""The names of decoders with experts, and of those whose keys and values are latents."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.name_tables.dense import HUNYUAN
from quire.compute.gguf.name_tables.table import EXPERTS, LAYER, NORM_AFTER_ATTENTION, OF_MLP, NameTable

ROW: Final = "ffn_gate_inp_shexp"
"""A matrix of one row, which older files have as a vector."""

SHARED: Final = MappingProxyType(
    {
        **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in OF_MLP},
        "exp_probs_b": "mlp.gate.e_score_correction_bias",
    }
)
SHARED_EXPERT: Final = MappingProxyType(
    {**{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in OF_MLP}, ROW: "mlp.shared_expert_gate"}
)
FURTHER: Final = MappingProxyType(
    {
        **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
        **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
    }
)
"""Tensors of the layers that predict further tokens."""

LATENTS: Final = MappingProxyType(
    {
        **LAYER,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        **SHARED,
    }
)
MIXTRAL_EXPERTS: Final = MappingProxyType(
    {
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    }
)
MIXTRAL: Final = MappingProxyType({**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"})
GRANITE_MLP: Final = tuple(zip(OF_MLP, ("gate_proj", "up_proj", "output_linear"), strict=True))
GRANITE: Final = NameTable(
    {
        **LAYER,
        "ffn_gate_inp": "block_sparse_moe.router.layer",
        **{f"ffn_{part}_shexp": f"shared_mlp.{name}" for part, name in GRANITE_MLP},
    },
    experts={theirs: ours.replace("mlp", "block_sparse_moe") for theirs, ours in EXPERTS.items()},
)
MIXTURES: Final[Mapping[str, NameTable]] = MappingProxyType(
    {
        "afmoe": NameTable(
            {
                **{**LAYER, **SHARED},
                "attn_gate": "self_attn.gate_proj",
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "ffn_gate_inp": "mlp.router.gate",
                "exp_probs_b": "mlp.expert_bias",
            }
        ),
        **dict.fromkeys(("deepseek2", "minicpm3"), NameTable(LATENTS)),
        "dots1": NameTable({**LAYER, **SHARED}),
        "ernie4_5-moe": NameTable({**LAYER, **SHARED, "exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}),
        "exaone-moe": NameTable({**LAYER, **SHARED, **FURTHER, "exp_probs_b": "mlp.e_score_correction_bias"}),
        "glm4moe": NameTable({**NORM_AFTER_ATTENTION, **SHARED, **FURTHER}),
        "gpt-oss": NameTable({**NORM_AFTER_ATTENTION, "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router"}),
        "granitemoe": GRANITE,
        "hunyuan-moe": NameTable(
            {
                **HUNYUAN,
                "ffn_gate_inp": "mlp.gate.wg",
                **{f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in OF_MLP},
            }
        ),
        "llama": NameTable(MIXTRAL, experts=MIXTRAL_EXPERTS),  # Llama, Mistral and Mixtral
        "llama4": NameTable(
            {
                **{**LAYER, "ffn_gate_inp": "feed_forward.router"},
                **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in OF_MLP},
                **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in OF_MLP},
            },
            experts={theirs: ours.replace("mlp", "feed_forward") for theirs, ours in EXPERTS.items()},
        ),
        "minimax-m2": NameTable(
            {**MIXTRAL, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}, experts=MIXTRAL_EXPERTS
        ),
        "qwen2moe": NameTable({**LAYER, **SHARED_EXPERT}),
    }
)
"""`general.architecture` → its names."""
