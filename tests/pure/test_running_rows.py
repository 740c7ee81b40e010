"""RunningSet as a worker sees it: the differences, however often they are asked for, add up to who runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.request import Request, RequestGroup
from quire.core.sampling_params import SamplingParams
from quire.scheduler.policy.fcfs import FCFSPolicy
from quire.scheduler.running import RunningSet, num_rows_of

NUM_ROWS = 6
ACTIONS = ("start", "open", "leave", "replace", "tell")


@dataclass
class Worker:
    """The rows of the other plane, which is told of nothing but differences."""

    rows: dict[int, Request] = field(default_factory=dict)

    def apply(self, running: RunningSet) -> None:
        starting, released = running.take_differences()
        assert len(set(released)) == len(released), "a row is released once"
        for row in released:
            del self.rows[row]
        for request in starting:
            assert request.row not in self.rows, "a row is free before it is taken"
            self.rows[request.row] = request


def waiting(serial: int, num_sequences: int) -> Request:
    request = Request(f"r{serial}", [1, 2], SamplingParams(n=num_sequences))
    request.serial = serial
    request.group = RequestGroup(request) if num_sequences > 1 else None
    return request


@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 9), st.integers(1, 3)), max_size=40))
def test_a_worker_knows_the_rows_from_their_differences_alone(actions: list[tuple[str, int, int]]) -> None:
    running, worker, serials = RunningSet(NUM_ROWS, FCFSPolicy()), Worker(), count()
    model: dict[tuple[int, int], tuple[Request, int]] = {}  # who runs, and how many rows are promised to it
    for action, number, num_sequences in actions:
        chosen = list(model.values())[number % len(model)] if model else None
        if action == "start":
            request = waiting(next(serials), num_sequences)
            short = running.num_rows_short(request, NUM_ROWS)
            assert short == running.num_rows_short(request, 9 * NUM_ROWS), "no more may run than there are rows"
            taken = sum(1 + promised for _, promised in model.values())
            assert short == max(0, num_sequences - (NUM_ROWS - taken))
            if not short:
                running.start(request)
                model[request.serial, 0] = request, num_sequences - 1
        elif action == "leave" and chosen is not None:
            running.leave(chosen[0])
            assert chosen[0].row == -1
            del model[chosen[0].serial, chosen[0].branch]
        elif action == "open" and chosen is not None and chosen[1]:
            leader = chosen[0]
            for branch in range(1, chosen[1] + 1):
                sibling = leader.open_branch(branch)
                running.start_opened(sibling)
                model[leader.serial, branch] = sibling, 0
            assert leader.group is not None
            leader.group.opened, model[leader.serial, 0] = True, (leader, 0)
        elif action == "replace" and chosen is not None and not chosen[1]:
            other = chosen[0].open_branch(chosen[0].branch)
            row = chosen[0].row
            running.replace(chosen[0], other)
            assert (other.row, chosen[0].row) == (row, -1)
            model[other.serial, other.branch] = other, 0
        elif action == "tell":
            worker.apply(running)
            assert worker.rows == {request.row: request for request, _ in model.values()}
        running.check(NUM_ROWS)
        assert running.requests == [model[key][0] for key in sorted(model)]
        assert len({request.row for request, _ in model.values()}) == len(model)
        assert all(num_rows_of(request) == 1 + promised for request, promised in model.values())
    worker.apply(running)
    assert worker.rows == {request.row: request for request, _ in model.values()}


@pytest.mark.parametrize(("most", "short"), [(6, 0), (4, 0), (3, 1), (1, 3)])
def test_no_more_run_than_may_and_the_promised_ones_count(most: int, short: int) -> None:
    running = RunningSet(NUM_ROWS, FCFSPolicy())
    assert running.num_rows_short(waiting(0, 3), 1) == 0, "one alone may run whatever the bound is"
    assert running.num_rows_short(waiting(0, 7), 9) == 1, "but not on rows that there are not"
    running.start(waiting(1, 2))
    assert running.num_rows_short(waiting(2, 2), most) == short
