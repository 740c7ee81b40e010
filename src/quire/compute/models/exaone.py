"""EXAONE 3 and 3.5: Llama with other names for its settings and tensors.

transformers 5 runs it with the code of Llama, so a folder that it saved names Llama as its architecture, and has the
names of Llama for settings; the tensors keep their names.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import llama
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part

NAMES: Final = MappingProxyType(
    {"num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"}
)
DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
        "tie_word_embeddings": True,  # folders that the makers' code saved lack it then; transformers 5 always has it
    }
)
PREFIX: Final = "transformer."
LAYER: Final = "transformer.h.{layer}."
STEMS: Final = MappingProxyType(
    {
        Part.EMBEDDING: "transformer.wte",
        Part.ATTENTION_NORM: LAYER + "ln_1",
        Part.QUERY: LAYER + "attn.attention.q_proj",
        Part.KEY: LAYER + "attn.attention.k_proj",
        Part.VALUE: LAYER + "attn.attention.v_proj",
        Part.OUTPUT: LAYER + "attn.attention.out_proj",
        Part.MLP_NORM: LAYER + "ln_2",
        Part.GATE: LAYER + "mlp.c_fc_0",
        Part.UP: LAYER + "mlp.c_fc_1",
        Part.DOWN: LAYER + "mlp.c_proj",
        Part.FINAL_NORM: "transformer.ln_f",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an EXAONE model; refuses settings that quire does not interpret."""
    renamed = {NAMES.get(name, name): value for name, value in config.fields.items()}
    spec = llama.decoder_spec(ConfigFile(config.where, renamed).over(DEFAULTS), max_length)
    return replace(with_stems(spec, STEMS), optional_prefix=PREFIX)
