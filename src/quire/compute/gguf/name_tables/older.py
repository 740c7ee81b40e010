"""The names of decoders from before Llama, whose modules have names of their own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.name_tables.table import LAYER, ONCE, NameTable

FALCON: Final = NameTable(
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
    {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"},
    "transformer.h.",
)
FALCON_TWO_NORMS: Final = FALCON._replace(layer={**FALCON.layer, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
OLDER: Final[Mapping[str, NameTable]] = MappingProxyType(
    {
        "exaone": NameTable(
            {
                "attn_norm": "ln_1",
                **{f"attn_{part}": f"attn.attention.{part}_proj" for part in ("q", "k", "v")},
                "attn_output": "attn.attention.out_proj",
                "ffn_norm": "ln_2",
                "ffn_gate": "mlp.c_fc_0",
                "ffn_up": "mlp.c_fc_1",
                "ffn_down": "mlp.c_proj",
            },
            {"token_embd": "transformer.wte", "output_norm": "transformer.ln_f", "output": "lm_head"},
            "transformer.h.",
        ),
        "falcon": FALCON,
        "gpt2": NameTable(
            {
                "attn_norm": "ln_1",
                "attn_qkv": "attn.c_attn",
                "attn_output": "attn.c_proj",
                "ffn_norm": "ln_2",
                "ffn_up": "mlp.c_fc",
                "ffn_down": "mlp.c_proj",
            },
            {
                "token_embd": "transformer.wte",
                "position_embd": "transformer.wpe",
                "output_norm": "transformer.ln_f",
                "output": "lm_head",
            },
            "transformer.h.",
        ),
        "gptneox": NameTable(
            {
                **{name: ours.replace("self_attention", "attention") for name, ours in FALCON.layer.items()},
                "ffn_norm": "post_attention_layernorm",
            },
            {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
            "gpt_neox.layers.",
        ),
        "phi2": NameTable(
            {**LAYER, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
            {**ONCE, "output_norm": "model.final_layernorm"},
        ),
    }
)
"""`general.architecture` → its names."""
