"""Copies of whole blocks: exactly those named change, in every array of a pool, whatever they hold."""

from __future__ import annotations

import pytest
import torch

from quire.compute.torch.attention.base import KVPool
from quire.compute.torch.kernels.blocks import copy_blocks
from quire.core.kv_spec import KVCacheSpec


def pool(dtype: str, num_blocks: int, device: str, *, head_dim: int = 12, fill: int = 0) -> KVPool:
    """Return blocks of random bytes."""
    spec = KVCacheSpec.from_layers([None, None], block_size=4, num_kv_heads=3, head_dim=head_dim, dtype=dtype)
    made = KVPool.allocate(spec, num_blocks, torch.device(device))
    generator = torch.Generator().manual_seed(num_blocks + fill)
    for tensor in made.tensors:
        number_of_bytes = tensor.numel() * tensor.element_size()
        content = torch.randint(0, 256, (number_of_bytes,), generator=generator, dtype=torch.uint8)
        tensor.flatten().view(torch.uint8).copy_(content)
    return made


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return blocks by array, as bytes: NaN is compared like any other number."""
    return tensor.flatten(2).view(torch.uint8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "fp8"])
def test_copies_within_a_pool(device: str, dtype: str) -> None:
    made = pool(dtype, 7, device)
    before = [as_bytes(tensor).clone() for tensor in made.tensors]
    for tensor in made.tensors:
        copy_blocks(tensor, tensor, torch.tensor([[1, 4], [6, 0], [1, 2]], dtype=torch.int32, device=device))
    for tensor, old in zip(made.tensors, before, strict=True):
        assert torch.equal(as_bytes(tensor), old[:, [6, 1, 1, 3, 1, 5, 6]])


@pytest.mark.parametrize("head_dim", [12, 13, 1000])
def test_copies_from_one_pool_to_another_of_another_size(device: str, head_dim: int) -> None:
    source, target = pool("int8", 3, device, head_dim=head_dim), pool("int8", 8, device, head_dim=head_dim)
    for read, written in zip(source.tensors, target.tensors, strict=True):
        old = as_bytes(written).clone()
        copy_blocks(read, written, torch.tensor([[2, 7], [0, 3]], dtype=torch.int32, device=device))
        assert torch.equal(as_bytes(written)[:, [7, 3]], as_bytes(read)[:, [2, 0]])
        assert torch.equal(as_bytes(written)[:, [0, 1, 2, 4, 5, 6]], old[:, [0, 1, 2, 4, 5, 6]])


def test_no_pairs_are_no_work(device: str) -> None:
    made = pool("float32", 2, device)
    before = made.numbers.clone()
    copy_blocks(made.numbers, made.numbers, torch.zeros((0, 2), dtype=torch.int32, device=device))
    assert torch.equal(as_bytes(made.numbers), as_bytes(before))
