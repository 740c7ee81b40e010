"""Copies of whole blocks: exactly those named change, in every place of a pool, whatever they hold."""

from __future__ import annotations

import pytest
import torch

from quire.compute.torch.attention.base import KVPool
from quire.compute.torch.kernels.blocks import copy_blocks
from quire.core.kv_spec import KVCacheSpec


def pool(dtype: str, num_blocks: int, device: str, *, head_dim: int = 12, fill: int = 0) -> torch.Tensor:
    """Return blocks of random bytes."""
    spec = KVCacheSpec.from_layers([None, None], block_size=4, num_kv_heads=3, head_dim=head_dim, dtype=dtype)
    made = KVPool.allocate(spec, num_blocks, torch.device(device))
    generator = torch.Generator().manual_seed(num_blocks + fill)
    made.content.copy_(torch.randint(0, 256, made.content.shape, generator=generator, dtype=torch.uint8))
    return made.content


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "fp8", "k8v4", "int4"])
def test_copies_within_a_pool(device: str, dtype: str) -> None:
    made = pool(dtype, 7, device)
    before = made.clone()
    copy_blocks(made, made, torch.tensor([[1, 4], [6, 0], [1, 2]], dtype=torch.int32, device=device))
    assert torch.equal(made, before[:, [6, 1, 1, 3, 1, 5, 6]])


@pytest.mark.parametrize("head_dim", [12, 13, 1000])
def test_copies_from_one_pool_to_another_of_another_size(device: str, head_dim: int) -> None:
    source, target = pool("int8", 3, device, head_dim=head_dim), pool("int8", 8, device, head_dim=head_dim)
    old = target.clone()
    copy_blocks(source, target, torch.tensor([[2, 7], [0, 3]], dtype=torch.int32, device=device))
    assert torch.equal(target[:, [7, 3]], source[:, [2, 0]])
    assert torch.equal(target[:, [0, 1, 2, 4, 5, 6]], old[:, [0, 1, 2, 4, 5, 6]])


def test_no_pairs_are_no_work(device: str) -> None:
    made = pool("float32", 2, device)
    before = made.clone()
    copy_blocks(made, made, torch.zeros((0, 2), dtype=torch.int32, device=device))
    assert torch.equal(made, before)
