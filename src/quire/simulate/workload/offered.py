"""Requests as they are offered: when each is due, its prompt, and how long its output will be.

A simulated model ends no text by itself, so the length of every output is known in advance and is part of the request;
the engine is not told otherwise than by `max_tokens`, as of any request.

    open loop      requests are due at times that do not depend on the engine, as those of many users
    closed loop    a request is due because another one has ended (closed_loop.py, conversations.py)

Both are a `RequestSource`, which is asked for one request at a time: nothing here grows with the length of a trace.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from quire.core.request import DEFAULT_SCOPE, CacheScope, Request
from quire.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class OfferedRequest:
    """One request of a workload. `outputs`: what its sequences say, where that is known; else it is drawn.

    >>> OfferedRequest("r", 0.5, array("i", [1, 2]), 8).request().sampling.max_tokens
    8
    """

    request_id: str
    due_s: float
    prompt: array[int]
    num_output_tokens: int
    num_sequences: int = 1
    beam_search: bool = False
    scope: CacheScope = DEFAULT_SCOPE
    priority: int = 0
    outputs: tuple[array[int], ...] = ()

    def request(self) -> Request:
        """Return the request that an engine is given."""
        sampling = SamplingParams(
            n=self.num_sequences,
            beam_search=self.beam_search,
            temperature=0.0 if self.beam_search else 1.0,
            max_tokens=self.num_output_tokens,
            ignore_eos=True,
        )
        return Request(self.request_id, self.prompt, sampling, scope=self.scope, priority=self.priority)


class RequestSource(Protocol):
    """Where the requests of a run come from."""

    def next_due_s(self) -> float | None:
        """Return when the next request is due; None while none is. Does not mutate what is offered."""
        ...

    def take(self) -> OfferedRequest:
        """Return the next request. Mutates."""
        ...

    def ended(self, request_id: str, output: array[int], now_s: float) -> None:
        """Note that the first sequence of a request ended, or that it was refused, with no output. Mutates."""
        ...


class OpenLoop:
    """Requests in the order in which they are due.

    >>> source = OpenLoop([OfferedRequest("a", 1.0, array("i", [1]), 1)])
    >>> source.next_due_s(), source.take().request_id, source.next_due_s()
    (1.0, 'a', None)
    """

    def __init__(self, requests: Iterable[OfferedRequest]) -> None:
        self._requests = iter(requests)
        self._next = next(self._requests, None)

    def next_due_s(self) -> float | None:
        """Return when the next request is due; None after the last."""
        return None if self._next is None else self._next.due_s

    def take(self) -> OfferedRequest:
        """Return the next request. Mutates."""
        if self._next is None:
            raise StopIteration("no request is left")
        taken, self._next = self._next, next(self._requests, None)
        return taken

    def ended(self, request_id: str, output: array[int], now_s: float) -> None:
        """Nothing depends on what ended."""
