"""Heads as 4-bit numbers on the device: to the bit those of the plain definition in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.compute.torch import int4
from quire.compute.weights.int4 import rotated, rounded_to_int4
from quire.core.kv_spec import INT4_GROUP


def rows_of(head_dim: int) -> np.ndarray:
    """Random heads, and heads at the edges: equal numbers, nearly none, infinities, NaN, a range that is no float."""
    rows = np.random.default_rng(head_dim).normal(size=(200, head_dim)).astype(np.float32)
    rows[:, 0] *= 30  # as some channels of keys
    rows[1], rows[2] = 3.0, np.linspace(-1e-31, 1e-31, head_dim)
    rows[3, 1], rows[4, 0], rows[5, -1] = np.nan, np.inf, -np.inf
    rows[6], rows[6, 0] = -3e38, 3e38
    return rows


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("head_dim", [2, 8, 64, 80, 96, 128, 256])
@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_heads_are_rounded_as_the_definition_says(head_dim: int, by_group: bool, device: str) -> None:
    rows = rows_of(head_dim)
    group = INT4_GROUP if by_group else None
    packed, words = int4.packed(torch.from_numpy(rows).to(device), -(-head_dim // (group or head_dim)))
    assert (packed.shape, packed.dtype) == ((200, head_dim // 2), int4.INT4)
    ours, right = int4.unpacked(packed, words).cpu().numpy(), rounded_to_int4(rows, group)
    finite = np.isfinite(right)
    assert np.array_equal(ours[finite], right[finite])
    assert np.array_equal(np.isfinite(ours), finite)
    assert not finite[[3, 4, 5]].all(axis=1).any() and finite[7:].all()


@pytest.mark.parametrize("head_dim", [1, 7, 24, 64, 128])
def test_turned_twice_is_as_before(head_dim: int, device: str) -> None:
    rows = torch.randn((5, head_dim), generator=torch.Generator().manual_seed(1)).to(device)
    turned = int4.turned(rows)
    assert np.array_equal(turned.cpu().numpy(), rotated(rows.cpu().numpy()))
    torch.testing.assert_close(int4.turned(turned), rows)
