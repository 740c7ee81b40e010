"""NativeSampler: the definition in `draws`, compiled; all draws of a step in one call, over a team of threads."""

from __future__ import annotations

from quire._native import Kernels, Sampler, ThreadTeam
from quire.compute.arrays import FloatArray
from quire.compute.sampling.draws import Choices, Draws


class NativeSampler:
    """Chooses tokens; implements `Sampler`."""

    def __init__(self, kernels: Kernels, team: ThreadTeam, vocab_size: int) -> None:
        self._sampler = Sampler(kernels, team, vocab_size)

    def sample(self, logits: FloatArray, draws: Draws) -> Choices:
        """Return a choice per draw. Does not mutate the logits, whose rows may be padded."""
        choices = Choices.empty(draws)
        self._sampler.sample(
            logits,
            draws.logit_rows,
            draws.temperatures,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            draws.seeds,
            draws.positions,
            draws.banned_starts,
            draws.banned_ids,
            draws.num_logprobs,
            choices.tokens,
            choices.logprobs,
            choices.ranks,
            choices.top_ids,
            choices.top_logprobs,
        )
        return choices
