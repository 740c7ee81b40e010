"""TorchRunner: a decoder on a device as a `ModelRunner`.

    StepInputs (numpy) ─► one page-locked buffer ─► one copy ─► StepBatch: views of a buffer on the device
                                                                    └─► decoder ─► logits, which stay on the device

A step whose activations do not fit into the memory of the device is split: its sequences are halved and run one half
after the other, again and again if need be. Nobody else notices, because a sequence's results are its own, and writing
keys and values twice writes the same. A single sequence that does not fit is a `MemoryError`; the scheduler then makes
its steps smaller.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.compute.arrays import IntArray
from quire.compute.torch.attention.base import StepBatch, StepShape
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import DecoderOutputs, TorchDecoder
from quire.compute.worker.model_runner import StepInputs, StepOutputs


class TorchRunner:
    """Runs steps on a device; implements `ModelRunner`. The logits that it returns are a tensor on the device."""

    def __init__(self, decoder: TorchDecoder, device: torch.device) -> None:
        self._decoder = decoder
        self._upload = Upload(device)

    @property
    def vocab_size(self) -> int:
        """How many tokens the model knows."""
        return self._decoder.spec.vocab_size

    def run(self, inputs: StepInputs, cache: TorchCache) -> StepOutputs:
        """Compute one step. Mutates the slots of its tokens in the cache."""
        outputs = self._compute(inputs, cache)
        finite = torch.cat((outputs.finite, outputs.finite_logits)).cpu().numpy()
        num_tokens = len(inputs.token_ids)
        return StepOutputs(outputs.logits, finite[:num_tokens], finite[num_tokens:])

    def _compute(self, inputs: StepInputs, cache: TorchCache) -> DecoderOutputs:
        """Compute a step, in halves where it does not fit."""
        try:
            batch = self._upload.batch(inputs, cache.spec.block_size)
            return self._decoder.run(batch, cache.pairs())
        except torch.OutOfMemoryError as error:
            if len(inputs.entries) == 1:
                raise MemoryError(str(error)) from error
        # Only here, where the error and what its traceback held are gone, can their memory be used again.
        torch.cuda.empty_cache()
        half = len(inputs.entries) // 2
        first, second = part_of(inputs, 0, half), part_of(inputs, half, len(inputs.entries))
        halves = self._compute(first, cache), self._compute(second, cache)
        return DecoderOutputs(
            torch.cat([each.logits for each in halves]),
            torch.cat([each.finite for each in halves]),
            torch.cat([each.finite_logits for each in halves]),
        )


class Upload:
    """Brings the arrays of a step to a device, as int32, in one copy. Its buffers grow and are used again.

    A batch is valid until the next one is made.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._device_side = torch.empty(0, dtype=torch.int32)

    def batch(self, inputs: StepInputs, block_size: int) -> StepBatch:
        """Return the step on the device. Mutates the buffers."""
        shape = step_shape(inputs, block_size)
        columns = [inputs.token_ids, inputs.positions, inputs.query_starts, shape.lengths, inputs.logit_indices]
        token_ids, positions, query_starts, lengths, logit_indices, *rest = self._moved(
            [*columns, *inputs.slots, *shape.block_tables]
        )
        num_groups = len(inputs.slots)
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            query_starts=query_starts,
            lengths=lengths,
            slots=tuple(rest[:num_groups]),
            block_tables=tuple(rest[num_groups:]),
            logit_indices=logit_indices,
            shape=shape,
        )

    def _moved(self, arrays: list[IntArray]) -> list[torch.Tensor]:
        sizes = [array.size for array in arrays]
        total = sum(sizes)
        if total > len(self._host):
            self._host = torch.empty(2 * total, dtype=torch.int32, pin_memory=self._device.type == "cuda")
            self._device_side = torch.empty(2 * total, dtype=torch.int32, device=self._device)
        np.concatenate([array.ravel() for array in arrays], out=self._host[:total].numpy(), casting="same_kind")
        self._device_side[:total].copy_(self._host[:total], non_blocking=True)
        pieces = self._device_side[:total].split(sizes)
        return [piece.view(array.shape) for piece, array in zip(pieces, arrays, strict=True)]


def step_shape(inputs: StepInputs, block_size: int) -> StepShape:
    """Return what the host knows of a step; tables are cut to the longest context. Does not mutate."""
    counts = np.diff(inputs.query_starts)
    lengths = inputs.positions[inputs.query_starts[1:] - 1] + 1
    longest = int(lengths.max())
    num_decodes = int(np.argmax(counts != 1)) if (counts != 1).any() else len(counts)
    return StepShape(
        num_decodes=num_decodes,
        longest_query=int(counts.max()),
        longest_context=longest,
        query_starts=inputs.query_starts,
        lengths=lengths,
        block_tables=tuple(table[:, : -(-longest // block_size)] for table in inputs.block_tables),
    )


def part_of(inputs: StepInputs, start: int, stop: int) -> StepInputs:
    """Return the sequences from `start` up to `stop` as a step of their own. Does not mutate."""
    tokens = slice(int(inputs.query_starts[start]), int(inputs.query_starts[stop]))
    logits = slice(int(inputs.logit_starts[start]), int(inputs.logit_starts[stop]))
    return StepInputs(
        entries=inputs.entries[start:stop],
        query_starts=inputs.query_starts[start : stop + 1] - tokens.start,
        token_ids=inputs.token_ids[tokens],
        positions=inputs.positions[tokens],
        slots=tuple(slots[tokens] for slots in inputs.slots),
        block_tables=tuple(table[start:stop] for table in inputs.block_tables),
        logit_starts=inputs.logit_starts[start : stop + 1] - logits.start,
        logit_indices=inputs.logit_indices[logits] - tokens.start,
    )
