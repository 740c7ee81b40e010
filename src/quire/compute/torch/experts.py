"""Experts: MLPs of which a router picks a few for each token.

    rows ─► router ─► the best experts of each row, by weight, then by id
         ─► pairs (row, expert), sorted by expert: the rows of one expert go through it together
         ─► back to their rows, added in the order of expert ids

Every row's sum has an order of its own, and no two programs add to one number, so bits do not depend on who else picked
an expert. How many rows each expert has is asked of the device once a layer: the launches that follow have that shape.
A step of a model with experts can therefore not be captured as a graph.
"""

from __future__ import annotations

import torch

from quire.compute.models.base import Activation, ExpertsSpec
from quire.compute.torch.operations import Operations
from quire.compute.torch.products import Product
from quire.compute.torch.weights import MLP, LayerWeights


class MLPs:
    """Computes the second sublayer; what it computes with is chosen once. Immutable."""

    def __init__(self, operations: Operations, product: Product, activation: Activation, *, gated: bool) -> None:
        self._product = product
        self._activation = activation
        self._activate = operations.gated if gated else operations.activate

    def dense(self, rows: torch.Tensor, mlp: MLP) -> torch.Tensor:
        """Return the MLP of each row: `[num_rows, hidden_size]`."""
        return self._product(self._activate(self._product(rows, mlp.up), self._activation), mlp.down)

    def sparse(self, rows: torch.Tensor, weights: LayerWeights, spec: ExpertsSpec) -> torch.Tensor:
        """Return the weighted sum of each row's experts: `[num_rows, hidden_size]`."""
        assert weights.router is not None  # a layer is sparse only where there is a router
        ids, shares = routed(self._product(rows.to(torch.float32), weights.router), spec)
        order = torch.argsort(ids.flatten(), stable=True)  # of pairs: the first expert's rows, in their order, …
        counts = torch.bincount(ids.flatten(), minlength=spec.num_experts).tolist()
        chosen = rows[order // spec.experts_per_token]
        outputs = torch.empty_like(chosen)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                outputs[order[start : start + count]] = self.dense(
                    chosen[start : start + count], weights.experts[expert]
                )
            start += count
        weighted = outputs.unflatten(0, ids.shape).to(torch.float32) * shares[..., None]
        total = weighted[:, 0]
        for choice in range(1, spec.experts_per_token):
            total = total + weighted[:, choice]
        return total.to(rows.dtype)


def routed(scores: torch.Tensor, spec: ExpertsSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each row, in the order of ids, and the weight of each: `[num_rows, experts_per_token]`.

    Those of the highest weights; of equal ones the lowest ids.
    """
    weights, ids = torch.softmax(scores, dim=-1).sort(dim=-1, descending=True, stable=True)
    weights, ids = weights[:, : spec.experts_per_token], ids[:, : spec.experts_per_token]
    if spec.normalize_weights:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    ids, order = ids.sort(dim=-1)
    return ids, weights.gather(-1, order)
