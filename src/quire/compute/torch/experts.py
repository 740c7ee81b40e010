"""MLPs and experts: a router picks a few of many MLPs for each token.

    rows ─► router ─► the best experts of each row, by weight, then by id
         ─► pairs (row, expert): up ─► activation ─► down
         ─► back to their rows, added in the order of expert ids

Every row has its own order of sums, and no two programs add to one number, so bits do not depend on which other rows
picked an expert. The layer walk uses `ExpertOperations`; its implementation is chosen when a decoder is made.
`PlainExperts` is readable torch: it looks up the rows of each expert, and multiplies expert by expert. On a GPU that
would make the host wait in every layer, so `FusedExperts` does everything on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from quire.compute.models.parts import Part
from quire.compute.models.sublayers import Activation, ExpertsSpec, Scoring
from quire.compute.torch.adapters import Add
from quire.compute.torch.operations import Norm, Operations, xielu
from quire.compute.torch.products import Matrix, Product
from quire.compute.torch.weights import DENSE, MLP, SHARED, Experts

Routing = TypeVar("Routing")
"""The experts of each row, in the implementation's own form."""


class ExpertOperations(Protocol[Routing]):
    """The operations of experts. A pair is row × experts_per_token + choice. Do not mutate their arguments."""

    def route(
        self, scores: torch.Tensor, slots: torch.Tensor, spec: ExpertsSpec, offset: torch.Tensor | None
    ) -> Routing:
        """Return the experts of rows from the router's scores, float32 `[num_rows, num_experts]`.

        Rows with slot -1 do not count: they may go anywhere. `offset`: added to weights for the choice of experts.
        """
        ...

    def product(self, rows: torch.Tensor, experts: Matrix, routing: Routing) -> torch.Tensor:
        """Return the product of each pair with the matrix of its expert: `[num_pairs, out]`.

        `rows`: the routed rows, or one row per pair; `experts`: `[num_experts, out, in]`.
        """
        ...

    def scaled(self, routing: Routing, factors: torch.Tensor) -> Routing:
        """Return the routing with each weight multiplied by the factor of its expert, float32 `[num_experts]`."""
        ...

    def weighed(self, rows: torch.Tensor, routing: Routing) -> tuple[torch.Tensor, Routing]:
        """Return the routed rows as one row per pair, times its weight, and the routing with weights of 1."""
        ...

    def combine(self, outputs: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Return the weighted sum of each row's pairs: `[num_pairs, size]` to `[num_rows, size]`."""
        ...

    def known(self, ids: torch.Tensor, num_experts: int) -> Routing:
        """Return the routing of rows whose experts are known, int32 `[num_rows, choices]`; not for `combine`."""
        ...

    def ids(self, routing: Routing) -> torch.Tensor:
        """Return the experts of the rows of a routing, integers `[num_rows, choices]`."""
        ...


class SparseInputs(NamedTuple):
    """The inputs of a layer with experts: of the MLP next to them, of the router and of the experts."""

    rows: torch.Tensor
    to_router: torch.Tensor
    to_experts: torch.Tensor


class MLPs:
    """Computes the second sublayer, with implementations chosen once. Immutable."""

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
        self._norm = operations.norm
        self._experts = experts
        self._activation = activation
        self._activate = operations.gated if gated else operations.activate
        self._first = 0 if gated else 1  # of the parts of an MLP: the gate, or up
        self._expert_up_parts = (Part.EXPERT_GATE, Part.EXPERT_UP)[self._first :]

    def dense(self, rows: torch.Tensor, mlp: MLP, add: Add, parts: tuple[Part, ...] = DENSE) -> torch.Tensor:
        """Return the MLP of each row: `[num_rows, hidden_size]`. `add`: adds the adapters' part to its products."""
        inner = add(self._product(rows, mlp.up), rows, parts[self._first : -1])
        active = self._activate(inner, self._activation) if mlp.xielu is None else xielu(inner, mlp.xielu)
        return add(self._product(active, mlp.down), active, parts[-1:])

    def sparse(
        self, inputs: SparseInputs, slots: torch.Tensor, weights: Experts, spec: ExpertsSpec, add: Add
    ) -> torch.Tensor:
        """Return the weighted sum of each row's experts: `[num_rows, hidden_size]`; undefined for slots of -1."""
        scores, experts = self._product(inputs.to_router.to(torch.float32), weights.router), weights.experts
        scores, of_shared = scores.split([spec.num_experts, scores.shape[1] - spec.num_experts], dim=1)
        scores = scores.contiguous() if spec.score_scale == 1 else scores * spec.score_scale
        routing = self._experts.route(scores, slots, spec, weights.offset)
        if weights.factors is not None:
            routing = self._experts.scaled(routing, weights.factors)
        own, rows = add.with_experts(routing, spec.num_experts), inputs.to_experts
        if spec.weighs_inputs:
            rows, routing = self._experts.weighed(rows, routing)
        inner = own(self._experts.product(rows, experts.up, routing), rows, self._expert_up_parts)
        active = self._activate(inner, self._activation)
        outputs = own(self._experts.product(active, experts.down, routing), active, (Part.EXPERT_DOWN,))
        output = self._normed(self._experts.combine(outputs, routing), weights.norms.get(Part.AFTER_EXPERTS_NORM))
        if weights.shared is None:
            return output
        shared = self.dense(inputs.rows, weights.shared, add, SHARED)
        if spec.shared_router:
            shared = (shared.to(torch.float32) * sigmoid(of_shared)).to(shared.dtype)
        return output + self._normed(shared, weights.norms.get(Part.AFTER_SHARED_NORM))

    def _normed(self, rows: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        return rows if norm is None else self._norm(rows, norm)


class Routed(NamedTuple):
    """The experts of each row, in the order of ids, and the weight of each: `[num_rows, experts_per_token]`."""

    ids: torch.Tensor
    shares: torch.Tensor


def sigmoid(scores: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + e^-x); the bits of `torch.sigmoid` depend on a number's place on a CPU."""
    return 1 / (1 + torch.exp(-scores))


def routed(scores: torch.Tensor, spec: ExpertsSpec, offset: torch.Tensor | None) -> Routed:
    """Return the experts of rows from the router's scores; the host need not wait. Does not mutate."""
    if spec.scoring is Scoring.SPARSE_MIXER:
        return _mixed(scores, spec)
    weights = sigmoid(scores) if spec.scoring is Scoring.SIGMOID else torch.softmax(scores, dim=-1)
    chosen_by = weights if offset is None else weights + offset
    if spec.num_groups > 1:
        groups = chosen_by.unflatten(-1, (spec.num_groups, -1))
        ranks = groups.sort(dim=-1, descending=True).values[..., : spec.group_best].sum(dim=-1)
        order = ranks.sort(dim=-1, descending=True, stable=True).indices[:, spec.groups_per_token :]
        is_out = torch.zeros_like(ranks, dtype=torch.bool).scatter(-1, order, value=True)
        chosen_by = groups.masked_fill(is_out[..., None], float("-inf")).flatten(1)
    ids = chosen_by.sort(dim=-1, descending=True, stable=True).indices[:, : spec.experts_per_token]
    ids = ids.sort(dim=-1).values
    shares = weights.gather(-1, ids)
    if spec.normalize_weights:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return Routed(ids, shares if spec.scale == 1 else shares * spec.scale)


def _mixed(scores: torch.Tensor, spec: ExpertsSpec) -> Routed:
    """Return experts that are chosen one after another, each weighed among those with a similar score."""
    left, ids, sums = scores, [], []
    for _ in range(spec.experts_per_token):
        best = left.sort(dim=-1, descending=True, stable=True).indices[:, :1]
        highest = left.gather(-1, best)
        is_near = highest - left <= spec.margin * torch.maximum(scores.abs(), highest)
        sums.append(torch.exp(left - highest).masked_fill(~is_near, 0.0).sum(dim=-1, keepdim=True))
        ids.append(best)
        left = left.scatter(-1, best, float("-inf"))
    found = torch.cat(ids, dim=-1).sort(dim=-1)
    return Routed(found.values, spec.scale / torch.cat(sums, dim=-1).gather(-1, found.indices))


def weighed_rows(rows: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return a row for each of its experts, times the share of that one; `shares` are `[num_rows, choices]`."""
    return (rows.to(torch.float32)[:, None] * shares[..., None]).to(rows.dtype).flatten(0, 1)


class PlainExperts:
    """Torch operations; implements `ExpertOperations`."""

    def __init__(self, product: Product) -> None:
        self._product = product

    def route(
        self, scores: torch.Tensor, slots: torch.Tensor, spec: ExpertsSpec, offset: torch.Tensor | None
    ) -> Routed:
        """Return the experts with the highest weights; among equal ones, those with the lowest ids."""
        return routed(scores, spec, offset)

    def product(self, rows: torch.Tensor, experts: Matrix, routing: Routed) -> torch.Tensor:
        """Return the products, expert by expert."""
        ids = routing.ids.flatten()
        outputs = rows.new_empty((len(ids), experts.weight.shape[1]))
        for expert in ids.unique().tolist():
            pairs = (ids == expert).nonzero()[:, 0]
            outputs[pairs] = self._product(rows[pairs // (len(ids) // len(rows))], experts.of(expert))
        return outputs

    def scaled(self, routing: Routed, factors: torch.Tensor) -> Routed:
        """Return the routing with other weights."""
        return routing._replace(shares=routing.shares * factors[routing.ids])

    def weighed(self, rows: torch.Tensor, routing: Routed) -> tuple[torch.Tensor, Routed]:
        """Return one row per pair, times its weight, and the routing without weights."""
        return weighed_rows(rows, routing.shares), routing._replace(shares=torch.ones_like(routing.shares))

    def combine(self, outputs: torch.Tensor, routing: Routed) -> torch.Tensor:
        """Return the sums, added choice by choice."""
        weighted = outputs.unflatten(0, routing.ids.shape).to(torch.float32) * routing.shares[..., None]
        total = weighted[:, 0]
        for choice in range(1, weighted.shape[1]):
            total = total + weighted[:, choice]
        return total.to(outputs.dtype)

    def known(self, ids: torch.Tensor, num_experts: int) -> Routed:
        """Return the routing of rows whose experts are known."""
        return Routed(ids, ids)

    def ids(self, routing: Routed) -> torch.Tensor:
        """Return the experts of the rows of a routing."""
        return routing.ids
