"""LoRA adapters on a device: what the rows of a step that have one get in addition to a product.

    output[run] += B (scale * (A rows[run]))      for each run of rows with one adapter, after the product of the matrix
    pairs[run] += (B (scale A rows))[run]         where rows are multiplied by experts: A and B of all, in two products

The products are those of the engine, so where they give a row the same bits in any step, adapters do too. In a recorded
step (graphs.py) the rows of an adapter are not known: all rows get its products, and a mask says which of them keep the
sum. The other rows keep their bits. A step with adapters is not launched ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from quire.compute.adapters.folder import Adapter
from quire.compute.models.base import DecoderSpec, Part
from quire.compute.torch.products import Matrix, Product
from quire.compute.worker.model_runner import StepInputs

OF_EXPERTS: Final = frozenset({Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN})
ExpertProduct = Callable[[torch.Tensor, Matrix, Any], torch.Tensor]
"""Returns the product of each pair of a routing with the matrix of its expert."""


@dataclass(frozen=True, slots=True)
class LowRankMatrices:
    """A and B of a matrix, and the scale of B A; of experts one after another, with their scales in A."""

    a: Matrix
    b: Matrix
    scale: float


TorchAdapter = Sequence[Mapping[Part, LowRankMatrices]]
"""By layer, what an adapter has for each matrix."""


@dataclass(frozen=True, slots=True)
class AdaptedRun:
    """The rows from `start` up to `stop` of a step, and their adapter. `mask`: which of them have it; None: all."""

    start: int
    stop: int
    adapter: TorchAdapter
    mask: torch.Tensor | None = None  # bool [num_rows, 1]

    def add_to(self, output: torch.Tensor, added: torch.Tensor, per_token: int = 1) -> None:
        """Add what the adapter changes to its rows of some outputs, of which each token has `per_token`. Mutates."""
        rows = output[self.start * per_token : self.stop * per_token]
        if self.mask is None:
            rows += added
        else:
            mask = self.mask.repeat_interleave(per_token, dim=0) if per_token > 1 else self.mask
            rows.copy_(torch.where(mask, rows + added, rows))


def moved(adapter: Adapter, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> TorchAdapter:
    """Read an adapter and return it on a device; raises `CheckpointError` for files that have changed."""
    layers: list[dict[Part, LowRankMatrices]] = [{} for _ in spec.layers]
    for each in adapter.read():
        if each.part in OF_EXPERTS:
            stack = layers[each.layer].get(each.part) or _empty_stack(adapter, spec, each.part, dtype, device)
            layers[each.layer][each.part] = stack
            stack.a.weight[each.expert, : len(each.a)] = torch.from_numpy(each.a * np.float32(each.scale))
            stack.b.weight[each.expert, :, : len(each.a)] = torch.from_numpy(each.b.copy())
        else:
            a, b = (Matrix(torch.from_numpy(rows.copy()).to(device, dtype)) for rows in (each.a, each.b))
            layers[each.layer][each.part] = LowRankMatrices(a, b, each.scale)
    return layers


def _empty_stack(
    adapter: Adapter, spec: DecoderSpec, part: Part, dtype: torch.dtype, device: torch.device
) -> LowRankMatrices:
    """Return A and B of all experts of a layer, with room for the highest rank of the part, all zeros."""
    assert spec.experts is not None
    rank = max(each.padded_rank for each in adapter.matrices if each.place.part is part)
    outputs, inputs = spec.expert_parts()[part].weight
    a, b = (
        Matrix(torch.zeros((spec.experts.num_experts, *shape), dtype=dtype, device=device))
        for shape in ((rank, inputs), (outputs, rank))
    )
    return LowRankMatrices(a, b, 1.0)


def adapted_runs(inputs: StepInputs, adapters: Mapping[str, TorchAdapter]) -> tuple[AdaptedRun, ...]:
    """Return the runs of rows of a step that have an adapter. Does not mutate."""
    runs: list[AdaptedRun] = []
    for sequence, digest in enumerate(inputs.adapters):
        if not digest:
            continue
        tokens = inputs.tokens_of(sequence)
        if runs and runs[-1].stop == tokens.start and runs[-1].adapter is adapters[digest]:
            runs[-1] = AdaptedRun(runs[-1].start, tokens.stop, adapters[digest])
        else:
            runs.append(AdaptedRun(tokens.start, tokens.stop, adapters[digest]))
    return tuple(runs)


def part_sizes(spec: DecoderSpec) -> dict[Part, int]:
    """Return how many outputs the matrices have that can have adapters."""
    attention, hidden = spec.attention, spec.hidden_size
    key = attention.num_kv_heads * attention.head_dim
    sizes = {Part.QUERY: attention.num_heads * attention.head_dim, Part.KEY: key, Part.VALUE: key}
    inner = spec.mlp.intermediate_size
    sizes |= {Part.OUTPUT: hidden, Part.GATE: inner, Part.UP: inner, Part.DOWN: hidden}
    return sizes | {part: shape.weight[0] for part, shape in spec.expert_parts().items()}


@dataclass(frozen=True, slots=True)
class LowRankSums:
    """How the products of adapters are computed. `sizes`: the outputs of each matrix."""

    product: Product
    expert_product: ExpertProduct
    sizes: Mapping[Part, int]


@dataclass(frozen=True, slots=True)
class Add:
    """Adds what the adapters of a step change in a layer, matrix by matrix; without runs, nothing."""

    low_rank: LowRankSums
    runs: Sequence[AdaptedRun]
    layer: int

    def __call__(self, output: torch.Tensor, rows: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
        """Return the product of rows with matrices fused in this order, with the adapters' part. May mutate it."""
        for run in self.runs:
            first = 0
            for part in parts:
                low_rank, end = run.adapter[self.layer].get(part), first + self.low_rank.sizes[part]
                if low_rank is not None:
                    reduced = self.low_rank.product(rows[run.start : run.stop], low_rank.a)
                    scaled = (reduced.to(torch.float32) * low_rank.scale).to(rows.dtype)
                    run.add_to(output[:, first:end], self.low_rank.product(scaled, low_rank.b))
                first = end
        return output

    def to_pairs(
        self, output: torch.Tensor, rows: torch.Tensor, routing: Any, parts: Sequence[Part], per_token: int
    ) -> torch.Tensor:
        """Return the product of each pair with its expert's fused matrices, with the adapters' part. May mutate it.

        All rows are multiplied by the matrices of each adapter, because only the device knows which expert they go to.
        """
        for adapter in {id(run.adapter): run.adapter for run in self.runs}.values():
            first = 0
            for part in parts:
                low_rank, end = adapter[self.layer].get(part), first + self.low_rank.sizes[part]
                if low_rank is not None:
                    reduced = self.low_rank.expert_product(rows, low_rank.a, routing)
                    added = self.low_rank.expert_product(reduced, low_rank.b, routing)
                    for run in self.runs:
                        if run.adapter is adapter:
                            pairs = added[run.start * per_token : run.stop * per_token]
                            run.add_to(output[:, first:end], pairs, per_token)
                first = end
        return output
