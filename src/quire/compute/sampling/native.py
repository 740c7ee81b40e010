"""NativeSampler: the definition in `draws`, compiled. One call makes all draws of a step, on a team of threads."""

from __future__ import annotations

import numpy as np

from quire._native import DRAW_PARAMETERS as COMPILED_PARAMETERS
from quire._native import Kernels, Sampler, ThreadTeam
from quire.compute.arrays import FloatArray, IntArray
from quire.compute.sampling.draws import Choices, Draws
from quire.core.errors import InvariantError
from quire.core.sampling_params import DRAW_PARAMETERS


class NativeSampler:
    """Chooses tokens; implements `Sampler`."""

    def __init__(self, kernels: Kernels, team: ThreadTeam, vocab_size: int) -> None:
        if COMPILED_PARAMETERS != DRAW_PARAMETERS:
            raise InvariantError("quire._native was built for other sampling parameters; install quire again")
        self._sampler = Sampler(kernels, team, vocab_size)

    def sample(self, logits: FloatArray, draws: Draws) -> Choices:
        """Return a choice per draw. Does not mutate the logits, whose rows may be padded."""
        choices = Choices.of(np.zeros(len(draws), np.int64), draws.num_logprobs)
        self._sampler.sample(logits, draws, choices)
        return choices

    def report(self, logits: FloatArray, logit_rows: IntArray, tokens: IntArray, num_logprobs: IntArray) -> Choices:
        """Return the log-probabilities of given tokens. Does not mutate the logits, whose rows may be padded."""
        choices = Choices.of(tokens, num_logprobs)
        self._sampler.report(logits, logit_rows, num_logprobs, choices)
        return choices
