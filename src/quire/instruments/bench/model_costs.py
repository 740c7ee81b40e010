"""The minimum that a step of a model must read and compute: the bounds for measurements.

    a step of decodes   reads every weight once, and the keys and values of its sequences; multiplies like a prompt
    a prompt            multiplies every weight with every token, and queries with all earlier keys and values

A model with experts has no bound, because the tokens determine which experts a step reads. Plans and simulations use
the same counts (`ModelShape`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.cli.model_shapes import shape_of
from quire.compute.backend import BackendFacts
from quire.compute.models import ModelDescription
from quire.simulate.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Bytes that every step reads, and the costs of steps of certain lengths."""

    shape: ModelShape
    step_bytes: int
    kv_bytes_per_layer_token: int

    def kv_bytes(self, lengths: Iterable[int]) -> int:
        """Return the bytes of the keys, values and states that one new token of each sequence reads."""
        lengths = list(lengths)
        num_tokens = sum(kind.read(length - 1, 1) for length in lengths for kind in self.shape.kinds)
        return round(self.kv_bytes_per_layer_token * num_tokens) + len(lengths) * self.shape.state_bytes

    def prompt_operations(self, num_tokens: int) -> int:
        """Return the multiplications and additions of a prompt, with the logits of its last token."""
        pairs = sum(kind.pairs(0, num_tokens) for kind in self.shape.kinds)
        return self._operations(num_tokens, 1, pairs)

    def vector_operations(self, num_tokens: int) -> int:
        """Return the operations to embed a text, which needs no logits."""
        pairs = sum(kind.pairs(0, num_tokens) for kind in self.shape.kinds)
        return self._operations(num_tokens, 0, pairs)

    def decode_operations(self, lengths: Sequence[int]) -> int:
        """Return the operations of one new token of each sequence; `lengths` include it."""
        pairs = sum(kind.pairs(length - 1, 1) for length in lengths for kind in self.shape.kinds)
        return self._operations(len(lengths), len(lengths), pairs)

    def _operations(self, num_tokens: int, num_logits: int, pairs: float) -> int:
        shape = self.shape
        products = num_tokens * shape.operations_per_token + num_logits * shape.operations_per_logits
        return products + round(pairs * shape.operations_per_pair) + num_tokens * shape.state_operations


def model_costs(model: ModelDescription, facts: BackendFacts) -> ModelCosts | None:
    """Return the costs of a model; None if they depend on the tokens."""
    if model.spec.experts is not None:
        return None
    shape = shape_of(model.architecture, model, facts)
    read = (shape.layers + shape.head).read_bytes(facts.dtype, facts.weights)
    return ModelCosts(shape, read, facts.kv_spec.bytes_per_layer_token)
