"""Isolation: finds the request at fault when a step fails.

A step computes many requests at once, so its failure does not show which one is at fault. All of its requests become
*suspects* and wait again. They lose only time: committed blocks stay cached, and computing again gives the same tokens.
Then they are tried in subsets, one at a time, while all other requests wait:

    step of A B C D fails      subsets  [A B] [C D]
    A B   fails                         [C D] [A] [B]         halved, to be tried after the others
    C D   both get past the failure     [A] [B]
    A     fails, alone                  A ends with an error; no other does
    B     gets past the failure         all continue

A suspect has passed once it has computed the tokens that it had in the failed step, or has ended; then it makes room at
once. Only a request that fails *alone*, after an earlier failure, is at fault. So a failure that does not recur ends no
request: a request that was alone in the failed step is tried once more too. The sequences of a request are tried
together.

**Memory.** A step that ran out of memory is halved in the same way. In addition, later steps may compute at most half
its tokens (and run that many sequences). If a request fails even at the smallest size, the request was at fault, and
the limit is removed; otherwise the limit stays for the life of the engine.

**Requests that fail only together** all pass alone, and would meet again at once. So after each round without a
culprit, the next round runs its subsets further past the failure, twice as far each time, until they end one after the
other. Every successful step of several requests outside of a round takes one token off that distance. A step of a
single request proves nothing here: a preempted beam search computes its prompt again before it meets the other request.

**If an executor always fails**, no request is at fault: once several requests in a row have failed alone, and no step
of the round has succeeded, `is_hopeless` is true, and the engine gives up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from quire.core.errors import InvariantError
from quire.core.request import Request

MAX_CULPRITS_IN_A_ROW: Final = 8
"""Requests that may fail alone, one after another, before the executor is at fault."""

MAX_FURTHER: Final = 4095
"""The most tokens past a failure that suspects must compute."""


class FailedStep(NamedTuple):
    """A step without a result. `goals`: tokens of each sequence after that step; `num_tokens`: tokens of the step."""

    goals: dict[Request, int]
    num_tokens: int


class Isolation:
    """Tracks the suspects, and decides which of them may be planned. `max_step_tokens`: the most tokens of a step.

    >>> isolation = Isolation(512)
    >>> a, b = Request("a", [1, 2]), Request("b", [3, 4])
    >>> isolation.note_failure(FailedStep({a: 2, b: 2}, 4))
    >>> isolation.holds_back(a), isolation.holds_back(b)
    (False, True)
    >>> isolation.note_failure(FailedStep({a: 2}, 2))
    'a'
    """

    def __init__(self, max_step_tokens: int) -> None:
        self.max_step_tokens = max_step_tokens
        self.num_failed_steps = 0
        self.num_memory_failures = 0
        self.num_culprits = 0
        self._goals: dict[str, dict[int, int]] = {}  # of each suspect, by branch: tokens that it must compute to pass
        self._trial: dict[str, None] = {}  # the suspects that run now
        self._subsets: deque[list[str]] = deque()  # to be tried; some of them may have ended meanwhile
        self._usual_step_tokens = max_step_tokens  # before this round
        self._found_culprit = False  # in this round
        self._has_succeeded = False  # any step of this round
        self._culprits_in_a_row = 0
        self._further = 0  # tokens past the failure that suspects must compute

    @property
    def is_under_way(self) -> bool:
        """Whether there are suspects."""
        return bool(self._goals)

    @property
    def num_suspects(self) -> int:
        """Requests that have not passed yet."""
        return len(self._goals)

    @property
    def is_hopeless(self) -> bool:
        """Whether enough requests in a row failed alone that it cannot be their fault."""
        return self._culprits_in_a_row >= MAX_CULPRITS_IN_A_ROW

    def holds_back(self, request: Request) -> bool:
        """Return whether a waiting sequence must wait, as it is not on trial, or has passed. Does not mutate; O(1)."""
        if not self._goals:
            return False
        return request.request_id not in self._trial or request.branch not in self._goals[request.request_id]

    def has_passed(self, request: Request) -> bool:
        """Return whether a running sequence got past the failure, or was not in it. Does not mutate; O(1)."""
        return request.num_computed >= self._goals.get(request.request_id, {}).get(request.branch, 0)

    # ---- events -----------------------------------------------------------------------------------------------

    def note_success(self, requests: Sequence[Request]) -> None:
        """Note that a step of these sequences has succeeded. Mutates; O(1), or O(requests) after a round."""
        if not requests:
            return  # a plan for the disk computes nothing
        self._has_succeeded = True
        self._culprits_in_a_row = 0
        if self._further and not self._goals and len({request.request_id for request in requests}) > 1:
            self._further -= 1

    def note_failure(self, step: FailedStep, *, out_of_memory: bool = False) -> str | None:
        """Note a failed step; return the request that is at fault, once it is known. Mutates; O(requests in it).

        The caller must preempt every request of the step, freeing its row and its memory, and end the culprit.
        """
        self.num_failed_steps += 1
        self.num_memory_failures += out_of_memory
        suspects = list(dict.fromkeys(request.request_id for request in step.goals))
        if not suspects:
            return None  # all of them have ended meanwhile
        was_under_way = self.is_under_way
        if not was_under_way:
            self._begin_round(step)
        was_smaller = out_of_memory and self._shrink(step.num_tokens // 2)
        if was_under_way and len(suspects) == 1 and not was_smaller:
            self.num_culprits += 1
            self._found_culprit = True
            self._culprits_in_a_row += not self._has_succeeded
            return suspects[0]
        untried = [name for name in self._trial if name not in suspects]
        half = (len(suspects) + 1) // 2
        self._subsets += [subset for subset in (untried, suspects[:half], suspects[half:]) if subset]
        self._try_next_subset()
        return None

    def note_passed(self, request: Request) -> None:
        """Note that a sequence on trial got past the failure. Mutates; O(1)."""
        goals = self._goals.get(request.request_id)
        if goals is not None:
            goals.pop(request.branch, None)
            if not goals:
                self._let_go(request.request_id)

    def note_ended(self, request: Request) -> None:
        """Note that a sequence has ended, for any reason. Mutates; O(sequences of the request)."""
        if request.request_id not in self._goals:
            return
        self.note_passed(request)
        members = request.group.members if request.group else [request]
        if all(member.is_finished for member in members):  # a search that started again may still open beams
            self._let_go(request.request_id)

    def _begin_round(self, step: FailedStep) -> None:
        for request, goal in step.goals.items():
            self._goals.setdefault(request.request_id, {})[request.branch] = goal + self._further
        self._usual_step_tokens = self.max_step_tokens
        self._found_culprit = self._has_succeeded = False

    def _shrink(self, num_tokens: int) -> bool:
        """Let steps compute at most this many tokens; return whether they could compute more before."""
        before, self.max_step_tokens = self.max_step_tokens, max(1, min(num_tokens, self.max_step_tokens))
        return self.max_step_tokens < before

    def _let_go(self, request_id: str) -> None:
        """Clear a suspect; continue with the next subset, or end the round after the last one."""
        if self._goals.pop(request_id, None) is None:
            return
        self._trial.pop(request_id, None)
        if not self._goals:
            self._end_round()
        elif not self._trial:
            self._try_next_subset()

    def _try_next_subset(self) -> None:
        self._trial = {}
        while not self._trial:
            self._trial = dict.fromkeys(name for name in self._subsets.popleft() if name in self._goals)

    def _end_round(self) -> None:
        self._trial = {}
        self._subsets.clear()
        if self._found_culprit:
            self.max_step_tokens = self._usual_step_tokens
        else:
            self._further = min(2 * self._further + 1, MAX_FURTHER)

    def check(self, running: Sequence[Request], requests: Collection[str]) -> None:
        """Raise `InvariantError` unless every suspect is alive, on trial or in one subset, and runs only on trial."""
        names = [*self._trial, *(name for subset in self._subsets for name in subset if name in self._goals)]
        if sorted(names) != sorted(self._goals):
            raise InvariantError("a suspect is in two subsets, or in none")
        if self.is_under_way != bool(self._trial):
            raise InvariantError("there are suspects but none is on trial, or the reverse")
        if not self._goals.keys() <= set(requests) or not all(self._goals.values()):
            raise InvariantError("a suspect has ended, or has no failed step to pass")
        for request in running:
            if request.request_id in self._goals and request.request_id not in self._trial:
                raise InvariantError(f"request {request.request_id!r} runs in the same step as requests on trial")
