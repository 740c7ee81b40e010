"""Products of rows: of pairs (row, expert) with all experts of a layer in one launch, or with one matrix of codes.

    tile     (expert, first place, number of pairs)
    program  a tile × 64 or 128 outs:   rows[pair // choices]  ·  matrix[expert, outs]  ─► results[pair, outs]

The number of pairs of an expert is data: the launch is for the most tiles possible, and programs without a tile return
at once. So the host need not wait, and a recording of a step works for any choice of experts. Rows are gathered and
results scattered by the pair's number, so the operations between two such products need no order. With one matrix for
all rows there are no groups: a pair is a row, and tiles follow one another.

One program computes a number of a result as one sum over the row, in turns of `depth`, and rows of a tile do not mix.
So a row's bits depend only on the `ProductShape`: neither on its place in a tile, nor on which other rows picked its
expert. Sums are not split, so with a single row and small matrices some of a GPU's processors have no work.

Codes are read as codes, and become numbers in registers:

    a scale for each output    int8 is converted to the rows' dtype, which is exact; the sum times the scale, in float32
    scales for its inputs      scale × code + minimum in float32, as the format defines, then rounded to the rows' dtype
                               (a code may be e4m3, a float of 8 bits)

    4 bits, a turn of 64 inputs:    low halves  · rows[0..15],  rows[32..47]     so the two codes of a byte need not
                                    high halves · rows[16..31], rows[48..63]     become neighbours in a tile

Rejected: copying rows into the order of experts first (one launch more, and all bytes twice); choosing shapes by the
number of rows of each expert (a row's bits would depend on which other rows picked it).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from quire.compute.torch.kernels.expert_groups import TILE_COLUMNS, Groups
from quire.compute.torch.kernels.paged_attention import WARP_GROUP_ROWS
from quire.compute.torch.kernels.variants import KernelVariant
from quire.compute.torch.products import HALF, OUTER, InputScales, Matrix


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
CODED_FEW: Final = ProductShape(rows=16, outs=32, depth_bytes=512, num_warps=4)
CODED_MANY: Final = ProductShape(rows=64, outs=64, depth_bytes=256, num_warps=4)
"""For one matrix of codes, which has fewer outputs than all experts together: more programs, longer turns."""
NUM_STAGES: Final = 4
HALVES: Final = tl.constexpr(HALF)
OUTERS: Final = tl.constexpr(OUTER)


def shape_for(num_pairs: int, num_experts: int) -> ProductShape:
    """Return the shape that suits this many pairs: `MANY` if experts have more than a tile of `FEW`, on average.

    >>> shape_for(8 * 256, num_experts=128).rows, shape_for(8 * 2048, num_experts=128).rows
    (16, 64)
    """
    return FEW if num_pairs <= FEW.rows * num_experts else MANY


@triton.jit
def spread(
    of_groups, outer, outs, wanted, start, in_size, GROUP: tl.constexpr, DEPTH: tl.constexpr, EACH: tl.constexpr
):
    """Return the scales or minimums of `DEPTH` inputs, for `EACH` numbers of each group: `[outs, numbers]`, float32."""
    num_groups: tl.constexpr = DEPTH // GROUP if DEPTH > GROUP else 1
    groups = start // GROUP + tl.arange(0, num_groups)[None, :]
    row, inside = outs[:, None], wanted[:, None] & (groups * GROUP < in_size)
    found = tl.load(of_groups + row * (in_size // GROUP) + groups, mask=inside, other=0.0).to(tl.float32)
    if outer is not None:
        found *= tl.load(outer + row * (in_size // OUTERS) + start // OUTERS, mask=inside, other=0.0).to(tl.float32)
    return tl.reshape(
        tl.broadcast_to(found[:, :, None], [outs.shape[0], num_groups, EACH]), [outs.shape[0], num_groups * EACH]
    )


@triton.jit
def e4m3_numbers(codes):
    """Return the numbers of bytes of e4m3, as float32.

    A byte's bits within a float16 are its number divided by 256. GPUs before sm_89 have no instruction for e4m3.
    """
    bits = codes.to(tl.int16)
    halves = ((bits & 128) << 8 | (bits & 127) << 7).to(tl.float16, bitcast=True)
    return tl.where((bits & 127) == 127, float("nan"), halves.to(tl.float32) * 256.0)


@triton.jit
def halved_sums(
    row_starts,
    weights,
    inputs: InputScales,
    places,
    real,
    wanted,
    in_size,
    row_size,
    sums,
    GROUP: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Return the sums of rows with outputs whose weights are two codes in a byte."""
    half = tl.arange(0, DEPTH // 2)
    low = half // HALVES * 2 * HALVES + half % HALVES
    for start in tl.range(0, row_size, DEPTH // 2):
        inside = (start + half < row_size)[None, :]
        at = weights + places[:, None] * row_size + (start + half)[None, :]
        codes = tl.load(at, mask=wanted[:, None] & inside, other=0)
        scale = spread(inputs.scales, inputs.outer_scales, places, wanted, 2 * start, in_size, GROUP, DEPTH, HALVES)
        if inputs.minimums is None:
            minimum = scale * -8.0
        else:
            minimum = spread(
                inputs.minimums, inputs.outer_minimums, places, wanted, 2 * start, in_size, GROUP, DEPTH, HALVES
            )
        some = row_starts + (2 * start + low)[None, :]
        first_rows = tl.load(some, mask=real[:, None] & inside, other=0.0)
        first_half = ((codes & 15).to(tl.float32) * scale + minimum).to(first_rows.dtype)
        sums = tl.dot(first_rows, tl.trans(first_half), sums, input_precision="ieee")
        second_rows = tl.load(some + HALVES, mask=real[:, None] & inside, other=0.0)
        second_half = ((codes >> 4).to(tl.float32) * scale + minimum).to(first_rows.dtype)
        sums = tl.dot(second_rows, tl.trans(second_half), sums, input_precision="ieee")
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def product_kernel(
    rows,
    weights,
    scales,
    inputs: InputScales,
    biases,
    results,
    groups: Groups,
    num_rows,
    out_size,
    in_size,
    row_size,
    CHOICES: tl.constexpr,
    GROUP: tl.constexpr,
    IS_HALVED: tl.constexpr,
    IS_E4M3: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute some outputs of the pairs of a tile.

    `GROUP`: the inputs that share a scale; 0: no such scales. `row_size`: the bytes of a row of halved codes.
    """
    index = tl.arange(0, ROWS)
    outs = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    wanted = outs < out_size
    if groups is None:
        pairs = tl.program_id(1).to(tl.int64) * ROWS + index
        real, places = pairs < num_rows, outs.to(tl.int64)
    else:
        fields = groups.tiles + tl.program_id(1) * TILE_COLUMNS
        expert, first, count = tl.load(fields).to(tl.int64), tl.load(fields + 1), tl.load(fields + 2)
        if count == 0:
            return
        real, places = index < count, expert * out_size + outs
        pairs = tl.load(groups.order + first + index, mask=real, other=0).to(tl.int64)
    row_starts = rows + (pairs // CHOICES * in_size)[:, None]
    sums = tl.zeros([ROWS, OUTS], tl.float32)
    if IS_HALVED:
        sums = halved_sums(
            row_starts, weights, inputs, places, real, wanted, in_size, row_size, sums, GROUP=GROUP, DEPTH=DEPTH
        )
    else:
        depths = tl.arange(0, DEPTH)
        EACH: tl.constexpr = GROUP if GROUP < DEPTH else DEPTH
        for start in tl.range(0, in_size, DEPTH):
            inside = (start + depths < in_size)[None, :]
            at = (start + depths)[None, :]
            some = tl.load(row_starts + at, mask=real[:, None] & inside, other=0.0)
            matrix = tl.load(weights + places[:, None] * in_size + at, mask=wanted[:, None] & inside, other=0.0)
            if GROUP > 0:
                scale = spread(inputs.scales, inputs.outer_scales, places, wanted, start, in_size, GROUP, DEPTH, EACH)
                matrix = (e4m3_numbers(matrix) if IS_E4M3 else matrix.to(tl.float32)) * scale
            sums = tl.dot(some, tl.trans(matrix.to(some.dtype)), sums, input_precision="ieee")
    if scales is not None:
        sums *= tl.load(scales + places, mask=wanted, other=0.0)[None, :]
    if biases is not None:
        sums += tl.load(biases + places, mask=wanted, other=0.0).to(tl.float32)[None, :]
    targets = results + (pairs * out_size)[:, None] + outs[None, :]
    tl.store(targets, sums.to(results.dtype.element_ty), mask=real[:, None] & wanted[None, :])


def grouped_product(rows: torch.Tensor, experts: Matrix, groups: Groups, shape: ProductShape) -> torch.Tensor:
    """Return the product of each pair's row with the matrix of its expert: `[num_pairs, out]`, in the dtype of rows.

    `rows` are `[num_rows, in]`, each with the same number of pairs; the weights of `experts` `[num_experts, out, in]`,
    their biases and scales `[num_experts, out]`, all contiguous. The groups have tiles of `shape.rows`. Does not
    mutate.
    """
    return _launched(rows, experts, groups, shape, (len(groups.order), len(groups.tiles)))


def coded_product(rows: torch.Tensor, matrix: Matrix, shape: ProductShape) -> torch.Tensor:
    """Return the product of each row with one matrix: `[num_rows, out]`, in the dtype of rows. Does not mutate."""
    return _launched(rows.contiguous(), matrix, None, shape, (len(rows), triton.cdiv(len(rows), shape.rows)))


def _launched(
    rows: torch.Tensor, matrix: Matrix, groups: Groups | None, shape: ProductShape, counts: tuple[int, int]
) -> torch.Tensor:
    """Return the results; `counts`: of pairs, and of tiles."""
    (num_pairs, num_tiles), (*_, out_size, _) = counts, matrix.weight.shape
    results, form = rows.new_empty((num_pairs, out_size)), _form(matrix)
    if num_pairs:
        product_kernel[triton.cdiv(out_size, shape.outs), num_tiles](
            rows,
            matrix.weight.view(torch.int8) if form["IS_E4M3"] else matrix.weight,
            matrix.scales,
            matrix.inputs,
            matrix.bias,
            results,
            groups,
            len(rows),
            out_size,
            matrix.num_inputs,
            matrix.weight.shape[-1],
            CHOICES=num_pairs // len(rows),
            **form,
            ROWS=shape.rows,
            OUTS=shape.outs,
            DEPTH=shape.depth_bytes // rows.element_size(),
            num_warps=shape.num_warps,
            num_stages=NUM_STAGES,
        )
    return results


def _form(matrix: Matrix) -> dict[str, Any]:
    group = 0 if matrix.inputs is None else matrix.num_inputs // matrix.inputs.scales.shape[-1]
    stored = matrix.weight.dtype
    return {"GROUP": group, "IS_HALVED": stored is torch.uint8, "IS_E4M3": stored is torch.float8_e4m3fn}


def _variant(
    shape: ProductShape,
    dtype: str,
    stored: str,
    capabilities: tuple[int, ...],
    *,
    extra: str = "",
    grouped: bool = True,
) -> KernelVariant:
    """Return a form; `stored`: a type of numbers, or of `CODED`."""
    form = CODED.get(stored, Form(stored))
    arguments: dict[str, Any] = {"rows": f"*{dtype}:16", "weights": f"*{form.codes}:16", "results": f"*{dtype}:16"}
    optional: dict[str, Any] = {}
    if extra:
        optional[extra] = "*fp32:16" if extra == "scales" else f"*{dtype}:16"
    if form.group:
        optional["inputs"] = InputScales(*(None if kind is None else f"*{kind}:16" for kind in form.scales))
    if grouped:
        optional["groups"] = Groups._make(["*i32:16"] * 2)
    depth = shape.depth_bytes // (4 if dtype == "fp32" else 2)
    from_shared = shape.rows >= WARP_GROUP_ROWS and capabilities[0] >= 90 and dtype != "fp32"
    return KernelVariant(
        f"{shape.rows} rows, {dtype} by {stored.replace('i8', 'int8')} {extra}".rstrip()
        + ", one matrix" * (not grouped)
        + " sm_80" * (capabilities[0] == 80),
        product_kernel,
        arguments=arguments
        | optional
        | {"num_rows": "i32", "out_size": "i32:16", "in_size": "i32:16"}
        | {"row_size": "i32:16"},
        constants={"CHOICES": 8 if grouped else 1, "ROWS": shape.rows, "OUTS": shape.outs, "DEPTH": depth}
        | {"GROUP": form.group, "IS_HALVED": form.codes == "u8", "IS_E4M3": stored == "E4M3"}
        | {name: None for name in ("scales", "inputs", "biases", "groups") if name not in optional},
        num_warps=shape.num_warps,
        num_stages=NUM_STAGES,
        num_buffers=NUM_STAGES if from_shared else NUM_STAGES - 1,
        min_wide_share=0.7,
        capabilities=capabilities,
    )


class Form(NamedTuple):
    """The types of the codes of a matrix, and of the scales of its inputs."""

    codes: str
    group: int = 0
    scales: tuple[str | None, ...] = ()


CODED: Final = MappingProxyType(
    {
        "Q4_0": Form("u8", 32, ("fp16", None, None, None)),
        "Q4_1": Form("u8", 32, ("fp16", "fp16", None, None)),
        "Q4_K": Form("u8", 32, ("i8", "i8", "fp16", "fp16")),
        "Q8_0": Form("i8", 32, ("fp16", None, None, None)),
        "Q6_K": Form("i8", 16, ("i8", None, "fp16", None)),
        "E4M3": Form("i8", 128, ("fp32", None, None, None)),
    }
)
EXPERTS: Final = (
    ("bf16", "bf16", ""),
    ("bf16", "bf16", "biases"),
    ("bf16", "bf16", "scales"),  # A of adapters
    ("bf16", "i8", "scales"),
    ("bf16", "Q4_K", ""),
    ("bf16", "E4M3", ""),
    ("fp32", "fp32", ""),
)
ONE_MATRIX: Final = (("bf16", "i8", "scales"), *(("bf16", stored, "") for stored in CODED))
VARIANTS: Final = tuple(
    _variant(shape, dtype, stored, capabilities, extra=extra, grouped=kinds is EXPERTS)
    for shapes, kinds in (((FEW, MANY), EXPERTS), ((CODED_FEW, CODED_MANY), ONE_MATRIX))
    for shape in shapes
    for dtype, stored, extra in kinds
    for capabilities in ((80,), (90, 100))
)
"""The forms that the compile gate compiles; see `variants`."""
