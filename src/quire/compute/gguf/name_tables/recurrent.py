"""The names of decoders that have recurrent layers too: short convolutions, linear attention or state spaces."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.name_tables.mixtures import FURTHER, GRANITE, GRANITE_MLP, MIXTRAL_EXPERTS, SHARED_EXPERT
from quire.compute.gguf.name_tables.table import EXPERTS, LAYER, NORM_AFTER_ATTENTION, OF_MLP, ONCE, WEIGHTS, NameTable

LFM2: Final = NameTable(
    {
        **LAYER,
        "attn_norm": "operator_norm",
        "attn_output": "self_attn.out_proj",
        "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm",
        "ffn_norm": "ffn_norm",
        "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3",
        "ffn_down": "feed_forward.w2",
        "ffn_gate_inp": "feed_forward.gate",
        "exp_probs_b": "feed_forward.expert_bias",
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    {**{name: ours for name, ours in ONCE.items() if name != "output_norm"}, "token_embd_norm": "model.embedding_norm"},
)
LFM2_ONCE_OF_OLLAMA: Final = MappingProxyType({**ONCE, "output_norm": "model.embedding_norm"})
LFM2_MOE: Final = LFM2._replace(
    experts={theirs: ours.replace("block_sparse_moe", "feed_forward") for theirs, ours in MIXTRAL_EXPERTS.items()}
)
GATED_DELTA: Final = NameTable(
    {
        **{**NORM_AFTER_ATTENTION, **SHARED_EXPERT, **FURTHER},
        "attn_gate": "linear_attn.in_proj_z",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "ssm_a": "linear_attn.A_log",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_dt": "linear_attn.dt_bias",
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    }
)
"""Layers of which most have linear attention by the gated delta rule."""

MAMBA: Final = MappingProxyType(
    {
        "ssm_a": "mamba.A_log",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_d": "mamba.D",
        "ssm_dt": "mamba.dt_bias",
        "ssm_in": "mamba.in_proj",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    }
)
"""State-space layers."""

DENSE_GRANITE: Final = GRANITE._replace(
    layer={**LAYER, **MAMBA, **{f"ffn_{part}": f"shared_mlp.{name}" for part, name in GRANITE_MLP}}
)
"""Granite 4 without experts."""

NEMOTRON: Final = NameTable(
    {
        "attn_norm": "norm",
        **{f"attn_{part}": f"mixer.{part}_proj" for part in ("q", "k", "v")},
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "exp_probs_b": "mixer.gate.e_score_correction_bias",
        **{theirs: ours.replace("mamba", "mixer") for theirs, ours in MAMBA.items()},
    },
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    "backbone.layers.",
)
NEMOTRON_MOE: Final = NEMOTRON._replace(
    experts={theirs: ours.replace("mlp", "mixer") for theirs, ours in EXPERTS.items()}
)
RECURRENT: Final[Mapping[str, NameTable]] = MappingProxyType(
    {
        "falcon-h1": NameTable(
            {
                **{**LAYER, **MAMBA, "ffn_norm": "pre_ff_layernorm"},
                **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in OF_MLP},
            },
            {**ONCE, "output_norm": "model.final_layernorm"},
            weights={**WEIGHTS, "ffn_norm": ""},
        ),
        "granitehybrid": GRANITE._replace(layer={**GRANITE.layer, **MAMBA}),
        "lfm2": LFM2,
        "lfm2moe": LFM2_MOE,
        **dict.fromkeys(("mamba2", "nemotron_h"), NEMOTRON),
        "nemotron_h_moe": NEMOTRON_MOE,
        **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), GATED_DELTA),
    }
)
"""`general.architecture` → its names."""
