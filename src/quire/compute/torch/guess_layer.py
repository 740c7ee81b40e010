"""TorchLayer: the layer of a model that guesses, on a device.

    step    model: rows ─► logits ─► draw ─► last tokens of the rows ─┐
              └─► hidden states ──────────────────────────────────────┴─► layer ─► outputs       also of launched steps
    guess   outputs ─► head of the model ─► draw, on the host ─► embedding, layer ─► outputs ─► …

Hidden states and outputs stay on the device. The layer takes a token that is not known yet from the last tokens of
rows, so reading a step never waits for it; only guesses do, as the host draws them. The layer is launched kernel by
kernel, while the model's part of a step is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from quire.compute.arrays import BoolArray, IntArray
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import TorchDecoder
from quire.compute.torch.device_errors import device_call
from quire.compute.torch.operations import are_finite
from quire.compute.torch.runner import TorchRunner
from quire.compute.torch.step_upload import uploaded
from quire.compute.torch.upload import on_device
from quire.compute.worker.model_runner import ModelRunner, StepInputs, StepOutputs
from quire.core.errors import ExecutionError, InvalidConfigError


class TorchLayer:
    """Implements `GuessLayer`. `model`: the runner of the model, which keeps the states of its steps from now on."""

    def __init__(
        self, decoder: TorchDecoder, cache: TorchCache, model: TorchRunner, rehearsals: Sequence[StepInputs] = ()
    ) -> None:
        self._decoder = decoder
        self._cache = cache
        self._model = model
        self._rehearsals = rehearsals
        self._outputs: torch.Tensor | None = None
        model.keep_states()

    def prepare(self) -> None:
        """Read the largest steps once, which compiles kernels. Does not mutate the cache.

        Raises `InvalidConfigError` if one does not fit next to weights and KV blocks.
        """
        size = max((len(inputs.token_ids) for inputs in self._rehearsals), default=0)
        shape = size, self._decoder.spec.hidden_size
        try:
            states = torch.zeros(shape, device=self._decoder.device)
            for inputs in self._rehearsals:
                self._run(inputs, states[: len(inputs.token_ids)])
        except MemoryError as error:
            allowed = "less, or less kv_memory: the layer that guesses does not fit into memory with steps of this size"
            raise InvalidConfigError("max_num_batched_tokens", size, allowed) from error

    def run_model(self, runner: ModelRunner[Any], inputs: StepInputs, cache: Any) -> StepOutputs:
        """Compute a step of the model, whose hidden states its runner keeps. Mutates the cache."""
        return runner.run(inputs, cache)

    def read(self, inputs: StepInputs, places: IntArray) -> None:
        """Read tokens of the model's last step, at these places in it, in order. Does not wait. Mutates their slots."""
        states = self._model.states
        reads_all = states is not None and len(places) == len(states)
        self._outputs = self._run(inputs, states if states is not None and reads_all else self._at(states, places))

    def read_on(self, inputs: StepInputs, places: IntArray) -> None:
        """Read the next token of some sequences, after kept outputs. Does not wait. Mutates their slots."""
        self._outputs = self._run(inputs, self._at(self._outputs, places))

    def logits(self, places: IntArray) -> tuple[torch.Tensor, BoolArray]:
        """Return the logits of kept outputs, and which of them are finite. Waits for the device."""
        outputs = self._at(self._outputs, places)
        with device_call():
            logits = self._model.logits_of(outputs)
            finite: BoolArray = are_finite(logits).cpu().numpy()
            return logits, finite

    def _at(self, states: torch.Tensor | None, places: IntArray) -> torch.Tensor:
        if states is None:
            raise ExecutionError("the layer that guesses has no hidden states: no step was computed")
        with device_call():
            return states[on_device(places, self._decoder.device)]

    def _run(self, inputs: StepInputs, states: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the layer for the last token of each sequence. Mutates the slots of the tokens."""
        ends = inputs.query_starts[1:] - 1
        with device_call(), torch.inference_mode():
            size, device = self._cache.spec.block_size, self._decoder.device
            batch = uploaded(replace(inputs, logit_indices=ends), size, device)
            halves = self._model.embedded(inputs, batch), states.to(self._decoder.dtype)
            return self._decoder.run(replace(batch, halves=halves, given=None), self._cache.pairs()).rows
