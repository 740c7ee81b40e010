"""Failpoints: faults to order, for tests and for `quire torture`.

    error:token=17      the computation raises whenever token 17 is computed: a request that no step survives
    nan:token=17        the sequence that computes token 17 gets numbers that are not finite
    memory:tokens=64    memory falls short whenever a step computes 64 tokens or more
    error:step=3        the third computation raises, and no other: a fault that does not come again
    sleep9:token=17     the computation takes nine seconds longer whenever token 17 is computed

Every effect goes with every trigger; several failpoints are separated by commas. A request is told by its tokens: its
id is given by the engine, and nobody outside could name it. Nothing is armed by itself: a failpoint comes from the code
that builds an engine, or from the environment variable QUIRE_FAILPOINTS, and the start-up table says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from quire.core.errors import InvalidConfigError

FAILPOINTS_VARIABLE: Final = "QUIRE_FAILPOINTS"


@dataclass(frozen=True, slots=True)
class Failpoint:
    """What goes wrong, and when.

    >>> str(Failpoint("memory", "tokens", 64))
    'memory:tokens=64'
    """

    effect: str
    trigger: str
    number: int

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"{self.effect}:{self.trigger}={self.number}"


def parse_failpoints(text: str) -> tuple[Failpoint, ...]:
    """Return the failpoints of a text; raises `InvalidConfigError` for what is none. Does not mutate.

    >>> [str(failpoint) for failpoint in parse_failpoints("error:token=17, memory:tokens=64")]
    ['error:token=17', 'memory:tokens=64']
    """
    return tuple(_parse(part.strip()) for part in text.split(",")) if text.strip() else ()


def _parse(part: str) -> Failpoint:
    found = re.fullmatch(r"(error|nan|memory|sleep[0-9]{1,4}):(token|tokens|step)=([0-9]{1,18})", part)
    if found is None:
        allowed = "an effect (error, nan, memory, sleep9), a colon, token, tokens or step, =, a number"
        raise InvalidConfigError(FAILPOINTS_VARIABLE, part, allowed)
    return Failpoint(found[1], found[2], int(found[3]))
