"""TorchRunner: a decoder and a sampler on a device, as a `ModelRunner` and as a `Launcher`.

    run       inputs ─► upload ─► decoder ─► logits, which stay on the device; waits for the `finite` flags
    launch    inputs ─► upload ─► decoder ─► head, sampler ─► tokens: to the rows' last tokens, on the device,
                                     ▲                                and to the host, which waits when it needs them
                                     └── tokens not known yet: the rows' last tokens

The decoder's part of a step, and the head with the draws, are replayed if they are recorded (`graphs.py`,
`draw_graphs.py`), and launched if not.

If the activations of a step do not fit into device memory, the step is split: one half of its sequences runs after the
other, repeatedly if needed. This changes no result, because a sequence's results do not depend on others, and keys and
values that are written twice are the same. A single sequence that does not fit raises `MemoryError`; the scheduler then
makes its steps smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
import torch

from quire.compute.adapters.folder import Adapter
from quire.compute.arrays import BoolArray, IntArray
from quire.compute.sampling.draws import Draws, Sampler
from quire.compute.torch.adapters import AdapterSlots
from quire.compute.torch.attention.base import StepBatch
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.count_table import Counted, CountTable, penalized
from quire.compute.torch.decoder import DecoderOutputs, TorchDecoder
from quire.compute.torch.device_errors import device_call, lost_if_it_fails
from quire.compute.torch.graphs import StepGraphs
from quire.compute.torch.last_tokens import LastTokens
from quire.compute.torch.operations import are_finite
from quire.compute.torch.rehearsal import rehearsed_draws
from quire.compute.torch.step_upload import step_shape, uploaded
from quire.compute.torch.upload import on_device
from quire.compute.worker.model_runner import NO_STATES, UNKNOWN, StepInputs, StepOutputs
from quire.compute.worker.step_ahead import Drawn
from quire.core.errors import ExecutionError, InvalidConfigError

if TYPE_CHECKING:
    from quire.compute.torch.draw_graphs import DrawGraphs


class DeviceSampler(Sampler, Protocol):
    """A sampler that can leave the chosen tokens on the device of the logits."""

    def choose(self, logits: torch.Tensor, draws: Draws, counted: Counted | None = None) -> torch.Tensor:
        """Return the token of each draw, int64, on the device; -1 if its logits are not finite. Does not wait.

        Does not mutate the logits.
        `counted`: the draws whose penalties use counts on the device instead of lists.
        """
        ...


class Graphs(NamedTuple):
    """The recordings of a runner; None: it launches."""

    steps: StepGraphs | None = None
    draws: DrawGraphs | None = None


NO_GRAPHS: Final = Graphs()


class TorchRunner:
    """Runs steps on a device; implements `ModelRunner` and `Launcher`. Its logits are tensors on the device.

    `num_rows`: the rows of the batch that steps come from.
    """

    def __init__(
        self,
        decoder: TorchDecoder,
        sampler: DeviceSampler,
        *,
        graphs: Graphs = NO_GRAPHS,
        rehearsals: Sequence[StepInputs] = (),
        slots: AdapterSlots | None = None,
        num_rows: int = 256,
    ) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._device = decoder.device
        self._graphs, self._draw_graphs = graphs
        self._rehearsals = rehearsals
        self._slots = slots
        self._keeps_states = False
        self.states: torch.Tensor | None = None
        """The hidden states of the tokens of the last step, if they are kept."""
        self._counts = CountTable(self.vocab_size, decoder.device)
        self._last_tokens = LastTokens(num_rows, self.vocab_size, decoder.device)

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
            with lost_if_it_fails():
                self._prepare(cache)
        except torch.OutOfMemoryError as error:
            allowed = "less, or less kv_memory: steps of this size and their graphs do not fit into memory"
            raise InvalidConfigError("max_num_batched_tokens", size, allowed) from error

    def _prepare(self, cache: TorchCache) -> None:
        for inputs in self._rehearsals:
            batch = self._uploaded(self._with_states(inputs), cache)
            outputs = self._decoder.run(batch, cache.pairs())
            logits = self._decoder.logits(outputs.rows)
            for draws in rehearsed_draws(len(inputs.entries)):
                self._choose(logits, draws, inputs.rows, np.zeros(len(inputs.rows), np.bool_))
            if self._slots is not None:
                adapted = self._slots.nothing(batch.shape.num_tokens)
                self._decoder.run(replace(batch, adapted=adapted), cache.pairs())
        cache.rehearse()
        if self._graphs is not None:
            self._graphs.record(cache.pairs(), self._last_tokens, self._slots)
        if self._draw_graphs is not None:
            self._draw_graphs.record(self._last_tokens, self._device)

    def run(self, inputs: StepInputs, cache: TorchCache) -> StepOutputs:
        """Compute one step and wait for it. Mutates the slots of its tokens in the cache."""
        outputs = self._started(inputs, cache)
        with device_call():
            logits = self._logits(outputs)
            finite = torch.cat((outputs.finite, are_finite(logits))).cpu().numpy()
            states = NO_STATES if outputs.states is None else outputs.states.cpu().numpy()
        num_tokens = len(inputs.token_ids)
        return StepOutputs(logits, finite[:num_tokens], finite[num_tokens:], states)

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
        outputs = self._started(inputs, cache)
        has_draw, last = np.diff(inputs.logit_starts) > 0, inputs.token_ids[inputs.query_starts[1:] - 1]
        rows = inputs.rows[has_draw]
        with device_call():
            if self._draw_graphs is not None and self._draw_graphs.takes(draws) and not len(penalized(draws)):
                return TorchStep(self._draw_graphs.run(outputs.rows, draws, rows), outputs.finite)
            chosen = self._choose(self._logits(outputs), draws, rows, last[has_draw] == UNKNOWN)
            self._last_tokens.store(on_device(rows, self._device), chosen)
            return TorchStep(chosen.to(torch.int32), outputs.finite)

    def keep_states(self) -> None:
        """Keep the hidden states of the tokens of each step from now on, for the layer that guesses. Mutates."""
        self._keeps_states = True

    def embedded(self, inputs: StepInputs, batch: StepBatch) -> torch.Tensor:
        """Return the embedding of the tokens of a step; an unknown one is the last token of its row. Does not wait."""
        ids = self._last_tokens.known(batch.token_ids) if inputs.token_ids.min() < 0 else batch.token_ids
        return self._decoder.embedded(ids, batch.given)

    def logits_of(self, states: torch.Tensor) -> torch.Tensor:
        """Return the logits of hidden states. Does not wait."""
        return self._decoder.logits(states)

    def _choose(self, logits: torch.Tensor, draws: Draws, rows: IntArray, goes_on: BoolArray) -> torch.Tensor:
        """Return the token of each draw; `rows` and `goes_on`: as in `CountTable.take`. Mutates counts."""
        rest, counted = self._counts.take(draws, rows, goes_on)
        chosen = self._sampler.choose(logits, rest, counted)
        if counted is not None:
            counted.add(chosen.clamp(0, self.vocab_size - 1))  # -1 if logits were not finite
        return chosen

    def _logits(self, outputs: DecoderOutputs) -> torch.Tensor:
        """Return the logits of a step."""
        return self._decoder.logits(outputs.rows)

    def _started(self, inputs: StepInputs, cache: TorchCache) -> DecoderOutputs:
        """Start a step, and keep the hidden states of its tokens if the layer that guesses reads them. Mutates."""
        self.states = None
        with device_call():
            outputs = self._compute(self._with_states(inputs), cache)
            if not self._keeps_states or outputs.states is None:
                return outputs
            self.states = states = outputs.states
            requested = states[on_device(inputs.state_indices, self._device)] if len(inputs.state_indices) else None
            return replace(outputs, states=requested)

    def _with_states(self, inputs: StepInputs) -> StepInputs:
        """Return a step that requests the hidden states of all its tokens, if they are kept."""
        return replace(inputs, state_indices=np.arange(len(inputs.token_ids))) if self._keeps_states else inputs

    def _compute(self, inputs: StepInputs, cache: TorchCache) -> DecoderOutputs:
        """Start a step, in halves if it does not fit."""
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
        # A replay of the second half would overwrite what the first one has left.
        done = replace(done, rows=done.rows.clone(), finite=done.finite.clone())
        halves = done, self._compute(second, cache)
        return DecoderOutputs(
            torch.cat([each.rows for each in halves]),
            torch.cat([each.finite for each in halves]),
            _joined([each.states for each in halves]),
        )

    def _uploaded(self, inputs: StepInputs, cache: TorchCache) -> StepBatch:
        ahead_in_windows = self._decoder.spec.attention.ahead_in_windows
        return uploaded(inputs, cache.spec.block_size, self._device, ahead_in_windows=ahead_in_windows)

    def _computed(self, inputs: StepInputs, cache: TorchCache) -> DecoderOutputs:
        """Start a step without splitting it."""
        with lost_if_it_fails():
            adapted = None if self._slots is None else self._slots.step(inputs)
            is_recorded = not len(inputs.given) and not len(inputs.ends_seen)
            if self._graphs is not None and is_recorded:
                cache.await_moves()
                outputs = self._graphs.run(inputs, step_shape(inputs, cache.spec.block_size), adapted)
                if outputs is not None:
                    return outputs
            last_tokens = self._last_tokens if inputs.token_ids.min() < 0 else None
            batch = self._uploaded(inputs, cache)
            return self._decoder.run(replace(batch, adapted=adapted, last_tokens=last_tokens), cache.pairs())


def _joined(states: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    tensors = [each for each in states if each is not None]
    return torch.cat(tensors) if tensors else None


class TorchStep:
    """A running step; implements `StepUnderWay`. Its results are being copied to the host.

    `tokens`: int32, one for each row of logits, -1 if that is not finite. `finite`: of each token of the step.
    """

    def __init__(self, tokens: torch.Tensor, finite: torch.Tensor) -> None:
        self._tokens, self._finite = _copied(tokens), _copied(finite)
        self._arrived: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._arrived = torch.cuda.current_stream(tokens.device).record_event()

    def wait(self) -> Drawn:
        """Wait for the results, and return them."""
        if self._arrived is not None:
            with device_call():
                self._arrived.synchronize()
        tokens = self._tokens.numpy().astype(np.int64)
        return Drawn(np.maximum(tokens, 0), self._finite.numpy(), tokens >= 0)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy on the host, which may not be complete yet; the next step may overwrite the tensor."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
