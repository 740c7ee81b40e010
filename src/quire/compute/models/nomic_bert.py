"""NomicBERT: BERT with rotary positions, a gated MLP and no biases in its matrices.

The published config.json has the names of GPT-2's settings, that of transformers those of BERT. A text is at most as
long as those in training: longer ones would need other frequencies, which depend on their length.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import activation, divided_head_dim, num_layers
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part, WeightSource
from quire.compute.models.rope import rope_spec
from quire.compute.models.sublayers import AttentionSpec, MLPSpec

LAYER: Final = "encoder.layers.{layer}."
BASE: Final = 1000.0
NAMES: Final = MappingProxyType(
    {
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_layer": "num_hidden_layers",
        "layer_norm_epsilon": "layer_norm_eps",
        "rotary_emb_base": "rope_theta",
    }
)
"""Settings of the published config.json → their names in BERT's."""

DIFFERENT: Final = (
    *("causal", "mlp_fc1_bias", "mlp_fc2_bias", "parallel_block", "prenorm", "qkv_proj_bias"),
    *("rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx", "use_rms_norm"),
)
"""Settings of the published config.json that would make another model."""


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a NomicBERT model; refuses settings that quire does not interpret."""
    config = _named_as_bert(config)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = divided_head_dim(config, "hidden_size", "num_attention_heads")
    if config.size("head_dim", head_dim) != head_dim:
        raise config.error("head_dim", f"{head_dim}, the hidden size divided by the number of heads")
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        context_length=config.size("max_position_embeddings", high=MAX_LENGTH),
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_eps", 1e-12)),
        attention=AttentionSpec(heads, heads, head_dim, head_dim**-0.5, bidirectional=True),
        mlp=MLPSpec(config.size("intermediate_size"), activation(config, "hidden_act", "silu")),
        layers=(LayerSpec(window=None, rope=rope_spec(config, head_dim, max_length)),) * num_layers(config),
        sources=_sources(hidden),
        tied_head=True,
        norm_before=False,
        norm_joined=True,
        final_norm=False,
        token_types=config.size("type_vocab_size", 2),
        embedding_norm=True,
    )


def _named_as_bert(config: ConfigFile) -> ConfigFile:
    """Return the settings under BERT's names."""
    if "n_embd" not in config.fields:
        return config.over({"rope_theta": BASE, "max_position_embeddings": 2048})
    config.refuse(*DIFFERENT)
    config.require("activation_function", "swiglu")
    if config.number("rotary_emb_fraction", 1.0) != 1.0:
        raise config.error("rotary_emb_fraction", "1.0")
    if config.is_set("num_experts") or not config.flag("scale_attn_weights", True):
        raise config.error("num_experts", "null: no NomicBERT with experts is run")
    most = config.size("n_positions", 2048, high=MAX_LENGTH)
    trained = config.size("max_trained_positions", most, high=MAX_LENGTH)
    renamed = {ours: config.fields[theirs] for theirs, ours in NAMES.items() if theirs in config.fields}
    renamed["max_position_embeddings"] = min(most, trained)
    return ConfigFile(config.where, {**config.fields, **renamed}).over({"rope_theta": 10_000.0})


def _sources(hidden: int) -> MappingProxyType[Part, WeightSource]:
    qkv = LAYER + "attn.Wqkv"
    return MappingProxyType(
        {
            Part.EMBEDDING: WeightSource("embeddings.word_embeddings"),
            Part.TOKEN_TYPES: WeightSource("embeddings.token_type_embeddings"),
            Part.EMBEDDING_NORM: WeightSource("emb_ln"),
            Part.QUERY: WeightSource(qkv),
            Part.KEY: WeightSource(qkv, first_row=hidden),
            Part.VALUE: WeightSource(qkv, first_row=2 * hidden),
            Part.OUTPUT: WeightSource(LAYER + "attn.out_proj"),
            Part.JOINED_ATTENTION_NORM: WeightSource(LAYER + "norm1"),
            Part.UP: WeightSource(LAYER + "mlp.fc11"),
            Part.GATE: WeightSource(LAYER + "mlp.fc12"),
            Part.DOWN: WeightSource(LAYER + "mlp.fc2"),
            Part.JOINED_MLP_NORM: WeightSource(LAYER + "norm2"),
        }
    )
