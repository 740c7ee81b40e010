"""FusedExperts: `ExpertOperations` in Triton kernels; the host need not know which token went to which expert.

A layer of any number of experts is eight launches: rows in float32, the router's product, `route`, `group`, up,
activation, down, `combine`. Their shapes depend only on the number of rows, so steps can be launched ahead and recorded
as for other models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.compute.models.sublayers import ExpertsSpec, Scoring
from quire.compute.torch.experts import routed, weighed_rows
from quire.compute.torch.kernels.expert_groups import Groups, combine, group, route
from quire.compute.torch.kernels.grouped_product import MANY, ProductShape, grouped_product, shape_for
from quire.compute.torch.products import Matrix


class GroupedRows(NamedTuple):
    """The experts of each row and their shares, `[num_rows, choices]`, the pairs by expert, and how to multiply."""

    ids: torch.Tensor
    shares: torch.Tensor
    groups: Groups
    shape: ProductShape


class FusedExperts:
    """Triton kernels; implements `ExpertOperations`. With `batch_invariant` all products have one shape."""

    def __init__(self, *, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant

    def route(
        self, scores: torch.Tensor, slots: torch.Tensor, spec: ExpertsSpec, offset: torch.Tensor | None
    ) -> GroupedRows:
        """Return the experts with the highest weights; among equal ones, those with the lowest ids.

        The kernel computes a softmax alone; torch's operations, which are more launches, compute the other rules.
        """
        if offset is not None or spec.scoring is not Scoring.SOFTMAX or spec.num_groups > 1 or spec.scale != 1:
            found = routed(scores, spec, offset)
            return self.known(found.ids.to(torch.int32), spec.num_experts)._replace(shares=found.shares)
        ids, shares = route(scores, slots, spec.experts_per_token, normalize=spec.normalize_weights)
        return self.known(ids, spec.num_experts)._replace(shares=shares)

    def product(self, rows: torch.Tensor, experts: Matrix, routing: GroupedRows) -> torch.Tensor:
        """Return the products, all experts at once."""
        return grouped_product(rows, experts, routing.groups, routing.shape)

    def scaled(self, routing: GroupedRows, factors: torch.Tensor) -> GroupedRows:
        """Return the routing with other weights."""
        return routing._replace(shares=routing.shares * factors[routing.ids])

    def weighed(self, rows: torch.Tensor, routing: GroupedRows) -> tuple[torch.Tensor, GroupedRows]:
        """Return one row per pair, times its weight, and the routing without weights."""
        return weighed_rows(rows, routing.shares), routing._replace(shares=torch.ones_like(routing.shares))

    def combine(self, outputs: torch.Tensor, routing: GroupedRows) -> torch.Tensor:
        """Return the sums."""
        return combine(outputs, routing.shares)

    def known(self, ids: torch.Tensor, num_experts: int) -> GroupedRows:
        """Return the routing of rows whose experts are known."""
        shape = MANY if self._batch_invariant else shape_for(ids.numel(), num_experts)
        return GroupedRows(ids, ids, group(ids, num_experts, shape.rows), shape)

    def ids(self, routing: GroupedRows) -> torch.Tensor:
        """Return the experts of the rows of a routing."""
        return routing.ids
