"""TorchCache: the KV memory of a device, its host tier, and the copies and moves of blocks between them.

    device   KVPool in the layout of the attention backend: the blocks of a place are adjacent
    host     the same pool transposed, page-locked: the places of a block are adjacent

So a block is one piece of host memory. On CUDA, one kernel reads or writes the host's memory for all moves of a plan in
one direction. Moves run on their own stream, and the host never waits for them. That stream waits for earlier steps,
which may still use the blocks. Steps wait for the stream when they first need the memory, and upload their inputs
meanwhile.

The layers of a draft model share the block ids: every operation on a block is repeated in a second pool, which has the
layout of the draft model's attention. With `poison` the memory starts as NaN, so that reading a slot that was never
written shows in the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from quire.compute.torch.attention.base import AttentionBackend, KVPair, KVPool, place_bytes
from quire.compute.torch.device_errors import device_call
from quire.compute.torch.upload import on_device
from quire.compute.worker.kv_memory import FinishRead
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.core.kv_spec import KVCacheSpec
from quire.core.step import StepPlan

NOT_A_NUMBER = 0xFF
"""Memory filled with this byte is NaN in every float format, also as scales."""


class TorchCache:
    """Owns the KV memory of a device and its host tier; implements `KVMemory`."""

    def __init__(
        self,
        spec: KVCacheSpec,
        attention: AttentionBackend[Any],
        device: torch.device,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        poison: bool = False,
    ) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        self.attention = attention
        self.device = device
        self._num_host_blocks = num_host_blocks
        self._poison = poison
        self._tiers: tuple[_Tier, _Tier] | None = None
        self._pairs: Mapping[int, KVPair] = MappingProxyType({})
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.draft: TorchCache | None = None
        """The layers of the draft model in the same blocks; None without one."""

    def resize(self, num_blocks: int, num_host_blocks: int) -> None:
        """Set the number of blocks for the next `allocate`. Mutates."""
        self.num_blocks, self._num_host_blocks = num_blocks, num_host_blocks
        if self.draft is not None:
            self.draft.resize(num_blocks, num_host_blocks)

    def allocate(self) -> None:
        """Allocate the memory. Mutates; its earlier content is lost."""
        blocks = _Tier("num_blocks", self.num_blocks, self._new_pool("num_blocks"))
        host = _Tier("num_host_blocks", self._num_host_blocks, self._new_pool("num_host_blocks"))
        if self._poison:
            for tier in (blocks, host):
                tier.pool.content.fill_(NOT_A_NUMBER)
        self._tiers = blocks, host
        homes = {
            layer: (rank, index)
            for index, group in enumerate(self.spec.groups)
            for rank, layer in enumerate(group.layers)
        }
        self._pairs = MappingProxyType({layer: blocks.pool.pair(*homes[layer]) for layer in sorted(homes)})
        if self.draft is not None:
            self.draft.allocate()

    def release(self) -> None:
        """Free the memory. Mutates; may be called twice."""
        self._tiers, self._pairs = None, MappingProxyType({})
        if self.draft is not None:
            self.draft.release()
        if self._stream is not None:
            with suppress(torch.AcceleratorError):  # a failed device cannot free memory
                torch.cuda.empty_cache()

    def rehearse(self) -> None:
        """Copy the first block onto itself, also through the host, to compile the copy kernel.

        Does nothing if the memory is not allocated. Mutates only the first block of the host.
        """
        if self._tiers is not None:
            blocks, host = self._tiers
            blocks.take(blocks, [(0, 0)])
            first = [(0, 0)] if host.num_blocks else []
            host.take(blocks, first)
            blocks.take(host, first)

    def pairs(self) -> Mapping[int, KVPair]:
        """Return the memory of each layer that has some; later launches wait for moves that are still running."""
        self.await_moves()
        return self._pairs

    def await_moves(self) -> None:
        """Let later launches wait for moves that are still running. The host does not wait."""
        if self._stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def apply(self, plan: StepPlan) -> None:
        """Start the plan's moves out, then copies, then moves in. Mutates the memory, perhaps later."""
        if not (plan.moves_out or plan.copies or plan.moves_in):
            return
        blocks, host = self._allocated()
        with self._moving():
            host.take(blocks, plan.moves_out)
            blocks.take(blocks, plan.copies)
            blocks.take(host, [(host_block, block) for block, host_block in plan.moves_in])
        if self.draft is not None:
            self.draft.apply(plan)

    def read_block(self, block: int, group: int, buffer: memoryview) -> FinishRead:
        """Start to copy the bytes of a block of a group into `buffer`, after earlier steps. Does not mutate or wait."""
        arrived: Any = None
        with self._moving():
            content = self._content(block, group).contiguous()
            data = torch.empty(content.shape, dtype=torch.uint8, pin_memory=content.is_cuda)
            data.copy_(content, non_blocking=True)
            if self._stream is not None:
                arrived = self._stream.record_event()
        (num_places, room), end = content.shape, content.numel()
        used = self.spec.used_bytes(self.spec.groups[group])
        of_places = [sum(used[2 * place : 2 * place + 2]) for place in range(num_places)]
        # The layers of a draft model use the blocks of the first group; those of others only have room for them.
        rest = None if self.draft is None else self.draft.read_block(block, 0, buffer[end:])

        def finish() -> None:
            if arrived is not None:
                with device_call():
                    arrived.synchronize()
            read = data.numpy().data.cast("B")
            for start, num_used in zip(range(0, end, room), of_places, strict=True):
                buffer[start : start + num_used] = read[start : start + num_used]
            if rest is not None:
                rest()

        return finish

    def write_block(self, block: int, group: int, buffer: memoryview) -> None:
        """Copy bytes in the format of `read_block` into a block, after earlier steps. Mutates, perhaps later."""
        with self._moving():
            content = self._content(block, group)
            data = torch.empty(content.shape, dtype=torch.uint8, pin_memory=content.is_cuda)
            data.numpy().data.cast("B")[:] = buffer[: content.numel()]
            content.copy_(data, non_blocking=True)  # torch keeps page-locked memory until it has been copied
        if self.draft is not None:
            self.draft.write_block(block, 0, buffer[content.numel() :])

    def _content(self, block: int, group: int) -> torch.Tensor:
        return self._allocated()[0].pool.content[: self.spec.places_of(self.spec.groups[group]), block]

    def _allocated(self) -> tuple[_Tier, _Tier]:
        if self._tiers is None:
            raise ExecutionError("the KV memory is not allocated, or was released")
        return self._tiers

    def _moving(self) -> AbstractContextManager[Any]:
        """Return the context for moves of blocks: after earlier launches, in parallel with later ones."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        moving: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return moving

    def _new_pool(self, name: str) -> KVPool:
        on_device = name == "num_blocks"
        num_blocks = self.num_blocks if on_device else self._num_host_blocks
        try:
            if on_device:
                return self.attention.allocate_kv(self.spec, num_blocks)
            return _host_pool(self.spec, num_blocks, pinned=self.device.type == "cuda")
        except RuntimeError as error:  # also torch.OutOfMemoryError; the CPU's allocator raises a plain one
            allowed = f"as many as fit into memory, {self.spec.bytes_per_block} bytes each"
            raise InvalidConfigError(name, num_blocks, allowed) from error


class _Tier:
    """The blocks of one kind of memory."""

    def __init__(self, name: str, num_blocks: int, pool: KVPool) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.pool = pool

    def take(self, source: _Tier, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of `source` to blocks of this tier, (from, to): on a GPU with one kernel. Mutates.

        Does not wait: the copy runs on the current stream.
        """
        for block, own in pairs:
            source._require(block)
            self._require(own)
        content, given = self.pool.content, source.pool.content
        if not pairs:
            return
        on_gpu = [pool for pool in (self.pool, source.pool) if _on_gpu(pool)]
        if on_gpu:  # a kernel can use page-locked memory of the host, too
            from quire.compute.torch.kernels.blocks import copy_blocks  # needs Triton

            copy_blocks(given, content, on_device(np.array(pairs, np.int32), on_gpu[0].content.device))
            return
        for block, own in pairs:
            content[:, own].copy_(given[:, block])

    def _require(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ExecutionError(f"a plan names block {block}; {self.name} is {self.num_blocks}")


def _on_gpu(pool: KVPool) -> bool:
    return bool(pool.content.is_cuda)


def _host_pool(spec: KVCacheSpec, num_blocks: int, *, pinned: bool) -> KVPool:
    """Return a pool in which a block is one piece of memory."""
    shape = (num_blocks, spec.num_places, place_bytes(spec))
    return KVPool(torch.empty(shape, dtype=torch.uint8, pin_memory=pinned).transpose(0, 1), spec)
