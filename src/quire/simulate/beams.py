"""BeamModel: draws which beams of a search survive, in place of a model's probabilities.

Each beam's likeliest next tokens are drawn as the largest of many independent Gumbel values, like those of a softmax
with random logits: the gap between the j-th and the next is exponential with mean 1/j. There is no free parameter. The
best `k` continuations of all beams survive, so beams die and fork as in a search. How often they do depends on the
model: if a real model is more certain of its text, its beams part later and share more.

The draws depend only on the prompt and the length of the text, so a search that starts again finds the same beams.
"""

from __future__ import annotations

import random
from collections.abc import Sequence


class BeamModel:
    """The scores of the running searches."""

    def __init__(self) -> None:
        self._scores: dict[str, list[float]] = {}

    def open(self, request_id: str, prompt: bytes, num_beams: int) -> None:
        """Start the beams of a prompt. Mutates."""
        self._scores[request_id] = _continuations(random.Random(prompt), num_beams)

    def choose(self, request_id: str, prompt: bytes, position: int) -> list[int]:
        """Return, for each beam of a search, the beam that it continues. Mutates.

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
        """Keep each surviving beam at its index; its other continuations take the indexes of beams that died."""
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
        """Forget a search that has ended. Mutates."""
        self._scores.pop(request_id, None)


def _continuations(rng: random.Random, count: int) -> list[float]:
    """Draw the scores of the best continuations of a beam, the best first."""
    scores, score = [], 0.0
    for rank in range(1, count + 1):
        score -= rng.expovariate(rank)
        scores.append(score)
    return scores
