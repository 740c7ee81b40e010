"""Estimates of serving: bounds of the tokens per second and of the time to the first token, by a roofline.

They describe a busy server in balance: whenever one of its N sequences ends another begins, so besides D decodes a step
computes D × prompt / output tokens of prompts. If that exceeds the budget of a step, D is less than N.

    tokens per second  D / step
    between tokens     step
    first token        the chunks of the prompt, in the budget that decodes leave; or, if D is less than N, the time
                       that N − D prompts take to begin, at the rate at which sequences end (Little's law)

The wait for one of the N places is not included: it depends on the arrivals, so it takes a simulation.

The estimates are bounds, because a roofline is a bound; the share of them that an engine reaches must be measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.simulate.lengths import RequestLengths
from quire.simulate.roofline import Roofline


@dataclass(frozen=True, slots=True)
class Objective:
    """The targets of a server: seconds to the first token for 95 % of the prompts, and between tokens; None: no target.

    >>> Objective(ttft_s=0.5).excess(ttft_s=1.0, tpot_s=9.0), Objective(ttft_s=0.5).excess(ttft_s=0.25, tpot_s=9.0)
    (2.0, 0.5)
    """

    ttft_s: float | None = None
    tpot_s: float | None = None

    def excess(self, ttft_s: float, tpot_s: float) -> float:
        """Return the larger ratio of a time to its target; up to 1, the objective is met."""
        pairs = ((ttft_s, self.ttft_s), (tpot_s, self.tpot_s))
        return max((found / promised for found, promised in pairs if promised is not None), default=0.0)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The bounds for a number of concurrent sequences and a budget of tokens per step."""

    num_sequences: int
    budget: int
    num_decodes: float
    tokens_per_s: float
    requests_per_s: float
    tpot_s: float
    ttft_s: float
    ttft_p95_s: float


class Estimator:
    """Estimates for requests of certain lengths. Immutable."""

    def __init__(self, roofline: Roofline, lengths: RequestLengths) -> None:
        self.roofline = roofline
        self._prompt, self._output = lengths.mean_prompt, lengths.mean_output
        self._context = max(1, round(lengths.mean_context))
        self._prompts = lengths.prompt(0.5), lengths.prompt(0.95)

    def stream_tokens_per_s(self) -> float:
        """Return the tokens per second of a single sequence, in the middle of its output."""
        return 1 / self.roofline.decode_s(1, self._context)

    def prompt_s(self, num_tokens: int, budget: int) -> float:
        """Return the seconds to the first token of a prompt that runs alone."""
        return self._chunks_s(num_tokens, budget, 0)

    def serving(self, num_sequences: int, budget: int) -> Estimate:
        """Return the estimate for a busy server with up to this many sequences."""
        prompts_per_decode = self._prompt / self._output
        decodes = min(num_sequences, budget / (1 + prompts_per_decode))
        step = self._mixed_s(decodes, decodes * prompts_per_decode)
        beside = min(int(decodes), max(0, budget - 1))
        requests_per_s = decodes / step / self._output
        queued_s = (num_sequences - decodes) / requests_per_s
        return Estimate(
            num_sequences=num_sequences,
            budget=budget,
            num_decodes=decodes,
            tokens_per_s=decodes / step,
            requests_per_s=requests_per_s,
            tpot_s=step,
            ttft_s=max(queued_s, self._chunks_s(self._prompts[0], budget - beside, beside)),
            ttft_p95_s=max(queued_s, self._chunks_s(self._prompts[1], budget - beside, beside)),
        )

    def is_enough(self, num_sequences: int, budget: int) -> bool:
        """Return whether a larger budget would change nothing: all sequences decode, and a long prompt is one chunk."""
        return budget >= num_sequences + max(num_sequences * self._prompt / self._output, self._prompts[1])

    def _mixed_s(self, decodes: float, prompt_tokens: float) -> float:
        """Return the seconds of a step of decodes and this many average tokens of prompts."""
        num_decodes, num_tokens = max(1, round(decodes)), round(prompt_tokens)
        starts, counts = [self._context - 1] * num_decodes, [1] * num_decodes
        while num_tokens > 0:  # several prompts, if a step takes more tokens than one has
            chunk = min(num_tokens, max(1, round(self._prompt)))
            starts.append(max(0, round((self._prompt - chunk) / 2)))
            counts.append(chunk)
            num_tokens -= chunk
        logits = num_decodes + round(prompt_tokens / self._prompt)
        return self.roofline.step_s(starts, counts, logits) * max(1.0, decodes) / num_decodes

    def _chunks_s(self, prompt: int, budget: int, decodes: int) -> float:
        seconds, done = 0.0, 0
        starts, counts = [self._context - 1] * decodes, [1] * decodes
        while done < prompt:
            chunk = min(budget, prompt - done)
            last = done + chunk == prompt
            seconds += self.roofline.step_s([*starts, done], [*counts, chunk], decodes + last)
            done += chunk
        return seconds
