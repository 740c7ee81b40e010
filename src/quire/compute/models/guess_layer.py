"""The layer with which a model guesses its own next tokens: one more layer in its checkpoint (MTP, `nextn`).

    position i          h(i), the model's hidden state after the final norm, and t(i + 1), the next token
    row of the layer    EMBEDDING_IN · [TOKEN_NORM(embedding of t(i + 1)), STATE_NORM(h(i))]
    then                one decoder layer over the rows up to i, FINAL_NORM, the model's own head: logits of t(i + 2)

The layer is a decoder of its own, of one layer without a vocabulary: its rows are given, and the model embeds tokens
and computes logits for it. For a guess after the first, its own output replaces the model's hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import Part, WeightSource

NEXTN: Final = MappingProxyType(
    {
        Part.TOKEN_NORM: "enorm",
        Part.STATE_NORM: "hnorm",
        Part.EMBEDDING_IN: "eh_proj",
        Part.FINAL_NORM: "shared_head.norm",
    }
)
"""The names of DeepSeek, within the layer."""
OF_LAYER: Final = "layers.{layer}."
EXPECTED_RIGHT: Final = 0.8
"""How often a guess of a trained layer is expected to be right."""
LEAST_GAIN: Final = 1.15
"""The speedup of one text for which `auto` loads the layer."""
MOST_SHARE: Final = 0.05
"""The most that the layer may add to the weights, of which it takes time even if no guess pays."""


def with_guess_layer(spec: DecoderSpec, layer: str, others: Mapping[Part, str]) -> DecoderSpec:
    """Return the spec, which knows the tensors of a layer that guesses.

    `layer`: what the names of its layer begin with; `others`: the names of the other parts. A model without a layer
    with attention stays as it is: its blocks have no slots for keys.
    """
    if all(each.recurrent for each in spec.layers):
        return spec
    of_layer = {
        part: replace(source, stem=layer + source.stem.partition(OF_LAYER)[2])
        for part, source in spec.sources.items()
        if OF_LAYER in source.stem
    }
    sources = of_layer | {part: WeightSource(stem) for part, stem in others.items()}
    return replace(spec, guess_sources=MappingProxyType(sources))


def guess_layer(spec: DecoderSpec) -> DecoderSpec:
    """Return the spec of the layer that guesses, which is like the model's last layer with attention. Pure."""
    layer = next(each for each in reversed(spec.layers) if not each.recurrent)
    return replace(
        spec,
        vocab_size=0,
        embedding_size=2 * spec.hidden_size,
        joins_states=True,
        tied_head=True,
        layers=(layer,),
        experts=spec.experts if layer.sparse else None,
        delta=None,
        sources=spec.guess_sources,
        guess_sources=MappingProxyType({}),
        ignored_tensors=frozenset(),
        ignored_prefixes=("",),  # all other tensors are the model's
    )


def guess_layer_stem(spec: DecoderSpec) -> str:
    """Return the name of a tensor that a checkpoint with the layer has, without `.weight`. Pure."""
    return spec.guess_sources[Part.EMBEDDING_IN].stem


def guesses_should_pay(spec: DecoderSpec) -> bool:
    """Return whether the layer of a model is expected to be worth its time. Pure.

    A step takes as long as it reads weights. For one text, a guess adds the layer, a second pass of the head, and the
    experts of a second token. For many texts no guess pays, and the layer is all that is added.
    """
    layer, head = guess_layer(spec), spec.vocab_size * spec.hidden_size
    shared, of_token, total = _layer_numbers(spec)
    own_shared, own_of_token, own_total = _layer_numbers(layer)
    join = 2 * spec.hidden_size**2
    plain = shared + of_token + head
    with_guess = shared + 2 * of_token + own_shared + own_of_token + join + 2 * head
    gain = (1 + EXPECTED_RIGHT) * plain / with_guess
    return gain >= LEAST_GAIN and own_total + join <= MOST_SHARE * (total + head)


def _layer_numbers(spec: DecoderSpec) -> tuple[int, int, int]:
    """Return the weights of all layers: those that each token shares, those of a token's experts, and the total."""
    shared = of_token = total = 0
    for layer in spec.layers:
        own = sum(prod(part.weight) for part in spec.layer_parts(layer).values())
        shared, total = shared + own, total + own
        if spec.experts is not None and layer.sparse:
            expert = sum(prod(part.weight) for part in spec.expert_parts().values())
            of_token += spec.experts.experts_per_token * expert
            total += spec.experts.num_experts * expert
    return shared, of_token, total


def joined_row_bytes(spec: DecoderSpec) -> int:
    """Return the bytes of hidden states and rows, in float32, for each token of a step that the layer reads. Pure."""
    return 5 * spec.hidden_size * 4 if spec.joins_states else 0
