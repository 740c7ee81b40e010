"""LoRA adapters on a device: what the rows of a step that have one get in addition to a product.

    output[run] += B (scale * (A rows[run]))      for each run of rows with one adapter, after the product of the matrix

The products are those of the engine, so where they give a row the same bits in any step, adapters do too. A step with
adapters is neither recorded nor launched ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.compute.adapters.folder import Adapter
from quire.compute.models.base import DecoderSpec, Part
from quire.compute.torch.products import Matrix, Product
from quire.compute.worker.model_runner import StepInputs


@dataclass(frozen=True, slots=True)
class LowRankMatrices:
    """A and B of a matrix, and the scale of B A."""

    a: Matrix
    b: Matrix
    scale: float


Add = Callable[[torch.Tensor, torch.Tensor, Sequence[Part]], torch.Tensor]
"""Returns the product of rows with fused matrices, given the rows, with what adapters add. May mutate the product."""

TorchAdapter = Sequence[Mapping[Part, LowRankMatrices]]
"""By layer, what an adapter has for each matrix."""


@dataclass(frozen=True, slots=True)
class AdaptedRun:
    """The rows from `start` up to `stop` of a step, and their adapter."""

    start: int
    stop: int
    adapter: TorchAdapter


def moved(adapter: Adapter, spec: DecoderSpec, dtype: torch.dtype, device: torch.device) -> TorchAdapter:
    """Read an adapter and return it on a device; raises `CheckpointError` for files that have changed."""
    layers: list[dict[Part, LowRankMatrices]] = [{} for _ in spec.layers]
    for each in adapter.read():
        a, b = (Matrix(torch.from_numpy(rows.copy()).to(device, dtype)) for rows in (each.a, each.b))
        layers[each.layer][each.part] = LowRankMatrices(a, b, each.scale)
    return layers


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
    return sizes | {Part.OUTPUT: hidden, Part.GATE: inner, Part.UP: inner, Part.DOWN: hidden}


@dataclass(frozen=True, slots=True)
class LowRankSums:
    """Adds what the adapters of a step change, matrix by matrix. `sizes`: the outputs of each."""

    product: Product
    sizes: Mapping[Part, int]

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        runs: Sequence[AdaptedRun],
        layer: int,
        parts: Sequence[Part],
    ) -> torch.Tensor:
        """Return the product of rows with matrices fused in this order, with the adapters' part. May mutate it."""
        for run in runs:
            first = 0
            for part in parts:
                low_rank, end = run.adapter[layer].get(part), first + self.sizes[part]
                if low_rank is not None:
                    reduced = self.product(rows[run.start : run.stop], low_rank.a)
                    scaled = (reduced.to(torch.float32) * low_rank.scale).to(rows.dtype)
                    output[run.start : run.stop, first:end] += self.product(scaled, low_rank.b)
                first = end
        return output
