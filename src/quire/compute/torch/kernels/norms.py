"""Norms of rows, with or without adding an update first: one row per program.

A program holds its whole row in registers, so a row is read once. The order of its sum depends only on its length and
alignment, which are the same for all rows of a model, so other rows cannot change its bits. With an update, the sum is
rounded to the dtype of the rows before the norm, so that both results equal those of a separate addition and norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.compute.torch.kernels.variants import KernelVariant


@triton.jit
def norm_kernel(
    rows,
    updates,
    totals,
    normed,
    weight,
    bias,
    row_stride,
    update_stride,
    size,
    epsilon,
    HAS_UPDATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CENTERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise the row of a program; with an update, also store the sum."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    inside = places < size
    numbers = tl.load(rows + row * row_stride + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        update = tl.load(updates + row * update_stride + places, mask=inside, other=0.0).to(tl.float32)
        total = (numbers + update).to(totals.dtype.element_ty)
        tl.store(totals + row * size + places, total, mask=inside)
        numbers = total.to(tl.float32)
    if CENTERS:
        numbers = tl.where(inside, numbers - tl.sum(numbers) / size, 0.0)
    length = tl.sqrt_rn(tl.sum(numbers * numbers) / size + epsilon)
    scaled = tl.load(weight + places, mask=inside, other=0.0) * (numbers / length)
    if HAS_BIAS:
        scaled += tl.load(bias + places, mask=inside, other=0.0)
    tl.store(normed + row * size + places, scaled.to(normed.dtype.element_ty), mask=inside)


def norm(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, epsilon: float, centers: bool
) -> torch.Tensor:
    """Return rows `[num_rows, size]` normalised by root mean square, or by mean and variance with `centers`.

    Weight and bias are float32; each row is contiguous, but there may be gaps between rows. Does not mutate.
    """
    normed = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    _launch((rows, None, None, normed), (weight, bias), epsilon, centers)
    return normed


def add_norm(
    rows: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    epsilon: float,
    centers: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows + update, rounded to the dtype of the rows, and its norm. Does not mutate."""
    total, normed = (torch.empty(rows.shape, dtype=rows.dtype, device=rows.device) for _ in range(2))
    _launch((rows, update, total, normed), (weight, bias), epsilon, centers)
    return total, normed


def _launch(
    tensors: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor],
    scale: tuple[torch.Tensor, torch.Tensor | None],
    epsilon: float,
    centers: bool,
) -> None:
    rows, update, _, _ = tensors
    num_rows, size = rows.shape
    if num_rows == 0:
        return
    block = triton.next_power_of_2(size)
    norm_kernel[(num_rows,)](
        *tensors,
        *scale,
        rows.stride(0),
        0 if update is None else update.stride(0),
        size,
        epsilon,
        HAS_UPDATE=update is not None,
        HAS_BIAS=scale[1] is not None,
        CENTERS=centers,
        BLOCK=block,
        num_warps=num_warps(block),
    )


def num_warps(block: int) -> int:
    """Return the number of warps for a row of this many numbers: at most 32 numbers per thread, up to 16,384.

    >>> num_warps(128), num_warps(4096), num_warps(8192), num_warps(16384)
    (1, 4, 8, 16)
    """
    return min(16, max(1, block // 1024))


def _variant(size: int, dtype: str, *, update: bool, layer: bool = False) -> KernelVariant:
    block = triton.next_power_of_2(size)
    kind = f"{'layer' if layer else 'rms'} norm{' of a sum' if update else ''}"
    tensors = dict.fromkeys(("rows", "normed"), f"*{dtype}:16") | {"weight": "*fp32:16"}
    joined = dict.fromkeys(("updates", "totals"), f"*{dtype}:16") | {"update_stride": "i32:16"}
    shape = {"row_stride": "i32:16", "size": "i32:16", "epsilon": "fp32"}
    constants = {"HAS_UPDATE": update, "HAS_BIAS": layer, "CENTERS": layer, "BLOCK": block}
    return KernelVariant(
        f"{kind}, {size} × {dtype}",
        norm_kernel,
        arguments=tensors | shape | (joined if update else {}) | ({"bias": "*fp32:16"} if layer else {}),
        constants=constants
        | ({} if update else {"updates": None, "totals": None, "update_stride": 0})
        | ({} if layer else {"bias": None}),
        num_warps=num_warps(block),
    )


VARIANTS = (
    _variant(1024, "bf16", update=False),
    _variant(1024, "bf16", update=True),
    _variant(4096, "bf16", update=True),
    _variant(5120, "fp16", update=True),
    _variant(8192, "bf16", update=True),
    _variant(16384, "bf16", update=True),
    _variant(2048, "bf16", update=True, layer=True),
)
"""The forms that the compile gate compiles; see `variants`."""
