"""The names of decoders without experts that differ from Llama's in a few tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.name_tables.table import LAYER, NORM_AFTER_ATTENTION, NameTable

ONE_GATE_AND_UP: Final = MappingProxyType({**LAYER, "ffn_up": "mlp.gate_up_proj"})
NORMS_AFTER: Final = MappingProxyType(
    {
        **{name: ours for name, ours in LAYER.items() if name not in ("attn_norm", "ffn_norm")},
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
HUNYUAN: Final = MappingProxyType(
    {**LAYER, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
)
DENSE: Final[Mapping[str, NameTable]] = MappingProxyType(
    {
        "apertus": NameTable({**LAYER, "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}),
        **dict.fromkeys(("chatglm", "phi3"), NameTable(ONE_GATE_AND_UP)),
        **dict.fromkeys(("exaone4", "olmo2"), NameTable(NORMS_AFTER)),
        "glm4": NameTable(
            {
                **ONE_GATE_AND_UP,
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            }
        ),
        "hunyuan-dense": NameTable(HUNYUAN),
        "seed_oss": NameTable(NORM_AFTER_ATTENTION),
        "starcoder2": NameTable({**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    }
)
"""`general.architecture` → its names."""
