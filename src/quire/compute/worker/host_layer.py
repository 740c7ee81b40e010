"""HostLayer: the layer of a model that guesses, in an engine whose hidden states are arrays of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from quire.compute.arrays import BoolArray, FloatArray, IntArray, Logits
from quire.compute.worker.kv_memory import KVMemory
from quire.compute.worker.model_runner import NO_STATES, ModelRunner, StepInputs, StepOutputs


class ModelEnds(Protocol):
    """The two ends of a model, which the layer that guesses shares with it."""

    def embed(self, token_ids: IntArray) -> FloatArray:
        """Return the rows of the embedding for some tokens. Does not mutate."""
        ...

    def logits_of(self, states: FloatArray) -> tuple[Logits, BoolArray]:
        """Return the logits of hidden states, valid until the next step or call, and which rows are finite."""
        ...


class HostLayer:
    """Implements `GuessLayer` with a runner of the layer, whose rows are given, and the two ends of the model."""

    def __init__(self, runner: ModelRunner[Any], cache: KVMemory, ends: ModelEnds) -> None:
        self.runner = runner
        self._cache = cache
        self._ends = ends
        self._states = self._outputs = NO_STATES

    def run_model(self, runner: ModelRunner[Any], inputs: StepInputs, cache: KVMemory) -> StepOutputs:
        """Compute a step of the model, and keep the hidden states of its tokens until `read`. Mutates the cache."""
        outputs = runner.run(replace(inputs, state_indices=np.arange(len(inputs.token_ids))), cache)
        self._states = outputs.states
        return replace(outputs, states=outputs.states[inputs.state_indices])

    def read(self, inputs: StepInputs, places: IntArray) -> None:
        """Read tokens of the model's last step, at these places in it. Mutates their slots in the memory."""
        states, self._states = self._states[places], NO_STATES
        self._outputs = self._run(inputs, states)

    def read_on(self, inputs: StepInputs, places: IntArray) -> None:
        """Read the next token of some sequences, after kept outputs. Mutates their slots in the memory."""
        self._outputs = self._run(inputs, self._outputs[places])

    def logits(self, places: IntArray) -> tuple[Logits, BoolArray]:
        """Return the logits of kept outputs, valid until the next call, and which of them are finite."""
        return self._ends.logits_of(self._outputs[places])

    def _run(self, inputs: StepInputs, states: FloatArray) -> FloatArray:
        """Return the outputs of the layer for the last token of each sequence. Mutates the slots of the tokens."""
        rows = self._ends.embed(inputs.token_ids)
        if len(inputs.given):
            is_given = inputs.given >= 0
            rows[is_given] = inputs.given_rows[inputs.given[is_given], : rows.shape[1]]
        joined = replace(
            inputs,
            state_indices=inputs.query_starts[1:] - 1,
            given=np.arange(len(rows)),
            given_rows=np.concatenate((rows, states), axis=1),
        )
        return self.runner.run(joined, self._cache).states
