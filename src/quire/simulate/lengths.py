"""The lengths of requests for a plan: pairs of prompt and output tokens.

    512          every length
    512±200      mean and standard deviation; also written 512+-200
    400/4K       median and 95th percentile; k means 1000 and K means 1024

Lengths of real traffic are skewed: a few are many times the median. Two figures are those of a lognormal distribution,
with prompts and outputs independent of each other. The pairs are points that cover it evenly, not random draws: the
same text always gives the same plan, without a seed. A trace is better than any distribution.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Final

from quire.core.errors import InvalidConfigError

NUM_POINTS: Final = 1000
GOLDEN: Final = (math.sqrt(5) - 1) / 2
NORMAL: Final = NormalDist()
SPREAD: Final = re.compile(r"\s*(\d+)([kK]?)\s*(?:(±|\+-|/)\s*(\d+)([kK]?)\s*)?", re.ASCII)
UNITS: Final = MappingProxyType({"": 1, "k": 1000, "K": 1024})
MAX_TOKENS: Final = 1 << 30
MAX_SAMPLE: Final = 10_000
ALLOWED: Final = "tokens such as 512 or 4K, mean and deviation (512+-200), or median and 95th percentile (400/1500)"


@dataclass(frozen=True, slots=True)
class Length:
    """The length of prompts, or of outputs: lognormal, with `location` and `scale` of the logarithm.

    >>> Length.parse("4K").quantile(0.9), Length.parse("400/1k").quantile(0.95), Length.parse("100±50").quantile(0.5)
    (4096, 1000, 89)
    """

    text: str
    location: float
    scale: float

    @classmethod
    def parse(cls, text: str, field: str = "tokens") -> Length:
        """Return the length that a text describes; raises `InvalidConfigError` that names the field."""
        match = SPREAD.fullmatch(text)
        if match is None or len(text) > 40:
            raise InvalidConfigError(field, text, ALLOWED)
        first, sign, second = int(match[1]) * UNITS[match[2]], match[3], int(match[4] or 0) * UNITS[match[5] or ""]
        if not 0 < first <= MAX_TOKENS:
            raise InvalidConfigError(field, text, f"tokens from 1 to {MAX_TOKENS}")
        if sign == "/":
            if not first <= second <= MAX_TOKENS:
                raise InvalidConfigError(field, text, f"a 95th percentile that is at least the median, {first}")
            return cls(text, math.log(first), math.log(second / first) / NORMAL.inv_cdf(0.95))
        if second > 100 * first:
            raise InvalidConfigError(field, text, f"a deviation of at most 100 times the mean, {100 * first}")
        variance = math.log(1 + (second / first) ** 2)
        return cls(text, math.log(first) - variance / 2, math.sqrt(variance))

    def quantile(self, share: float) -> int:
        """Return the length that this share of all lengths does not exceed; at least 1."""
        return min(max(1, round(math.exp(self.location + self.scale * NORMAL.inv_cdf(share)))), MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Pairs of prompt and output tokens, sorted by their sum. `num_cut`: the number that exceeded the context.

    >>> lengths = RequestLengths.of_pairs([(100, 10), (20, 30), (500, 4)], longest=300)
    >>> lengths.pairs, lengths.num_cut, lengths.total(0.5)
    (((20, 30), (100, 10), (299, 1)), 1, 110)
    """

    pairs: tuple[tuple[int, int], ...]
    num_cut: int = 0

    @classmethod
    def of_pairs(cls, pairs: Sequence[tuple[int, int]], longest: int) -> RequestLengths:
        """Return pairs cut to the longest sequence; a prompt leaves room for one token of output."""
        if not pairs:
            raise InvalidConfigError("requests", "none", "at least one: a plan needs their lengths")
        cut = [_cut(pair, longest) for pair in pairs]
        num_cut = sum(kept != pair for kept, pair in zip(cut, pairs, strict=True))
        return cls(tuple(sorted(cut, key=lambda pair: (sum(pair), pair))), num_cut)

    @classmethod
    def of_lengths(cls, prompt: Length, output: Length, longest: int) -> RequestLengths:
        """Return pairs that cover both distributions evenly: a lattice of the unit square, mapped by the quantiles."""
        pairs = []
        for index in range(NUM_POINTS):
            across, up = (index + 0.5) / NUM_POINTS, (0.5 + index * GOLDEN) % 1
            pairs.append((prompt.quantile(across), output.quantile(min(max(up, 1e-6), 1 - 1e-6))))
        return cls.of_pairs(pairs, longest)

    @property
    def mean_prompt(self) -> float:
        """The mean tokens of a prompt."""
        return sum(prompt for prompt, _ in self.pairs) / len(self.pairs)

    @property
    def mean_output(self) -> float:
        """The mean tokens of an output."""
        return sum(output for _, output in self.pairs) / len(self.pairs)

    @property
    def mean_context(self) -> float:
        """The mean tokens that a decode attends to, over all decodes: long outputs have more of them."""
        attended = sum(output * (prompt + (output + 1) / 2) for prompt, output in self.pairs)
        return attended / sum(output for _, output in self.pairs)

    def total(self, share: float) -> int:
        """Return the total of prompt and output tokens that this share of requests does not exceed."""
        return sum(self.pairs[_place(share, len(self.pairs))])

    def prompt(self, share: float) -> int:
        """Return the tokens that this share of prompts does not exceed."""
        return sorted(prompt for prompt, _ in self.pairs)[_place(share, len(self.pairs))]


def sample_pairs(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return all pairs; if there are many, a fixed uniform sample that includes the longest. Memory is bounded.

    >>> sample_pairs([(1, 2), (3, 4)])
    [(1, 2), (3, 4)]
    >>> sample = sample_pairs((length, 1) for length in range(1, 30_001))
    >>> len(sample), max(sample), 14_500 < sorted(sample)[5000][0] < 15_500
    (10000, (30000, 1), True)
    """
    rng = random.Random("lengths")
    kept: list[tuple[int, int]] = []
    longest = (0, 0)
    for index, pair in enumerate(pairs):
        longest = max(longest, pair, key=sum)
        if index < MAX_SAMPLE:
            kept.append(pair)
        elif (place := rng.randrange(index + 1)) < MAX_SAMPLE:
            kept[place] = pair
    if kept and longest not in kept:
        kept[0] = longest
    return kept


def _cut(pair: tuple[int, int], longest: int) -> tuple[int, int]:
    prompt = min(pair[0], longest - 1)
    return prompt, max(1, min(pair[1], longest - prompt))


def _place(share: float, count: int) -> int:
    """Return the index of the nearest rank."""
    return min(count - 1, max(0, math.ceil(share * count) - 1))
