"""Lengths of prompts and outputs: fixed, uniform, or log-normal with the published means of a trace.

The paper (Kwon et al. 2023, figure 11) prints the mean lengths of its two traces, in tokens of OPT:

    ShareGPT    prompts 161.31    outputs 337.99
    Alpaca      prompts  19.31    outputs  58.45

It prints no spread. Lengths of texts are close to log-normal, and `SPREAD`, the standard deviation of their logarithm,
is our assumption for both: reports of figures that use it must state it, and show the effect of another spread.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.core.setting_checks import require_int, require_number
from quire.simulate.lengths import Length

SPREAD = 0.7
MAX_DRAWS = 64


class Lengths(Protocol):
    """Draws the lengths of requests."""

    def draw(self, rng: random.Random, longest: int) -> tuple[int, int]:
        """Return the tokens of a prompt and of an output, at most `longest` together. Mutates the generator."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """The same lengths for every request.

    >>> FixedLengths(128, 64).draw(random.Random(0), longest=1024)
    (128, 64)
    """

    prompt: int
    output: int

    def __post_init__(self) -> None:
        require_int("prompt tokens", self.prompt, 1, 1 << 30)
        require_int("output tokens", self.output, 1, 1 << 30)

    def draw(self, rng: random.Random, longest: int) -> tuple[int, int]:
        """Return the lengths, with the output cut to fit."""
        prompt = min(self.prompt, longest - 1)
        return prompt, min(self.output, longest - prompt)


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Uniform lengths of prompts and outputs, each from `least` to `most`, inclusive.

    >>> UniformLengths((10, 10), (5, 5)).draw(random.Random(0), longest=1024)
    (10, 5)
    """

    prompt: tuple[int, int]
    output: tuple[int, int]

    def __post_init__(self) -> None:
        for name, (least, most) in (("prompt tokens", self.prompt), ("output tokens", self.output)):
            require_int(f"least {name}", least, 1, 1 << 30)
            require_int(f"most {name}", most, least, 1 << 30)

    def draw(self, rng: random.Random, longest: int) -> tuple[int, int]:
        """Return the lengths, cut to fit."""
        prompt = min(rng.randint(*self.prompt), longest - 1)
        return prompt, min(rng.randint(*self.output), longest - prompt)


@dataclass(frozen=True, slots=True)
class LognormalLengths:
    """Log-normal lengths with these means; `spread` is the standard deviation of the logarithm.

    Lengths that do not fit are drawn again, like requests from a trace, which are usually left out if they do not fit.
    So the means are a little lower if they are close to `longest`.

    >>> prompts = [LognormalLengths("", 100.0, 50.0).draw(random.Random(seed), 1024)[0] for seed in range(400)]
    >>> 90 < sum(prompts) / 400 < 110
    True
    """

    name: str
    prompt: float
    output: float
    spread: float = SPREAD

    def __post_init__(self) -> None:
        require_number("mean of prompt tokens", self.prompt, 1.0, 1e9)
        require_number("mean of output tokens", self.output, 1.0, 1e9)
        require_number("spread", self.spread, 0.0, 3.0)

    def draw(self, rng: random.Random, longest: int) -> tuple[int, int]:
        """Return lengths that are together at most `longest`."""
        locations = (math.log(mean) - self.spread**2 / 2 for mean in (self.prompt, self.output))
        return _draw_fitting(rng, longest, [(location, self.spread) for location in locations])


@dataclass(frozen=True, slots=True)
class SaidLengths:
    """Lengths in a user's notation: `512`, `512±200`, `400/1500`; see `quire.simulate.lengths`.

    >>> SaidLengths(Length.parse("512"), Length.parse("64")).draw(random.Random(0), longest=1024)
    (512, 64)
    """

    prompt: Length
    output: Length

    def draw(self, rng: random.Random, longest: int) -> tuple[int, int]:
        """Return lengths that are together at most `longest`."""
        return _draw_fitting(rng, longest, [(length.location, length.scale) for length in (self.prompt, self.output)])


def _draw_fitting(rng: random.Random, longest: int, parts: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Draw lengths of a prompt and an output by location and scale, until they fit; after many failures, cut them."""
    for _ in range(MAX_DRAWS):
        prompt, output = (max(1, round(rng.lognormvariate(location, scale))) for location, scale in parts)
        if prompt + output <= longest:
            break
    prompt = min(prompt, longest - 1)
    return prompt, min(output, longest - prompt)


SHAREGPT = LognormalLengths("ShareGPT", 161.31, 337.99)
ALPACA = LognormalLengths("Alpaca", 19.31, 58.45)
