"""MLPs, and experts: MLPs of which a router picks a few for each token.

    rows ─► router ─► the best experts of each row, by weight, then by id
         ─► pairs (row, expert): up ─► activation ─► down
         ─► back to their rows, added in the order of expert ids

Every row's sum has an order of its own, and no two programs add to one number, so bits do not depend on who else picked
an expert. `ExpertOperations` is what the layer walk asks for; which form answers is chosen when a decoder is made.
`PlainExperts` is torch alone, written to be read: it asks which rows each expert has, and multiplies expert by expert.
On a GPU that would make the host wait in every layer; there `FusedExperts` keeps all of it on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from quire.compute.models.base import Activation, ExpertsSpec
from quire.compute.torch.operations import Operations
from quire.compute.torch.products import Matrix, Product
from quire.compute.torch.weights import MLP

Routing = TypeVar("Routing")
"""Which experts rows go to: whatever a form knows them by."""


class ExpertOperations(Protocol[Routing]):
    """What experts compute with. A pair is row × experts_per_token + choice. Nothing passed in is mutated."""

    def route(self, scores: torch.Tensor, slots: torch.Tensor, spec: ExpertsSpec) -> Routing:
        """Return where rows go, of the router's scores, float32 `[num_rows, num_experts]`.

        Rows whose slot is -1 count for nothing: they may go anywhere.
        """
        ...

    def product(self, rows: torch.Tensor, experts: Matrix, routing: Routing) -> torch.Tensor:
        """Return the product of each pair with the matrix of its expert: `[num_pairs, out]`.

        `rows` are those that were routed, or a row for each pair; `experts` hold `[num_experts, out, in]`.
        """
        ...

    def combine(self, outputs: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the weighted sum of each row's pairs, of `[num_pairs, size]`: `[num_rows, size]`."""
        ...


class MLPs:
    """Computes the second sublayer; what it computes with is chosen once. Immutable."""

    def __init__(
        self,
        operations: Operations,
        product: Product,
        experts: ExpertOperations[Any],
        activation: Activation,
        *,
        gated: bool,
    ) -> None:
        self._product = product
        self._experts = experts
        self._activation = activation
        self._activate = operations.gated if gated else operations.activate

    def dense(self, rows: torch.Tensor, mlp: MLP) -> torch.Tensor:
        """Return the MLP of each row: `[num_rows, hidden_size]`."""
        return self._product(self._activate(self._product(rows, mlp.up), self._activation), mlp.down)

    def sparse(
        self, rows: torch.Tensor, slots: torch.Tensor, router: Matrix, experts: MLP, spec: ExpertsSpec
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts: `[num_rows, hidden_size]`; where a slot is -1, anything."""
        routing = self._experts.route(self._product(rows.to(torch.float32), router), slots, spec)
        active = self._activate(self._experts.product(rows, experts.up, routing), self._activation)
        return self._experts.combine(self._experts.product(active, experts.down, routing), routing)


class Routed(NamedTuple):
    """The experts of each row, in the order of ids, and the weight of each: `[num_rows, experts_per_token]`."""

    ids: torch.Tensor
    shares: torch.Tensor


class PlainExperts:
    """Torch operations; implements `ExpertOperations`."""

    def __init__(self, product: Product) -> None:
        self._product = product

    def route(self, scores: torch.Tensor, slots: torch.Tensor, spec: ExpertsSpec) -> Routed:
        """Return the experts of the highest weights; of equal ones those of the lowest ids."""
        weights, ids = torch.softmax(scores, dim=-1).sort(dim=-1, descending=True, stable=True)
        weights, ids = weights[:, : spec.experts_per_token], ids[:, : spec.experts_per_token]
        if spec.normalize_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        ids, order = ids.sort(dim=-1)
        return Routed(ids, weights.gather(-1, order))

    def product(self, rows: torch.Tensor, experts: Matrix, routing: Routed) -> torch.Tensor:
        """Return the products, expert by expert."""
        ids = routing.ids.flatten()
        outputs = rows.new_empty((len(ids), experts.weight.shape[1]))
        for expert in ids.unique().tolist():
            pairs = (ids == expert).nonzero()[:, 0]
            outputs[pairs] = self._product(rows[pairs // (len(ids) // len(rows))], experts.of(expert))
        return outputs

    def combine(self, outputs: torch.Tensor, routing: Routed) -> torch.Tensor:
        """Return the sums, added choice by choice."""
        weighted = outputs.unflatten(0, routing.ids.shape).to(torch.float32) * routing.shares[..., None]
        total = weighted[:, 0]
        for choice in range(1, weighted.shape[1]):
            total = total + weighted[:, choice]
        return total.to(outputs.dtype)
