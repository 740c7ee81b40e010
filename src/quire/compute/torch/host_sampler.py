"""HostSampler: a host sampler for logits on a device; copies only the rows that it needs.

Used where the device sampler does not run: on the CPU, where copying a row costs nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.sampling.draws import Choices, Draws, Sampler
from quire.compute.torch.count_table import Counted
from quire.compute.torch.operations import are_finite


class HostSampler:
    """Passes rows of logits to another sampler; implements `Sampler`."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def sample(self, logits: torch.Tensor, draws: Draws) -> Choices:
        """Return a choice per draw. Does not mutate the logits."""
        rows, places = _copied_rows(logits, draws.logit_rows)
        return self._sampler.sample(rows, replace(draws, logit_rows=places))

    def choose(self, logits: torch.Tensor, draws: Draws, counted: Counted | None = None) -> torch.Tensor:
        """Return the token of each draw, on the device of the logits, -1 if they are not finite. Waits for them.

        Does not mutate them.
        """
        draws = draws if counted is None else counted.applied(draws)
        tokens = torch.from_numpy(self.sample(logits, draws).tokens).to(logits.device)
        return torch.where(are_finite(logits[torch.from_numpy(draws.logit_rows)]), tokens, -1)

    def report(self, logits: torch.Tensor, logit_rows: IntArray, tokens: IntArray, num_logprobs: IntArray) -> Choices:
        """Return the log-probabilities of given tokens. Does not mutate the logits."""
        rows, places = _copied_rows(logits, logit_rows)
        return self._sampler.report(rows, places, tokens, num_logprobs)


def _copied_rows(logits: torch.Tensor, logit_rows: IntArray) -> tuple[FloatArray, IntArray]:
    """Return the rows of logits with these indices, each once, and the place of each index among them."""
    indices, places = np.unique(logit_rows, return_inverse=True)
    rows: FloatArray = logits[torch.from_numpy(indices).to(logits.device)].to("cpu", torch.float32).numpy()
    return rows, places
