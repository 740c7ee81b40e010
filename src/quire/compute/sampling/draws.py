"""Draws and choices: the input and the output of a sampler.

A draw chooses one token from one row of logits, with its own settings:

1. Rules change the logits, in this order. **Allowed**: if a draw has such a list, all other tokens are removed.
   **Masked**: if a draw has a mask, the tokens whose bit is not set are removed: the grammar does not allow them here.
   **Banned** tokens are removed: those that would end the text before `min_tokens`, and those that would end a bad
   word. **Biases** are added. **Repetition**: the logit of a token in the text is divided by the penalty if it is
   positive, else multiplied. **Frequency**, then **presence**: from the logit of a token that occurs c > 0 times in the
   output, c × frequency and then presence are subtracted.
2. Temperature 0 (also for top_k 1): the token with the highest logit; among equal ones, the lowest id.
3. Else every token has the weight e^(logit / temperature), and filters remove tokens, in this order:
   **top_n_sigma**, those whose logit is more than n standard deviations below the highest; **min_p**, those below that
   share of the highest weight; **top_k**, all but the k likeliest; **top_p**, all but the likeliest that together have
   that share of the remaining weight, at least one. Among equal weights, lower ids count as likelier.
4. The rest race: each token has its own random number, which depends only on (seed, position, id). The token with the
   least -log(number) / weight wins; among equal ones, the lowest id. So each token wins with the probability that its
   weight has, and two models with similar distributions mostly draw the same token.

Each number of step 1 is rounded to float32, so that all samplers have the same logits, to the bit.

The standard deviation is over the logits after step 1 except -inf, with their count as the divisor. It is computed
from integers, whose sums are exact in any order: the distance of each logit from the highest, in steps of 2^-20 of the
distance to the lowest, rounded to the nearest step (halves up). The rest is float64, and each operation rounds:
mean = sum / count, variance = sum of squares / count - mean x mean, at least 0. A token stays unless its logit is below
highest - n x (sqrt(variance) x step). So all samplers keep the same tokens. Temperature would scale logits and
deviation alike, so it makes no difference.

So a sampled token depends only on the request's own logits, text, seed and position: not on the batch, chunks or
preemptions. Log-probabilities are the model's own: from the logits before step 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import BoolArray, FloatArray, IntArray, Logits, MaskArray
from quire.core.errors import InvariantError
from quire.core.sampling_params import DRAW_PARAMETERS, PARAMETERS

NO_MASK: Final = -1
_ROWS: Final = {name: row for row, name in enumerate(DRAW_PARAMETERS)}


@dataclass(frozen=True, slots=True)
class TokenLists:
    """A list of distinct token ids per draw: draw i has ids[starts[i]] up to ids[starts[i + 1]]."""

    starts: IntArray  # [num_draws + 1]
    ids: IntArray

    @classmethod
    def of(cls, lists: Sequence[IntArray]) -> TokenLists:
        """Return the lists, joined.

        >>> TokenLists.of([np.array([5, 7]), np.array([7])]).starts.tolist()
        [0, 2, 3]
        """
        return cls(np.cumsum([0, *map(len, lists)], dtype=np.int64), joined(lists, np.int64))

    def span(self, index: int) -> slice:
        """Return the slice of a draw's list."""
        return slice(int(self.starts[index]), int(self.starts[index + 1]))


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The tokens that draws may choose, one bit each; several draws may share a mask, and most have none.

    >>> masks = TokenMasks(np.array([0, -1]), np.array([[0b101]], np.uint32))
    >>> masks.allowed(0, 3), masks.allowed(1, 3)
    (array([ True, False,  True]), None)
    """

    rows: IntArray  # [num_draws]; -1: every token
    words: MaskArray  # [num_masks, num_words]; bit i of word w: token 32 w + i

    @classmethod
    def none(cls, num_draws: int) -> TokenMasks:
        """Return the masks of draws without masks."""
        return cls(np.full(num_draws, NO_MASK, np.int64), np.zeros((0, 0), np.uint32))

    def allowed(self, index: int, vocab_size: int) -> BoolArray | None:
        """Return for each token whether a draw may choose it; None without a mask. Does not mutate."""
        if self.rows[index] == NO_MASK:
            return None
        words = self.words[self.rows[index]].astype("<u4").view(np.uint8)
        return np.unpackbits(words, count=vocab_size, bitorder="little").astype(np.bool_)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The tokens whose logits change, by draw. `biases` and `counts` have an entry per id of `biased` and `seen`.

    `seen` are the tokens of the text to which penalties apply, and `counts` how often they occur in the output.
    """

    allowed: TokenLists  # an empty list: every token
    banned: TokenLists
    biased: TokenLists
    biases: FloatArray
    seen: TokenLists
    counts: IntArray
    masks: TokenMasks

    @classmethod
    def none(cls, num_draws: int) -> TokenRules:
        """Return the rules of draws without rules.

        >>> TokenRules.none(2).allowed.starts.tolist()
        [0, 0, 0]
        """
        lists = TokenLists(np.zeros(num_draws + 1, np.int64), np.zeros(0, np.int64))
        return cls(
            allowed=lists,
            banned=lists,
            biased=lists,
            biases=np.zeros(0, np.float32),
            seen=lists,
            counts=np.zeros(0, np.int64),
            masks=TokenMasks.none(num_draws),
        )


@dataclass(frozen=True, slots=True)
class Draws:
    """Columns of equal length, with an entry per draw.

    `parameters` has a row for each of `DRAW_PARAMETERS`, in that order. All are float32: integers are exact up to 2^24,
    and no vocabulary has more tokens.

    >>> integers = np.zeros(2, np.int64)
    >>> draws = Draws(integers, parameter_columns(2, top_k=5), integers, integers, integers, TokenRules.none(2))
    >>> draws.parameter("top_k").tolist(), draws.parameter("top_p").tolist()
    ([5.0, 5.0], [1.0, 1.0])
    """

    logit_rows: IntArray
    parameters: FloatArray  # [num_parameters, num_draws]
    seeds: IntArray
    positions: IntArray
    num_logprobs: IntArray  # how many of the likeliest tokens to report; -1: no log-probabilities
    rules: TokenRules

    def __len__(self) -> int:
        """Return the number of draws."""
        return len(self.logit_rows)

    def parameter(self, name: str) -> FloatArray:
        """Return the column of a parameter. Does not mutate."""
        column: FloatArray = self.parameters[_ROWS[name]]
        return column


@dataclass(frozen=True, slots=True)
class Choices:
    """The chosen tokens. The other columns are set only if a draw requests log-probabilities."""

    tokens: IntArray
    logprobs: NDArray[np.float64]
    ranks: IntArray  # 1: the likeliest
    top_ids: IntArray  # [num_draws, the most requested], best first
    top_logprobs: NDArray[np.float64]

    @classmethod
    def of(cls, tokens: IntArray, num_logprobs: IntArray) -> Choices:
        """Return choices with these tokens, and arrays for a sampler to fill; shares `tokens`."""
        count, most = len(tokens), max(0, int(num_logprobs.max(initial=0)))
        return cls(
            tokens=tokens,
            logprobs=np.zeros(count, np.float64),
            ranks=np.zeros(count, np.int64),
            top_ids=np.zeros((count, most), np.int64),
            top_logprobs=np.zeros((count, most), np.float64),
        )


class Sampler(Protocol):
    """Chooses tokens."""

    def sample(self, logits: Logits, draws: Draws) -> Choices:
        """Return a choice per draw; logits `[num_logits, vocab_size]` are finite. Does not mutate them."""
        ...

    def report(self, logits: Logits, logit_rows: IntArray, tokens: IntArray, num_logprobs: IntArray) -> Choices:
        """Return the log-probabilities of given tokens, one per row, as if drawn. Does not mutate."""
        ...


def parameter_columns(num_draws: int, **values: float) -> FloatArray:
    """Return the parameters of draws that all have these values; other parameters are neutral.

    >>> parameter_columns(2, temperature=0.5)[0].tolist()
    [0.5, 0.5]
    """
    if not values.keys() <= _ROWS.keys():
        raise InvariantError(f"draws have no parameter {min(values.keys() - _ROWS.keys())}")
    neutral = [values.get(name, PARAMETERS[name].default) for name in DRAW_PARAMETERS]
    return np.repeat(np.array(neutral, np.float32)[:, None], num_draws, axis=1)


def joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    """Return the arrays, joined; without arrays, an empty one."""
    return np.concatenate(parts).astype(dtype, copy=False) if parts else np.zeros(0, dtype)
