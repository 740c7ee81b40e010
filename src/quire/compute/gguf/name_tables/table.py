"""NameTable: the names of an architecture's tensors; and the names that many architectures share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

ONCE: Final = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
LAYER: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
    }
)
NORM_AFTER_ATTENTION: Final = MappingProxyType(
    {
        **{name: ours for name, ours in LAYER.items() if name != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
    }
)
"""The norm before the MLP, by the other name that some files have for it."""

OF_MLP: Final = ("gate", "up", "down")
EXPERTS: Final = MappingProxyType({f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in OF_MLP})
WEIGHTS: Final = MappingProxyType(
    {
        **dict.fromkeys(("exp_probs_b", "ssm_dt"), ".bias"),
        **dict.fromkeys(("ssm_a", "ssm_d", "ffn_gate_inp.scale", "ffn_down_exps.scale"), ""),
    }
)


class NameTable(NamedTuple):
    """The names of an architecture's tensors: in a file → in Hugging Face.

    `layer`: those of each layer, after `prefix` and its number. `once`: those outside layers. `experts`: those of each
    expert. `weights`: the parts with a weight whose name does not end in `.weight` → its end; that of `exp_probs_b` is
    `ExpertsSpec.offset`. `stacks`: those outside layers that have several matrices, each with a `number`.
    """

    layer: Mapping[str, str] = LAYER
    once: Mapping[str, str] = ONCE
    prefix: str = "model.layers."
    experts: Mapping[str, str] = EXPERTS
    weights: Mapping[str, str] = WEIGHTS
    stacks: Mapping[str, str] = MappingProxyType({})
