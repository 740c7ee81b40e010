"""What most families share: how Llama's descendants name their weights, and settings they all have.

Llama's modules are called the same in Mistral, Qwen, Gemma and others; a family starts from
`llama_sources` and adds or takes away.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import Part, WeightSource
from quire.compute.models.config_file import ConfigFile

MAX_LAYERS: Final = 10_000
LAYER: Final = "model.layers.{layer}."
HEAD_TENSOR: Final = "lm_head.weight"
LLAMA_STEMS: Final = MappingProxyType(
    {
        Part.EMBEDDING: "model.embed_tokens",
        Part.ATTENTION_NORM: LAYER + "input_layernorm",
        Part.QUERY: LAYER + "self_attn.q_proj",
        Part.KEY: LAYER + "self_attn.k_proj",
        Part.VALUE: LAYER + "self_attn.v_proj",
        Part.OUTPUT: LAYER + "self_attn.o_proj",
        Part.MLP_NORM: LAYER + "post_attention_layernorm",
        Part.GATE: LAYER + "mlp.gate_proj",
        Part.UP: LAYER + "mlp.up_proj",
        Part.DOWN: LAYER + "mlp.down_proj",
        Part.FINAL_NORM: "model.norm",
        Part.HEAD: "lm_head",
    }
)


def llama_sources(more: Mapping[Part, str] = MappingProxyType({})) -> Mapping[Part, WeightSource]:
    """Return where Llama's descendants keep their weights; `more` adds or replaces stems."""
    return MappingProxyType({part: WeightSource(stem) for part, stem in {**LLAMA_STEMS, **more}.items()})


def num_layers(config: ConfigFile) -> int:
    """Return the number of layers: as many as anyone has, so that no list of them fills the memory."""
    count = config.size("num_hidden_layers")
    if count > MAX_LAYERS:
        raise config.error("num_hidden_layers", f"at most {MAX_LAYERS}")
    return count


def head_dim(config: ConfigFile) -> int:
    """Return the size of a head: its own setting, else the hidden size divided among the heads."""
    if config.is_set("head_dim"):
        return config.size("head_dim")
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        raise config.error("hidden_size", f"a multiple of the {heads} heads")
    return hidden // heads


def unused_tensors(num_layers: int, *, tied_head: bool) -> frozenset[str]:
    """Return what a checkpoint may hold that is not used: a tied head, frequencies of the first Llamas."""
    frequencies = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(num_layers)}
    return frozenset(frequencies | ({HEAD_TENSOR} if tied_head else set()))
