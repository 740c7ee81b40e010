"""How a model is split among ranks, known without torch, so that any machine can make a plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from quire.compute.models.base import DecoderSpec, NormScope
from quire.core.errors import InvalidConfigError

FIELD: Final = "tensor_parallel"


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


def shard_of(spec: DecoderSpec, num_ranks: int) -> DecoderSpec:
    """Return what each of several ranks computes; raises `InvalidConfigError` if the model cannot be split so."""
    heads, mlp = spec.attention, spec.mlp
    sizes = {
        "query heads": heads.num_heads,
        "key-value heads": heads.num_kv_heads,
        "numbers between the matrices of an MLP": mlp.intermediate_size,
        "numbers in a hidden state": spec.hidden_size,
        "tokens in the vocabulary": spec.vocab_size,
    }
    for name, size in sizes.items():
        if size % num_ranks:
            raise InvalidConfigError(FIELD, num_ranks, f"a number that divides the model's {size} {name}")
    if spec.experts is not None:
        raise InvalidConfigError(FIELD, num_ranks, "1: models with experts are not split yet")
    if heads.qk_norm is not None and heads.qk_norm_scope is not NormScope.HEAD:
        raise InvalidConfigError(FIELD, num_ranks, "1: norms of more than a head of queries are not split yet")
    attention = replace(heads, num_heads=heads.num_heads // num_ranks, num_kv_heads=heads.num_kv_heads // num_ranks)
    return replace(spec, attention=attention, mlp=replace(mlp, intermediate_size=mlp.intermediate_size // num_ranks))
