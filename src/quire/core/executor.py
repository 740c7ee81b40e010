"""The seam between deciding and computing.

`EngineCore` hands an `Executor` one `StepPlan` after another and collects one `StepResult` for each, in the same
order. Several plans may be in flight. An executor may be the reference decoder, the native engine, a GPU, or the
simulator; the scheduler cannot tell them apart.

Contract, relied on by the memory manager:

- plans take effect **in the order submitted**: an earlier plan reads before a later plan writes. So a block may be
  given to another request while a step in flight still reads it;
- within a plan: moves out to the host, then copies, then moves in from the host, then the tokens' computation;
- a failure of one request is a failure entry in the result; only a failure of the whole step raises `ExecutionError`
  from `collect`. Then no token of that step, nor of the plans after it, is known; but their differences, copies and
  moves have taken effect, because requests that were not in the step rely on them. A request in one of these plans is
  described again before it is recomputed, so half-done results of a failed step are never read;
- a step that fails for lack of memory raises `OutOfMemoryError`: a smaller one may succeed. An executor that has lost
  its state raises `ExecutorLostError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.core.images import Image
from quire.core.request import CacheScope
from quire.core.step import StepPlan, StepResult

NoteLoaded = Callable[[int, int, str], None]
"""Called with the progress of loading: done and total, in bytes of "weights" or recorded "graphs"."""


class Executor(Protocol):
    """Computes plans."""

    def start(self) -> None:
        """Get ready to take plans: allocate the memory, load the weights. Mutates the executor."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; may return before it is computed. Mutates the executor."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest plan in flight and return its result, or raise as the contract says. Mutates."""
        ...

    def shutdown(self) -> None:
        """Free everything, and drop plans in flight. May be called twice."""
        ...


class ImageEncoding(Protocol):
    """Encodes the images of requests that have not started, between steps."""

    def add(self, request_id: str, images: Sequence[Image], scope: CacheScope) -> bool:
        """Encode images of a request; False: all of them are encoded. They stay so until it is dropped. Mutates."""
        ...

    def advance(self, budget_s: float) -> list[str]:
        """Work for about this long; return the requests that need not wait any more. Mutates."""
        ...

    def drop(self, request_id: str) -> None:
        """Forget a request, which has computed its images or has ended. Mutates."""
        ...
