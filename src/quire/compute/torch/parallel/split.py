"""How a model is split among ranks, computed without torch, so that any machine can plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import NormScope
from quire.compute.torch.device import DeviceFacts
from quire.compute.weights.decoder_weights import weight_bytes
from quire.core.errors import InvalidConfigError

FIELD: Final = "tensor_parallel"
SUMS: Final = "tensor_parallel_sums"


@dataclass(frozen=True, slots=True)
class Rank:
    """One of several processes that compute together."""

    number: int
    count: int

    def share_of(self, size: int) -> slice:
        """Return the outputs of this rank, of a matrix with `size` outputs.

        >>> Rank(1, 2).share_of(6)
        slice(3, 6, None)
        """
        width = size // self.count
        return slice(self.number * width, (self.number + 1) * width)

    def among(self, count: int) -> Rank:
        """Return the share of this rank if only `count` shares exist, so that several ranks have the same share.

        >>> [Rank(number, 4).among(2).number for number in range(4)]
        [0, 0, 1, 1]
        """
        return Rank(self.number * count // self.count, count)


def shard_of(spec: DecoderSpec, num_ranks: int) -> DecoderSpec:
    """Return the spec of one rank's share; raises `InvalidConfigError` if the model cannot be split this way."""
    heads, mlp, experts = spec.attention, spec.mlp, spec.experts
    if heads.latent is not None:
        raise InvalidConfigError(FIELD, num_ranks, "1: latents (MLA) cannot be split")
    if heads.qk_norm is not None and heads.qk_norm_scope is NormScope.ALL_HEADS:
        raise InvalidConfigError(FIELD, num_ranks, "1: a norm of all heads together cannot be split")
    sizes = [("query heads", heads.num_heads), ("numbers of a hidden state", spec.hidden_size)]
    for layer in spec.layers:
        if not layer.sparse:
            sizes.append(("intermediate numbers of an MLP", layer.intermediate_size or mlp.intermediate_size))
    if experts is not None:
        sizes.append(("intermediate numbers of an expert", experts.intermediate_size))
        sizes.append(("intermediate numbers of the MLP next to experts", experts.shared_size))
    for name, size in sizes:
        if size % num_ranks:
            raise InvalidConfigError(FIELD, num_ranks, f"a number that divides the model's {size} {name}")
    for num_kv_heads in sorted({spec.attention_of(layer).num_kv_heads for layer in spec.layers}):
        if num_kv_heads % num_ranks and num_ranks % num_kv_heads:
            allowed = f"a number that divides the model's {num_kv_heads} key-value heads, or a multiple of this number"
            raise InvalidConfigError(FIELD, num_ranks, allowed)
    spec = _with_kv_heads(spec, lambda count: max(1, count // num_ranks))
    return replace(
        spec,
        attention=replace(spec.attention, num_heads=heads.num_heads // num_ranks),
        layers=tuple(
            replace(layer, intermediate_size=layer.intermediate_size and layer.intermediate_size // num_ranks)
            for layer in spec.layers
        ),
        mlp=replace(mlp, intermediate_size=mlp.intermediate_size // num_ranks),
        experts=experts
        and replace(
            experts,
            intermediate_size=experts.intermediate_size // num_ranks,
            shared_size=experts.shared_size // num_ranks,
        ),
    )


def stored_by_all(spec: DecoderSpec, num_ranks: int) -> DecoderSpec:
    """Return the spec with as many key-value heads as all ranks store together."""
    return _with_kv_heads(spec, lambda count: max(1, count // num_ranks) * num_ranks)


def _with_kv_heads(spec: DecoderSpec, change: Callable[[int], int]) -> DecoderSpec:
    """Return the spec with another number of key-value heads in each layer."""
    layers = tuple(
        replace(layer, heads=layer.heads and replace(layer.heads, num_kv_heads=change(layer.heads.num_kv_heads)))
        for layer in spec.layers
    )
    attention = replace(spec.attention, num_kv_heads=change(spec.attention.num_kv_heads))
    return replace(spec, attention=attention, layers=layers)


def splits_head(spec: DecoderSpec, num_ranks: int) -> bool:
    """Return whether each rank computes a part of the logits; if the vocabulary cannot be divided, all compute all."""
    return spec.vocab_size % num_ranks == 0


def bytes_of_rank(spec: DecoderSpec, num_ranks: int, stored: tuple[str, str, Mapping[str, str]]) -> int:
    """Return the bytes of the weights of a rank: the whole embeddings, and a share of the rest.

    `stored`: the dtype, the weights and the block types, as in `weight_bytes`.
    """
    whole, dtype = weight_bytes(spec, *stored), stored[0]
    if num_ranks == 1:
        return whole
    row = (spec.embedding_size or spec.hidden_size) * (1 if splits_head(spec, num_ranks) or spec.tied_head else 2)
    if spec.layer_inputs is not None:
        row += spec.layer_inputs.size * len(spec.layers)
    kept = spec.vocab_size * row * (4 if dtype == "float32" else 2)
    return min(whole, kept + max(whole - kept, 0) // num_ranks)


def require_gpus(facts: DeviceFacts, num_ranks: int) -> None:
    """Raise `InvalidConfigError` unless each rank can have a GPU, all of one kind. Pure."""
    names = [] if facts.gpu is None else [facts.gpu, *facts.others]
    if names and len(names) < num_ranks:
        allowed = f"at most {len(names)} on this machine: each rank needs its own GPU"
        raise InvalidConfigError(FIELD, num_ranks, allowed)
    if len(set(names)) > 1:
        raise InvalidConfigError(FIELD, num_ranks, f"1 here: ranks need equal GPUs, not {' and '.join(names)}")
