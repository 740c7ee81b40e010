"""Greedy choice: the token of the highest logit; between equals, the one of the lowest id.

One rule covers the three ways in which a step can end. A plain row takes one token. A row that
opens into k sequences takes the k best, best first, one for each sequence. A row with drafts takes
as many of them as the model would have chosen itself, and then the model's own next token, so that
drafts change the number of steps and never the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.compute.arrays import FloatArray


def best_tokens(logits: FloatArray, count: int) -> list[int]:
    """Return the `count` best tokens of one position `[vocab_size]`, best first.

    >>> best_tokens(np.array([1, 5, 3, 5], np.float32), 3)
    [1, 3, 2]
    """
    if count == 1:
        return [int(np.argmax(logits))]
    order = np.argsort(-logits, kind="stable")
    return [int(token) for token in order[:count]]


def verify_drafts(logits: FloatArray, drafts: Sequence[int]) -> list[int]:
    """Return the accepted drafts and the next token.

    `logits[j]` follows the j-th draft, `logits[0]` the token before all drafts: `[num_drafts + 1,
    vocab_size]`.

    >>> likes = np.eye(4, dtype=np.float32)[[2, 3, 0]]
    >>> verify_drafts(likes, [2, 1]), verify_drafts(likes, [2, 3]), verify_drafts(likes[:1], [])
    ([2, 3], [2, 3, 0], [2])
    """
    chosen = [int(token) for token in np.argmax(logits, axis=1)]
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    return chosen[: accepted + 1]
