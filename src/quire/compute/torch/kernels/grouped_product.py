"""Products of pairs (row, expert) with the matrices of their experts: all experts of a layer in one launch.

    tile     (expert, first place, number of pairs)
    program  a tile × 64 or 128 outs:   rows[pair // choices]  ·  matrix[expert, outs]  ─► results[pair, outs]

The number of pairs of an expert is data: the launch is for the most tiles possible, and programs without a tile return
at once. So the host need not wait, and a recording of a step works for any choice of experts. Rows are gathered and
results scattered by the pair's number, so the operations between two such products need no order.

One program computes a number of a result as one sum over the row, in turns of `depth`, and rows of a tile do not mix.
So a row's bits depend only on the `ProductShape`: neither on its place in a tile, nor on which other rows picked its
expert. Sums are not split, so with a single row and small matrices some programs of a GPU have no work.

int8 matrices are read as int8 and converted to the rows' dtype for the product, which is exact; the scale of an output
is multiplied in at the end, in float32.

Rejected: copying rows into the order of experts first (one launch more, and all bytes twice); choosing shapes by the
number of rows of each expert (a row's bits would depend on which other rows picked it).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from quire.compute.torch.kernels.expert_groups import TILE_COLUMNS, Groups
from quire.compute.torch.kernels.paged_attention import WARP_GROUP_ROWS
from quire.compute.torch.kernels.variants import KernelVariant
from quire.compute.torch.products import Matrix


class ProductShape(NamedTuple):
    """The kernel's shape, without types. `depth_bytes`: the bytes of a row in a turn. Immutable."""

    rows: int
    outs: int
    depth_bytes: int
    num_warps: int


FEW: Final = ProductShape(rows=16, outs=64, depth_bytes=256, num_warps=4)
"""For decodes: matrices are read once, so the bytes in flight matter most."""
MANY: Final = ProductShape(rows=64, outs=128, depth_bytes=128, num_warps=8)
"""For prompts: the number of rows of the fastest matrix instructions."""
NUM_STAGES: Final = 4


def shape_for(num_pairs: int, num_experts: int) -> ProductShape:
    """Return the shape that suits this many pairs: `MANY` if experts have more than a tile of `FEW`, on average.

    >>> shape_for(8 * 256, num_experts=128).rows, shape_for(8 * 2048, num_experts=128).rows
    (16, 64)
    """
    return FEW if num_pairs <= FEW.rows * num_experts else MANY


@triton.jit
def product_kernel(
    rows,
    weights,
    scales,
    biases,
    results,
    groups: Groups,
    out_size,
    in_size,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute some outputs of the pairs of a tile."""
    fields = groups.tiles + tl.program_id(1) * TILE_COLUMNS
    expert, first, count = tl.load(fields).to(tl.int64), tl.load(fields + 1), tl.load(fields + 2)
    if count == 0:
        return
    index, depths = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    real, wanted = index < count, outs < out_size
    pairs = tl.load(groups.order + first + index, mask=real, other=0).to(tl.int64)
    row_starts = rows + (pairs // CHOICES * in_size)[:, None]
    out_starts = weights + (expert * out_size + outs)[:, None] * in_size
    sums = tl.zeros([ROWS, OUTS], tl.float32)
    for start in tl.range(0, in_size, DEPTH):
        inside = (start + depths < in_size)[None, :]
        places = (start + depths)[None, :]
        some = tl.load(row_starts + places, mask=real[:, None] & inside, other=0.0)
        matrix = tl.load(out_starts + places, mask=wanted[:, None] & inside, other=0.0)
        sums = tl.dot(some, tl.trans(matrix.to(some.dtype)), sums, input_precision="ieee")
    if scales is not None:
        sums *= tl.load(scales + expert * out_size + outs, mask=wanted, other=0.0)[None, :]
    if biases is not None:
        sums += tl.load(biases + expert * out_size + outs, mask=wanted, other=0.0).to(tl.float32)[None, :]
    targets = results + (pairs * out_size)[:, None] + outs[None, :]
    tl.store(targets, sums.to(results.dtype.element_ty), mask=real[:, None] & wanted[None, :])


def grouped_product(rows: torch.Tensor, experts: Matrix, groups: Groups, shape: ProductShape) -> torch.Tensor:
    """Return the product of each pair's row with the matrix of its expert: `[num_pairs, out]`, in the dtype of rows.

    `rows` are `[num_rows, in]`, each with the same number of pairs; the weights of `experts` `[num_experts, out, in]`,
    their biases and scales `[num_experts, out]`, all contiguous. The groups have tiles of `shape.rows`. Does not
    mutate.
    """
    num_pairs, (_, out_size, in_size) = len(groups.order), experts.weight.shape
    results = rows.new_empty((num_pairs, out_size))
    if num_pairs:
        product_kernel[triton.cdiv(out_size, shape.outs), len(groups.tiles)](
            rows,
            experts.weight,
            experts.scales,
            experts.bias,
            results,
            groups,
            out_size,
            in_size,
            CHOICES=num_pairs // len(rows),
            ROWS=shape.rows,
            OUTS=shape.outs,
            DEPTH=shape.depth_bytes // rows.element_size(),
            num_warps=shape.num_warps,
            num_stages=NUM_STAGES,
        )
    return results


def _variant(
    shape: ProductShape, dtype: str, stored: str, capabilities: tuple[int, ...], *, extra: str = ""
) -> KernelVariant:
    arguments: dict[str, str | tuple[str, ...]] = {"rows": f"*{dtype}:16", "weights": f"*{stored}:16"}
    arguments |= {"results": f"*{dtype}:16", "groups": Groups._make(["*i32:16"] * 2)}
    depth = shape.depth_bytes // (4 if dtype == "fp32" else 2)
    optional = {} if not extra else {extra: "*fp32:16" if extra == "scales" else f"*{dtype}:16"}
    from_shared = shape.rows >= WARP_GROUP_ROWS and capabilities[0] >= 90 and dtype != "fp32"
    return KernelVariant(
        f"{shape.rows} rows, {dtype} by {stored.replace('i8', 'int8')} {extra}".rstrip()
        + " sm_80" * (capabilities[0] == 80),
        product_kernel,
        arguments=arguments | optional | {"out_size": "i32:16", "in_size": "i32:16"},
        constants={"CHOICES": 8, "ROWS": shape.rows, "OUTS": shape.outs, "DEPTH": depth}
        | {name: None for name in ("scales", "biases") if name not in optional},
        num_warps=shape.num_warps,
        num_stages=NUM_STAGES,
        num_buffers=NUM_STAGES if from_shared else NUM_STAGES - 1,
        min_wide_share=0.7,
        capabilities=capabilities,
    )


VARIANTS: Final = tuple(
    _variant(shape, dtype, stored, capabilities, extra=extra)
    for shape in (FEW, MANY)
    for dtype, stored, extra in (
        ("bf16", "bf16", ""),
        ("bf16", "bf16", "biases"),
        ("bf16", "bf16", "scales"),  # A of adapters
        ("bf16", "i8", "scales"),
        ("fp32", "fp32", ""),
    )
    for capabilities in ((80,), (90, 100))
)
"""The forms that the compile gate compiles; see `variants`."""
