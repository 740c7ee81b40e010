"""Failpoints: faults on demand, for tests and for `quire torture`.

    error:token=17      the computation raises whenever token 17 is computed: every step with this request fails
    nan:token=17        the sequence that computes token 17 gets numbers that are not finite
    memory:tokens=64    memory runs out whenever a step computes 64 tokens or more
    error:step=3        only the third computation raises: a fault that does not recur
    sleep9:token=17     the computation takes nine seconds longer whenever token 17 is computed
    sleep0.02:tokens=1  every computation takes 20 ms longer
    kill:token=17       the process that computes is killed whenever token 17 is computed

Every effect works with every trigger; commas separate several failpoints. A trigger names tokens and not a request id,
because the engine chooses the ids. By default an engine has no failpoints. The code that builds it sets them, or the
environment variable QUIRE_FAILPOINTS; the start-up table shows them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from quire.core.errors import InvalidConfigError

FAILPOINTS_VARIABLE: Final = "QUIRE_FAILPOINTS"


@dataclass(frozen=True, slots=True)
class Failpoint:
    """A fault and its trigger.

    >>> str(Failpoint("memory", "tokens", 64))
    'memory:tokens=64'
    """

    effect: str
    trigger: str
    number: int

    def __str__(self) -> str:
        """Return the failpoint as text."""
        return f"{self.effect}:{self.trigger}={self.number}"


def parse_failpoints(text: str) -> tuple[Failpoint, ...]:
    """Return the failpoints in a text; raises `InvalidConfigError` for an invalid one. Does not mutate.

    >>> [str(failpoint) for failpoint in parse_failpoints("error:token=17, memory:tokens=64")]
    ['error:token=17', 'memory:tokens=64']
    """
    return tuple(_parse(part.strip()) for part in text.split(",")) if text.strip() else ()


def _parse(part: str) -> Failpoint:
    parts = re.fullmatch(
        r"(error|nan|memory|kill|sleep[0-9]{1,4}(?:\.[0-9]{1,3})?):(token|tokens|step)=([0-9]{1,18})", part
    )
    if parts is None:
        allowed = "EFFECT:TRIGGER=NUMBER; effects: error, nan, memory, kill, sleep9; triggers: token, tokens, step"
        raise InvalidConfigError(FAILPOINTS_VARIABLE, part, allowed)
    return Failpoint(parts[1], parts[2], int(parts[3]))
