"""The names of the families of Gemma, whose layers have norms before and after their parts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.name_tables.table import EXPERTS, LAYER, ONCE, NameTable

NORMS_AROUND: Final = MappingProxyType(
    {
        **LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
WITH_INPUTS: Final = MappingProxyType(
    {
        **NORMS_AROUND,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    }
)
ONCE_WITH_INPUTS: Final = MappingProxyType(
    {
        **ONCE,
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    }
)
GEMMA3N: Final = NameTable(
    {
        **WITH_INPUTS,
        "altup_correct_coef": "altup.correction_coefs",
        "altup_correct_scale": "altup.correct_output_scale",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    ONCE_WITH_INPUTS,
    stacks={
        "altup_proj": "model.altup_projections.{number}",
        "altup_unembd_proj": "model.altup_unembed_projections.{number}",
    },
)
GEMMA4: Final = MappingProxyType(
    {
        **WITH_INPUTS,
        "layer_output_scale": "layer_scalar",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    }
)
GEMMA: Final[Mapping[str, NameTable]] = MappingProxyType(
    {
        "gemma-embedding": NameTable(NORMS_AROUND, {**ONCE, "dense_2": "2_Dense.linear", "dense_3": "3_Dense.linear"}),
        "gemma2": NameTable(NORMS_AROUND),
        # Ollama's EmbeddingGemma is a Gemma 3 with a pooling.
        "gemma3": NameTable(NORMS_AROUND, {**ONCE, "dense.0": "2_Dense.linear", "dense.1": "3_Dense.linear"}),
        "gemma3n": GEMMA3N,
        "gemma4": NameTable(
            GEMMA4, ONCE_WITH_INPUTS, experts={theirs: ours.removeprefix("mlp.") for theirs, ours in EXPERTS.items()}
        ),
    }
)
"""`general.architecture` → its names."""
