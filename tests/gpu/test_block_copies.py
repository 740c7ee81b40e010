"""Copies of whole blocks: exactly those named change, in every place of a pool, whatever they hold."""

from __future__ import annotations

import pytest
import torch

from quire.compute.torch.attention.base import KVPool
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.kernels import blocks
from quire.compute.torch.kernels.blocks import copy_blocks
from quire.core.kv_spec import KVCacheSpec
from quire.core.step import BlockCopy, BlockMove, StepPlan, column


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


@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_moves_and_copies_of_a_plan_by_one_kernel_each(
    dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As block by block, with the host's pool the other way round; on a CPU, kernels of Triton are made to do it."""
    spec = KVCacheSpec.from_layers([None, None, None], block_size=16, num_kv_heads=2, head_dim=12, dtype=dtype)
    plan = StepPlan(
        *(1, column(0), column(0), column(1), column(1)),
        copies=(BlockCopy(0, 4), BlockCopy(0, 2)),
        moves_out=(BlockMove(3, 1), BlockMove(4, 2)),
        moves_in=(BlockMove(1, 0), BlockMove(3, 3)),
    )
    calls: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(blocks, "copy_blocks", lambda *given: (calls.append(given), copy_blocks(*given)))
    found, cpu = [], torch.device("cpu")
    for num_calls in (0, 3):
        monkeypatch.setattr("quire.compute.torch.cache._on_gpu", lambda _, by_kernel=num_calls > 0: by_kernel)
        cache = TorchCache(spec, PlainAttention(cpu), cpu, num_blocks=5, num_host_blocks=4)
        cache.allocate()
        cache.rehearse()
        assert len(calls) == num_calls
        contents = [tier.pool.content for tier in cache._tiers or ()]
        for number, content in enumerate(contents):
            generator = torch.Generator().manual_seed(number)
            content.copy_(torch.randint(0, 256, content.shape, generator=generator, dtype=torch.uint8))
        cache.apply(plan)
        assert len(calls) == 2 * num_calls
        found.append(contents)
    assert all(torch.equal(*both) for both in zip(*found, strict=True))


def test_no_pairs_are_no_work(device: str) -> None:
    made = pool("float32", 2, device)
    before = made.clone()
    copy_blocks(made, made, torch.zeros((0, 2), dtype=torch.int32, device=device))
    assert torch.equal(made, before)
