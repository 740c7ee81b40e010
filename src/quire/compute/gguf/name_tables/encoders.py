"""The names of encoders of texts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.name_tables.table import NameTable

TOKEN_TYPES: Final = "token_types.weight"
"""A BERT without them is a DistilBERT."""

DISTIL_BERT: Final = NameTable(
    {
        "attn_q": "attention.q_lin",
        "attn_k": "attention.k_lin",
        "attn_v": "attention.v_lin",
        "attn_output": "attention.out_lin",
        "attn_output_norm": "sa_layer_norm",
        "ffn_up": "ffn.lin1",
        "ffn_down": "ffn.lin2",
        "layer_output_norm": "output_layer_norm",
    },
    {
        "token_embd": "distilbert.embeddings.word_embeddings",
        "position_embd": "distilbert.embeddings.position_embeddings",
        "token_embd_norm": "distilbert.embeddings.LayerNorm",
        "cls": "pre_classifier",
        "cls.output": "classifier",
    },
    "distilbert.transformer.layer.",
)
ENCODERS: Final[Mapping[str, NameTable]] = MappingProxyType(
    {
        "bert": NameTable(
            {
                "attn_q": "attention.self.query",
                "attn_k": "attention.self.key",
                "attn_v": "attention.self.value",
                "attn_output": "attention.output.dense",
                "attn_output_norm": "attention.output.LayerNorm",
                "ffn_up": "intermediate.dense",
                "ffn_down": "output.dense",
                "layer_output_norm": "output.LayerNorm",
            },
            {
                "token_embd": "bert.embeddings.word_embeddings",
                "position_embd": "bert.embeddings.position_embeddings",
                "token_types": "bert.embeddings.token_type_embeddings",
                "token_embd_norm": "bert.embeddings.LayerNorm",
                "cls": "classifier.dense",
                "cls.output": "classifier.out_proj",
            },
            "bert.encoder.layer.",
        ),
        "jina-bert-v3": NameTable(
            {
                "attn_qkv": "mixer.Wqkv",
                "attn_output": "mixer.out_proj",
                "attn_output_norm": "norm1",
                "ffn_up": "mlp.fc1",
                "ffn_down": "mlp.fc2",
                "layer_output_norm": "norm2",
            },
            {
                "token_embd": "roberta.embeddings.word_embeddings",
                "token_types": "roberta.embeddings.token_type_embeddings",
                "token_embd_norm": "roberta.emb_ln",
            },
            "roberta.encoder.layers.",
        ),
        "modern-bert": NameTable(
            {
                "attn_norm": "attn_norm",
                "attn_qkv": "attn.Wqkv",
                "attn_output": "attn.Wo",
                "ffn_norm": "mlp_norm",
                "ffn_up": "mlp.Wi",
                "ffn_down": "mlp.Wo",
            },
            {
                "token_embd": "model.embeddings.tok_embeddings",
                "token_embd_norm": "model.embeddings.norm",
                "output_norm": "model.final_norm",
                "cls": "head.dense",
                "cls.norm": "head.norm",
                "cls.output": "classifier",
            },
        ),
        "nomic-bert": NameTable(
            {
                "attn_qkv": "attn.Wqkv",
                "attn_output": "attn.out_proj",
                "attn_output_norm": "norm1",
                "ffn_up": "mlp.fc11",
                "ffn_gate": "mlp.fc12",
                "ffn_down": "mlp.fc2",
                "layer_output_norm": "norm2",
            },
            {
                "token_embd": "embeddings.word_embeddings",
                "token_types": "embeddings.token_type_embeddings",
                "token_embd_norm": "emb_ln",
            },
            "encoder.layers.",
        ),
    }
)
"""`general.architecture` → its names."""
