"""The requests of a workload: when each is due, its prompt, and the length of its output.

A simulated model never ends a text, so the length of every output is part of the request; the engine gets it as
`max_tokens`, as for any request.

    open loop      requests are due at times that do not depend on the engine, like those of many users
    closed loop    a request is due because another one has ended (closed_loop.py, conversations.py)

Both are a `RequestSource`, which returns one request at a time: memory does not grow with the length of a trace.
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
    """One request of a workload. `outputs`: the tokens of its sequences, if known; else they are drawn.

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
        """Return the request for an engine."""
        sampling = SamplingParams(
            n=self.num_sequences,
            beam_search=self.beam_search,
            temperature=0.0 if self.beam_search else 1.0,
            max_tokens=self.num_output_tokens,
            ignore_eos=True,
        )
        return Request(self.request_id, self.prompt, sampling, scope=self.scope, priority=self.priority)


class RequestSource(Protocol):
    """The source of the requests of a run."""

    def next_due_s(self) -> float | None:
        """Return when the next request is due; None while none is. Does not change the requests."""
        ...

    def take(self) -> OfferedRequest:
        """Return the next request. Mutates."""
        ...

    def ended(self, request_id: str, output: array[int], now_s: float) -> None:
        """Note that a request's first sequence has ended, or that it was refused, with an empty output. Mutates."""
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
        """Return when the next request is due; None after the last one."""
        return None if self._next is None else self._next.due_s

    def take(self) -> OfferedRequest:
        """Return the next request. Mutates."""
        if self._next is None:
            raise StopIteration("no request is left")
        taken, self._next = self._next, next(self._requests, None)
        return taken

    def ended(self, request_id: str, output: array[int], now_s: float) -> None:
        """Do nothing: later requests do not depend on it."""
