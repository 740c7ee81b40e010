"""Drawn workloads: arrivals, lengths and shared prefixes of prompts, from one seed.

The three have separate generators, so that another rate gets the same prompts in the same order, and a comparison of
rates compares nothing else.

Token ids are below 65,536 for any vocabulary: a token is two bytes of a generator, which makes it possible to draw
millions per second. Two drawn prompts share a block of 16 by chance with a probability of 1 in 2^256.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from quire.core.setting_checks import require_int, require_number
from quire.simulate.workload.arrivals import Arrivals
from quire.simulate.workload.lengths import Lengths
from quire.simulate.workload.offered import OfferedRequest


def draw_tokens(rng: random.Random, num_tokens: int) -> array[int]:
    """Draw token ids quickly, from the first 65,536. Mutates the generator."""
    return array("i", array("H", rng.randbytes(2 * num_tokens)))


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Prefixes that requests share: `count` of them, `num_tokens` long, in a `share` of the requests."""

    count: int = 1
    num_tokens: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        require_int("number of prefixes", self.count, 1, 1 << 20)
        require_int("prefix tokens", self.num_tokens, 0, 1 << 24)
        require_number("share of requests with a prefix", self.share, 0.0, 1.0)

    def of(self, number: int, seed: int) -> array[int]:
        """Return one of the prefixes; it is drawn each time, so that a million of them take no memory."""
        return draw_tokens(random.Random(f"prefix {seed} {number}"), self.num_tokens)


NO_PREFIXES = SharedPrefixes()


@dataclass(frozen=True, slots=True)
class DrawnPrompts:
    """Random prompts and lengths of outputs, without times. `longest` limits prompt, prefix and output together."""

    lengths: Lengths
    longest: int = 2048
    prefixes: SharedPrefixes = NO_PREFIXES
    num_sequences: int = 1
    beam_search: bool = False

    def __post_init__(self) -> None:
        require_int("longest", self.longest, 2 + self.prefixes.num_tokens, 1 << 30)
        require_int("num_sequences", self.num_sequences, 1, 1 << 10)

    def draw(self, seed: int) -> Iterator[tuple[array[int], int]]:
        """Yield endless prompts with lengths of outputs; the same seed gives the same ones.

        >>> from quire.simulate.workload.lengths import FixedLengths
        >>> requests = DrawnPrompts(FixedLengths(3, 5), prefixes=SharedPrefixes(1, 4)).draw(seed=1)
        >>> (first, output), (second, _) = itertools.islice(requests, 2)
        >>> len(first), output, first[:4] == second[:4], first == second
        (7, 5, True, False)
        """
        rng, texts = random.Random(f"lengths {seed}"), random.Random(f"texts {seed}")
        prefixes = self.prefixes
        while True:
            prompt, output = self.lengths.draw(rng, self.longest - prefixes.num_tokens)
            tokens = draw_tokens(texts, prompt)
            if prefixes.num_tokens and rng.random() < prefixes.share:
                tokens = prefixes.of(rng.randrange(prefixes.count), seed) + tokens
            yield tokens, output

    def offer(self, request_id: str, due_s: float, prompt: array[int], num_output_tokens: int) -> OfferedRequest:
        """Return a request with a drawn prompt and length of output."""
        return OfferedRequest(request_id, due_s, prompt, num_output_tokens, self.num_sequences, self.beam_search)


def drawn_requests(
    arrivals: Arrivals, prompts: DrawnPrompts, *, duration_s: float, seed: int, limit: int | None = None
) -> Iterator[OfferedRequest]:
    """Yield the requests that are due within `duration_s`, at most `limit`, in the order of their times."""
    times = itertools.takewhile(lambda time_s: time_s < duration_s, arrivals.times(seed))
    for number, (due_s, (prompt, output)) in enumerate(zip(times, prompts.draw(seed), strict=False)):
        if number == limit:
            return
        yield prompts.offer(f"r{number}", due_s, prompt, output)
