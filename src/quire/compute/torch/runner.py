"""TorchRunner: a decoder and a sampler on a device, as a `ModelRunner` and as a `Launcher`.

    run       inputs ─► upload ─► decoder ─► logits, which stay on the device; waits for the `finite` flags
    launch    inputs ─► upload ─► decoder ─► sampler ─► tokens: to the rows' last tokens, on the device,
                             ▲                                  and to the host, which waits when it needs them
                             └── tokens not known yet: the rows' last tokens

If the activations of a step do not fit into device memory, the step is split: one half of its sequences runs after the
other, repeatedly if needed. This changes no result, because a sequence's results do not depend on others, and keys and
values that are written twice are the same. A single sequence that does not fit raises `MemoryError`; the scheduler then
makes its steps smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from quire.compute.adapters.folder import Adapter
from quire.compute.arrays import BoolArray, IntArray
from quire.compute.sampling.draws import Draws, Sampler
from quire.compute.torch.adapters import AdapterSlots
from quire.compute.torch.attention.base import StepBatch
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.count_table import Counted, CountTable
from quire.compute.torch.decoder import DecoderOutputs, TorchDecoder
from quire.compute.torch.device_errors import device_call, lost_if_it_fails
from quire.compute.torch.graphs import StepGraphs
from quire.compute.torch.rehearsal import rehearsed_draws
from quire.compute.torch.step_upload import uploaded
from quire.compute.torch.upload import on_device
from quire.compute.worker.model_runner import NO_STATES, UNKNOWN, StepInputs, StepOutputs
from quire.compute.worker.step_ahead import Drawn
from quire.core.errors import ExecutionError, InvalidConfigError


class DeviceSampler(Sampler, Protocol):
    """A sampler that can leave the chosen tokens on the device of the logits."""

    def choose(self, logits: torch.Tensor, draws: Draws, counted: Counted | None = None) -> torch.Tensor:
        """Return the token of each draw, int64, on the device; does not wait. Does not mutate the logits.

        `counted`: the draws whose penalties use counts on the device instead of lists.
        """
        ...


class TorchRunner:
    """Runs steps on a device; implements `ModelRunner` and `Launcher`. Its logits are tensors on the device."""

    def __init__(
        self,
        decoder: TorchDecoder,
        sampler: DeviceSampler,
        device: torch.device,
        *,
        graphs: StepGraphs | None = None,
        rehearsals: Sequence[StepInputs] = (),
        slots: AdapterSlots | None = None,
    ) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._device = device
        self._graphs = graphs
        self._rehearsals = rehearsals
        self._slots = slots
        self._counts = CountTable(self.vocab_size, device)
        self._last_tokens = torch.zeros(1, dtype=torch.int32, device=device)  # [num_rows]: each row's last draw

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        return self._decoder.spec.vocab_size

    def prepare(self, cache: TorchCache) -> None:
        """Compute the largest steps once, and draw from them; then record the graphs. Does not mutate the cache.

        This compiles kernels, and shows whether such steps fit next to weights and KV blocks: raises
        `InvalidConfigError` if one does not.
        """
        size = max((len(inputs.token_ids) for inputs in self._rehearsals), default=0)
        try:
            for inputs in self._rehearsals:
                batch = uploaded(inputs, cache.spec.block_size, self._device)[0]
                outputs = self._decoder.run(batch, cache.pairs())
                for draws in rehearsed_draws(len(inputs.entries)):
                    self._choose(outputs.logits, draws, inputs.rows, np.zeros(len(inputs.rows), np.bool_))
                if self._slots is not None:
                    adapted = self._slots.nothing(batch.shape.num_tokens)
                    self._decoder.run(replace(batch, adapted=adapted), cache.pairs())
            cache.rehearse()
            if self._graphs is not None:
                self._graphs.record(cache.pairs(), self._device, self._slots)
        except torch.OutOfMemoryError as error:
            allowed = "less, or less kv_memory: steps of this size and their graphs do not fit into memory"
            raise InvalidConfigError("max_num_batched_tokens", size, allowed) from error

    def run(self, inputs: StepInputs, cache: TorchCache) -> StepOutputs:
        """Compute one step and wait for it. Mutates the slots of its tokens in the cache."""
        outputs = self._compute(inputs, cache)
        with device_call():
            finite = torch.cat((outputs.finite, outputs.finite_logits)).cpu().numpy()
            states = NO_STATES if outputs.states is None else outputs.states.cpu().numpy()
        num_tokens = len(inputs.token_ids)
        return StepOutputs(outputs.logits, finite[:num_tokens], finite[num_tokens:], states)

    def load_adapter(self, adapter: Adapter) -> None:
        """Read an adapter into a slot, so that sequences can use it, unless a slot has it already. Mutates."""
        if self._slots is None:
            raise ExecutionError("this engine was started without room for adapters")
        self._slots.load(adapter)

    def has_adapter(self, digest: str) -> bool:
        """Return whether an adapter is in memory. Does not mutate."""
        return self._slots is not None and self._slots.has(digest)

    def drop_adapter(self, digest: str) -> None:
        """Free the slot of an adapter. Mutates."""
        if self._slots is not None:
            self._slots.drop(digest)

    def launch(self, inputs: StepInputs, draws: Draws, cache: TorchCache) -> TorchStep:
        """Start a step and its draws, one for each row of logits. Mutates its slots in the cache."""
        outputs = self._compute(inputs, cache)
        has_draw, last = np.diff(inputs.logit_starts) > 0, inputs.token_ids[inputs.query_starts[1:] - 1]
        rows = inputs.rows[has_draw]
        with device_call():
            chosen = self._choose(outputs.logits, draws, rows, last[has_draw] == UNKNOWN)
            self._last_tokens[on_device(rows, self._device)] = chosen
            return TorchStep(torch.cat((chosen, outputs.finite, outputs.finite_logits)), len(inputs.token_ids))

    def _choose(self, logits: torch.Tensor, draws: Draws, rows: IntArray, goes_on: BoolArray) -> torch.Tensor:
        """Return the token of each draw, int32; `rows` and `goes_on`: as in `CountTable.take`. Mutates counts."""
        rest, counted = self._counts.take(draws, rows, goes_on)
        chosen = self._sampler.choose(logits, rest, counted)
        if counted is not None:
            counted.add(chosen.clamp(0, self.vocab_size - 1))  # any number if logits were not finite
        return chosen.to(torch.int32)

    def _compute(self, inputs: StepInputs, cache: TorchCache) -> DecoderOutputs:
        """Start a step, in halves if it does not fit."""
        self._make_room(int(inputs.rows.max()) + 1)
        try:
            return self._computed(inputs, cache)
        except torch.OutOfMemoryError as error:
            if len(inputs.entries) == 1:
                raise MemoryError(str(error)) from error
        # The memory can be reused only here, after the error and its traceback have been freed.
        torch.cuda.empty_cache()
        half = len(inputs.entries) // 2
        first, second = inputs.part(0, half), inputs.part(half, len(inputs.entries))
        done = self._compute(first, cache)
        done = replace(done, finite=done.finite.clone())  # a replay of the second half would overwrite it
        halves = done, self._compute(second, cache)
        return DecoderOutputs(
            torch.cat([each.logits for each in halves]),
            torch.cat([each.finite for each in halves]),
            torch.cat([each.finite_logits for each in halves]),
            _joined([each.states for each in halves]),
        )

    def _computed(self, inputs: StepInputs, cache: TorchCache) -> DecoderOutputs:
        """Start a step without splitting it."""
        with lost_if_it_fails():
            batch, rows = uploaded(inputs, cache.spec.block_size, self._device)
            if inputs.token_ids.min() < 0:
                self._fill_in(batch, rows)
            if self._slots is not None:
                batch = replace(batch, adapted=self._slots.step(inputs))
            if self._graphs is not None and self._graphs.takes(batch):
                return self._graphs.run(batch, cache.pairs())
            return self._decoder.run(batch, cache.pairs())

    def _fill_in(self, batch: StepBatch, rows: torch.Tensor) -> None:
        """Replace unknown tokens by the last tokens that their rows drew. Mutates the batch."""
        # Only the last token of a sequence can be unknown. If logits were not finite, the draw may be any number.
        ends = batch.query_starts[1:] - 1
        drawn = self._last_tokens[rows].clamp(0, self.vocab_size - 1)
        given = batch.token_ids[ends]
        batch.token_ids[ends] = torch.where(given < 0, drawn, given)

    def _make_room(self, num_rows: int) -> None:
        """Make room for the tokens drawn by this many rows. Mutates."""
        missing = num_rows - len(self._last_tokens)
        if missing > 0:
            room = self._last_tokens.new_zeros(max(missing, len(self._last_tokens)))
            self._last_tokens = torch.cat((self._last_tokens, room))


def _joined(states: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    tensors = [each for each in states if each is not None]
    return torch.cat(tensors) if tensors else None


class TorchStep:
    """A running step; implements `StepUnderWay`. Its results are being copied to the host."""

    def __init__(self, numbers: torch.Tensor, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._arrived: torch.cuda.Event | None = None
        self._numbers = numbers
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.current_stream(numbers.device).record_event()

    def wait(self) -> Drawn:
        """Wait for the results, and return them."""
        if self._arrived is not None:
            with device_call():
                self._arrived.synchronize()
        numbers = self._numbers.numpy()
        num_draws = (len(numbers) - self._num_tokens) // 2
        finite, finite_logits = np.split(numbers[num_draws:].astype(np.bool_), [self._num_tokens])
        return Drawn(numbers[:num_draws].astype(np.int64), finite, finite_logits)
