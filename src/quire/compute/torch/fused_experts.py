"""FusedExperts: `ExpertOperations` in Triton kernels; the host need not know which token went to which expert.

A layer of any number of experts is eight launches: rows in float32, the router's product, `route`, `group`, up,
activation, down, `combine`. Their shapes depend only on the number of rows, so steps can be launched ahead and recorded
as for other models.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quire.compute.models.base import ExpertsSpec
from quire.compute.torch.kernels.expert_groups import Groups, combine, group, route
from quire.compute.torch.kernels.grouped_product import MANY, ProductShape, grouped_product, shape_for
from quire.compute.torch.products import Matrix


class GroupedRows(NamedTuple):
    """The shares of each row's experts, `[num_rows, experts_per_token]`, its pairs by expert, and how to multiply."""

    shares: torch.Tensor
    groups: Groups
    shape: ProductShape


class FusedExperts:
    """Triton kernels; implements `ExpertOperations`. With `batch_invariant` all products have one shape."""

    def __init__(self, *, batch_invariant: bool) -> None:
        self._batch_invariant = batch_invariant

    def route(self, scores: torch.Tensor, slots: torch.Tensor, spec: ExpertsSpec) -> GroupedRows:
        """Return the experts with the highest weights; among equal ones, those with the lowest ids."""
        ids, shares = route(scores, slots, spec.experts_per_token, normalize=spec.normalize_weights)
        shape = MANY if self._batch_invariant else shape_for(ids.numel(), spec.num_experts)
        return GroupedRows(shares, group(ids, spec.num_experts, shape.rows), shape)

    def product(self, rows: torch.Tensor, experts: Matrix, routing: GroupedRows) -> torch.Tensor:
        """Return the products, all experts at once."""
        return grouped_product(rows, experts, routing.groups, routing.shape)

    def combine(self, outputs: torch.Tensor, routing: GroupedRows) -> torch.Tensor:
        """Return the sums."""
        return combine(outputs, routing.shares)
