"""BeamModel: which beams a search would go on with, where no model says how likely its texts are.

Each beam's likeliest next tokens are taken to be the largest of many independent Gumbel values, as those of a softmax
with random logits are: the gap between the j-th and the next is exponential with mean 1/j. No parameter is left to
choose. The best `k` continuations of all beams go on, so beams die and fork as they do in a search; how often a real
model lets them, it decides itself, and one that is surer of its text lets them part later and share more.

What is drawn depends on the prompt and on how long the text is, so a search that must begin again finds the same beams.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


class BeamModel:
    """The scores of the searches under way."""

    def __init__(self) -> None:
        self._scores: dict[str, list[float]] = {}

    def open(self, request_id: str, prompt: bytes, num_beams: int) -> None:
        """A prompt opens into beams. Mutates."""
        self._scores[request_id] = _continuations(random.Random(prompt), num_beams)

    def choose(self, request_id: str, prompt: bytes, position: int) -> list[int]:
        """Return, for each beam of a search, which beam it continues. Mutates.

        >>> model = BeamModel()
        >>> model.open("r", b"prompt", 3)
        >>> [model.choose("r", b"prompt", position) for position in range(4)]
        [[0, 1, 0], [1, 1, 1], [2, 2, 2], [0, 1, 0]]
        """
        scores = self._scores[request_id]
        rng = random.Random(prompt + position.to_bytes(8))
        found = [
            (score + gap, parent) for parent, score in enumerate(scores) for gap in _continuations(rng, len(scores))
        ]
        best = sorted(found, reverse=True)[: len(scores)]
        return self._place(scores, best)

    def _place(self, scores: list[float], best: Sequence[tuple[float, int]]) -> list[int]:
        """Let each beam that goes on keep its place; its other continuations take the places of those that do not."""
        parents = list(range(len(scores)))
        living = {parent for _, parent in best}
        vacant = [place for place in parents if place not in living]
        kept: set[int] = set()
        for score, parent in best:
            place = vacant.pop() if parent in kept else parent
            kept.add(parent)
            parents[place] = parent
            scores[place] = score
        return parents

    def forget(self, request_id: str) -> None:
        """A search is over. Mutates."""
        self._scores.pop(request_id, None)


def _continuations(rng: random.Random, count: int) -> list[float]:
    """Draw the scores of the best continuations of a beam, the best first."""
    scores, score = [], 0.0
    for rank in range(1, count + 1):
        score -= rng.expovariate(rank)
        scores.append(score)
    return scores
