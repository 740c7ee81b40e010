"""The parts of the scheduler, one by one, against plain models: queue, rows, ends, plans, journal."""

from __future__ import annotations

from array import array
from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import given

from quire.core.errors import InvariantError
from quire.core.request import FinishReason, Request, RequestGroup, RequestStatus
from quire.core.sampling_params import SamplingParams
from quire.core.step import MAX_PROMPT_LOGITS, NO_BLOCK
from quire.memory.changes import MemoryChanges
from quire.scheduler.commit import note_prompt
from quire.scheduler.groups import is_beam, moving_together, open_group
from quire.scheduler.journal import EventKind, RequestJournal
from quire.scheduler.plan_builder import PlanBuilder, row_start
from quire.scheduler.policy.fcfs import FCFSPolicy
from quire.scheduler.queue import OrderedQueue
from quire.scheduler.running import RunningSet, num_rows_of
from quire.scheduler.stopping import Stopping
from support.control import Control


def request(serial: int, *, length: int = 3, group: bool = False, **sampling: object) -> Request:
    made = Request(f"r{serial}", range(1, length + 1), SamplingParams(**sampling))  # type: ignore[arg-type]
    made.serial = serial
    made.max_total_tokens = length + 100
    if group:
        made.group = RequestGroup(made)
    return made


# ---- the queue ------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "replace"]), st.integers(0, 12))))
def test_a_queue_is_a_sorted_list(actions: list[tuple[str, int]]) -> None:
    queue = OrderedQueue(FCFSPolicy().order_key)
    model: dict[int, Request] = {}
    for action, serial in actions:
        if action == "add" and serial not in model:
            model[serial] = request(serial)
            queue.add(model[serial])
        elif action == "remove" and serial in model:
            queue.remove(model.pop(serial))
        elif action == "replace" and serial in model:
            before, model[serial] = model[serial], request(serial)
            queue.replace(before, model[serial])
        queue.check()
        assert list(queue.in_turn()) == [model[serial] for serial in sorted(model)]
        assert len(queue) == len(model)


def test_a_queue_refuses_what_would_break_it() -> None:
    queue = OrderedQueue(FCFSPolicy().order_key)
    first, second, third = request(1), request(2), request(3)
    for stranger in (first, second):
        with pytest.raises(InvariantError, match="is not in the queue"):
            queue.remove(stranger)
        with pytest.raises(InvariantError, match="cannot take that place"):
            queue.replace(stranger, request(stranger.serial))
    queue.add(first)
    queue.add(third)
    with pytest.raises(InvariantError, match=r"two requests have the order key \(0.0, 3, 0\)"):
        queue.add(request(3))
    for stranger in (second, request(1), request(4)):
        with pytest.raises(InvariantError, match="is not in the queue"):
            queue.remove(stranger)
    with pytest.raises(InvariantError, match="'r2' cannot take that place"):
        queue.replace(first, second)
    with pytest.raises(InvariantError, match="cannot take that place"):
        queue.replace(request(1), request(1))
    assert list(queue.in_turn()) == [first, third]
    queue.check()


def test_a_queue_notices_that_it_is_out_of_order() -> None:
    for mess in ("swap", "rename", "twice"):
        queue = OrderedQueue(FCFSPolicy().order_key)
        waiting = [request(serial) for serial in (1, 2)]
        for one in waiting:
            queue.add(one)
        if mess == "swap":
            queue._keys.reverse()
            queue.requests.reverse()
        elif mess == "rename":
            waiting[1].serial = 7
        else:
            queue._keys.append(queue._keys[1])
            queue.requests.append(waiting[1])
        with pytest.raises(InvariantError, match="out of order"):
            queue.check()


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_the_lowest_row_is_taken_first_and_the_row_released_last_is_taken_next() -> None:
    running = RunningSet(4, FCFSPolicy())
    requests = [request(serial) for serial in range(4)]
    for one in requests:
        running.start(one)
    assert [one.row for one in requests] == [0, 1, 2, 3]
    assert running.take_differences() == (requests, array("i"))
    running.leave(requests[2])
    running.leave(requests[0])
    assert (requests[0].row, requests[2].row) == (-1, -1)
    late = request(9)
    running.start(late)
    assert late.row == 0
    assert running.take_differences() == ([late], array("i", [2, 0]))
    assert running.take_differences() == ([], array("i"))
    assert running.requests == [requests[1], requests[3], late]
    running.check(4)


def test_a_row_that_no_plan_has_named_is_not_released_either() -> None:
    running = RunningSet(2, FCFSPolicy())
    one, other = request(0), request(1)
    running.start(one)
    running.start(other)
    running.leave(one)
    assert running.take_differences() == ([other], array("i"))
    running.leave(other)
    assert running.take_differences() == ([], array("i", [1]))


def test_who_replaces_another_has_its_place_and_row() -> None:
    running = RunningSet(3, FCFSPolicy())
    first, second = request(0), request(1)
    running.start(first)
    running.start(second)
    running.take_differences()
    new = first.open_branch(0)
    running.replace(first, new)
    assert (new.row, first.row, running.requests) == (0, -1, [new, second])
    assert running.take_differences() == ([new], array("i", [0]))
    running.check(3)


def test_a_group_is_promised_the_rows_that_it_will_open() -> None:
    running = RunningSet(8, FCFSPolicy())
    group, single = request(0, group=True, n=4), request(1)
    assert (num_rows_of(group), num_rows_of(single)) == (4, 1)
    running.start(group)
    running.check(8)
    running.start(single)
    # 2 rows hold somebody, 3 are promised, 3 are left; at most `most` may run.
    assert [running.num_rows_short(request(2, group=True, n=n), 8) for n in (2, 3, 4, 5)] == [0, 0, 1, 2]
    assert [running.num_rows_short(request(2, group=True, n=3), most) for most in (4, 5, 6, 7, 8)] == [4, 3, 2, 1, 0]
    siblings = []
    for branch in (1, 2, 3):
        siblings.append(group.open_branch(branch))
        running.start_opened(siblings[-1])
    assert group.group is not None
    group.group.opened = True
    running.check(8)
    assert [one.row for one in running.requests] == [0, 2, 3, 4, 1]
    assert running.num_rows_short(request(2), 5) == 1
    assert running.num_rows_short(request(2), 6) == 0
    for one in (group, *siblings, single):
        running.leave(one)
    running.check(8)


def test_a_promise_goes_with_the_group_that_it_was_made_to() -> None:
    running = RunningSet(4, FCFSPolicy())
    group = request(0, group=True, n=4)
    running.start(group)
    assert running.num_rows_short(request(1), 4) == 1
    running.leave(group)
    running.check(4)
    assert running.num_rows_short(request(1, group=True, n=4), 4) == 0


def test_where_nobody_runs_a_group_may_have_more_rows_than_may_run() -> None:
    running = RunningSet(4, FCFSPolicy())
    group = request(0, group=True, n=4)
    assert running.num_rows_short(group, 2) == 0
    assert running.num_rows_short(request(0, group=True, n=5), 2) == 1
    running.start(request(1))
    assert running.num_rows_short(group, 2) == 3


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_rows_are_held_once_or_free_once(actions: list[tuple[bool, int]]) -> None:
    running, model = RunningSet(5, FCFSPolicy()), {}
    known: dict[int, int] = {}  # what the plans have told of rows
    for starts, serial in actions:
        if starts and serial not in model and running.num_rows_short(request(99), 5) == 0:
            model[serial] = request(serial)
            running.start(model[serial])
        elif not starts and serial in model:
            running.leave(model.pop(serial))
        if serial % 3 == 0:
            starting, released = running.take_differences()
            for row in released:
                del known[row]
            for one in starting:
                assert one.row not in known, "a row is released before it is taken again"
                known[one.row] = one.serial
            assert known == {one.row: one.serial for one in model.values()}
        running.check(5)
        assert [one.serial for one in running.requests] == sorted(model)
        assert running.num_rows_short(request(99), 5) == (len(model) == 5)


def test_rows_that_are_lost_or_promised_to_nobody_are_noticed() -> None:
    def running() -> RunningSet:
        made = RunningSet(4, FCFSPolicy())
        made.start(request(0, group=True, n=3))
        made.check(4)
        return made

    for mess, message in (
        (lambda rows: rows._free_rows.pop(), "held twice, or lost"),
        (lambda rows: rows._free_rows.append(0), "held twice, or lost"),
        (lambda rows: setattr(rows.requests[0], "row", 3), "held twice, or lost"),
        (lambda rows: setattr(rows, "_promised_rows", 1), "reserved for no request"),
        (lambda rows: setattr(rows, "_promised_rows", 3), "reserved for no request"),
        (lambda rows: rows._queue._keys.reverse() or rows._queue._keys.clear(), "out of order"),
    ):
        broken = running()
        mess(broken)
        with pytest.raises(InvariantError, match=message):
            broken.check(4)
    with pytest.raises(InvariantError, match="held twice, or lost"):
        running().check(5)
    over = RunningSet(2, FCFSPolicy())
    over.start(request(0, group=True, n=4))
    with pytest.raises(InvariantError, match="more rows are reserved than are free"):
        over.check(2)


# ---- ends -----------------------------------------------------------------------------------------------------------


@given(
    prompt=st.integers(1, 9),
    longest=st.integers(1, 12),
    min_tokens=st.integers(0, 6),
    block_size=st.integers(1, 5),
    texts=st.lists(st.sampled_from([5, 6, 7]), min_size=12, max_size=12),
)
def test_a_request_is_looked_at_wherever_it_may_end(
    prompt: int, longest: int, min_tokens: int, block_size: int, texts: list[int]
) -> None:
    """The hot path asks only at `next_event` and at `stop_ids`: that must find every end and every full block."""
    one = request(0, length=prompt, min_tokens=min_tokens, stop_token_ids=(6,))
    one.max_total_tokens = prompt + longest
    stopping = Stopping(frozenset({7}), block_size)
    one.num_computed = prompt - 1
    stopping.arm(one)
    for number, token in enumerate(texts, start=1):
        one.tokens.append(token)
        one.num_computed += 1
        ends_by_token = token in (6, 7) and number >= max(1, min_tokens)
        expected = FinishReason.STOP if ends_by_token else FinishReason.LENGTH if number == longest else None
        is_full = one.num_computed % block_size == 0
        looked_at = one.num_computed >= one.next_event or token in one.stop_ids
        assert looked_at or (expected is None and not is_full)
        if looked_at:
            assert stopping.reason(one) is expected
            stopping.arm(one)
        if expected:
            return


def test_nothing_is_looked_at_between_the_borders_of_blocks() -> None:
    one = request(0, length=5)
    stopping = Stopping(frozenset({7}), 16)
    one.num_computed = 5
    stopping.arm(one)
    assert (one.next_event, one.stop_ids) == (16, {7})
    one.num_computed = 16
    stopping.arm(one)
    assert one.next_event == 32
    one.max_total_tokens = 30
    stopping.arm(one)
    assert one.next_event == 29
    late = request(1, length=5, min_tokens=4)
    late.num_computed, late.stop_ids = 4, frozenset({7})
    stopping.arm(late)
    assert (late.next_event, late.stop_ids) == (7, frozenset())


def test_no_token_ends_a_beam() -> None:
    one = request(0, group=True, n=2, beam_search=True, temperature=0.0)
    one.stop_ids = frozenset({7})
    Stopping(frozenset({7}), 16).arm(one)
    assert one.stop_ids == frozenset()


def test_why_a_text_of_a_search_ended() -> None:
    stopping = Stopping(frozenset({7}), 16)
    one = request(0, stop_token_ids=(9,))
    reasons = [stopping.reason_of_text(one, ids) for ids in ([1, 7], [7, 1], [9], [1, 9], [8])]
    assert reasons == [
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.STOP,
        FinishReason.STOP,
        FinishReason.LENGTH,
    ]
    assert stopping.reason_of_text(request(1, ignore_eos=True), [7]) is FinishReason.LENGTH


def test_the_last_token_of_a_prompt_ends_nothing() -> None:
    stopping, one = Stopping(frozenset({3}), 16), request(0)
    stopping.arm(one)
    assert one.tokens[-1] in one.stop_ids
    assert stopping.reason(one) is None


# ---- plans ----------------------------------------------------------------------------------------------------------


def at(one: Request, row: int, num_planned: int) -> Request:
    one.row, one.num_planned = row, num_planned
    return one


def test_a_plan_has_its_decodes_first() -> None:
    step = PlanBuilder(20)
    prompt, drafting = at(request(1, length=9), 4, 2), at(request(2), 5, 7)
    for serial, row in ((3, 6), (4, 2)):
        step.decodes.append(at(request(serial), row, 10 + row))
        step.decode_starts.append(10 + row)
    assert step.num_tokens_left == 18
    step.add_chunk(prompt, 7, 1, array("i"))
    step.add_chunk(drafting, 3, 1, array("i", [8, 9]))
    assert step.num_tokens_left == 8
    record = step.record(41)
    assert (record.step_id, record.num_tokens, record.requests) == (41, 12, [*step.decodes, prompt, drafting])
    gone = request(8)
    changes = MemoryChanges([(prompt, 0, 1, 30), (gone, 0, 0, 31), (step.decodes[1], 1, 2, NO_BLOCK)])
    record.depths = {2: 3}
    plan = step.plan(record, changes, [prompt], array("i", [3]), {6: 4})
    assert (plan.step_id, plan.num_decodes, plan.proposals, plan.depths) == (41, 2, {6: 4}, {2: 3})
    assert list(plan.rows) == [6, 2, 4, 5]
    assert list(plan.starts) == [16, 12, 2, 7]
    assert list(plan.counts) == [1, 1, 7, 3]
    assert list(plan.samples) == [1, 1, 1, 1]
    assert {row: list(tokens) for row, tokens in plan.drafts.items()} == {5: [8, 9]}
    assert plan.row_starts == (row_start(prompt),)
    assert list(plan.released_rows) == [3]
    tables = plan.tables
    told = zip(tables.rows, tables.groups, tables.indices, tables.blocks, strict=True)
    assert list(told) == [(4, 0, 1, 30), (2, 1, 2, NO_BLOCK)], "who holds no row any more is told nothing"


def test_a_record_keeps_the_generation_in_which_an_entry_was_planned() -> None:
    step = PlanBuilder(20)
    plain, prompt = at(request(1), 0, 3), at(request(2), 1, 0)
    step.decodes.append(plain)
    step.decode_starts.append(3)
    step.add_chunk(prompt, 3, 0, array("i"))
    record = step.record(0)
    record.generations[plain] = 0
    plain.generation = prompt.generation = 5
    decode, chunk = record.as_chunks()
    assert (decode.request, decode.row, decode.start, decode.num_tokens, decode.samples) == (plain, 0, -1, 1, 1)
    assert (decode.generation, chunk.generation, chunk.start) == (0, 0, 0)
    record.generations.clear()
    assert record.as_chunks()[0].generation == 5


def test_prompts_share_what_their_tenant_has() -> None:
    step, one = PlanBuilder(50, Counter({"": 5})), at(request(1, length=30), 0, 0)
    assert [step.within_share(one, count) for count in (1, 5, 6, 7, 20)] == [1, 5, 6, 6, 6]
    step.add_chunk(one, 4, 0, array("i"))
    assert step.within_share(one, 20) == 3
    step.add_chunk(one, 6, 0, array("i"))
    assert step.within_share(one, 20) == 1, "the last token of a prompt is a request's own"
    assert PlanBuilder(50).within_share(one, 20) == 20


@given(st.lists(st.tuples(st.integers(1, 2000), st.booleans()), max_size=12))
def test_a_step_never_has_more_logits_of_prompts_than_it_may(prompts: list[tuple[int, bool]]) -> None:
    step, num_left = PlanBuilder(1 << 20), MAX_PROMPT_LOGITS
    for serial, (length, wants) in enumerate(prompts):
        one = at(request(serial, length=length, prompt_logprobs=0 if wants else None), serial, 0)
        wanted = one.num_prompt_logits_wanted
        count = step.most_tokens(one, 0, length)
        assert count == (length if wanted <= num_left else min(length, num_left))
        if count:
            step.add_chunk(one, count, 0, array("i"))
            num_left -= min(count, wanted)
        assert num_left >= 0


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_beams_move_together_once_they_are_open() -> None:
    beams = request(0, group=True, n=3, beam_search=True, temperature=0.0)
    samples, plain = request(1, group=True, n=3), request(2)
    for one in (beams, samples, plain):
        assert not is_beam(one)
        assert moving_together(one) == [one]
    for one in (beams, samples):
        assert one.group is not None
        one.group.members += [one.open_branch(1), one.open_branch(2)]
        one.group.opened = True
    assert (is_beam(beams), is_beam(samples), moving_together(samples)) == (True, False, [samples])
    assert beams.group is not None
    ended = beams.group.members[1]
    ended.status = RequestStatus.FINISHED
    assert moving_together(beams) == [beams, beams.group.members[2]]


def test_only_a_group_can_open() -> None:
    control = Control()
    with pytest.raises(InvariantError, match="'r0' is not in a group"):
        open_group(request(0), control.memory, RunningSet(2, FCFSPolicy()))


def test_a_prompt_is_reported_in_order() -> None:
    one = request(0)
    note_prompt(one, 0, ("a", "b"))  # type: ignore[arg-type]
    note_prompt(one, 2, ("c",))  # type: ignore[arg-type]
    note_prompt(one, 1, ("B", "C"))  # type: ignore[arg-type]
    assert one.prompt_logprobs == ["a", "B", "C"]
    with pytest.raises(InvariantError, match="the prompt log-probabilities before 4 are missing"):
        note_prompt(one, 4, ())


# ---- the journal ----------------------------------------------------------------------------------------------------


def test_a_journal_tells_each_event_once_and_in_order() -> None:
    first, second = request(0, length=5), request(1)
    journal = RequestJournal([first])
    assert journal.has_news
    assert journal.take_changed() == [first]
    assert (journal.has_news, journal.take_events(), journal.take_changed()) == (False, [], [])
    journal.note_waiting(second)
    assert journal.has_news
    assert (journal.take_events(), journal.take_changed(), journal.has_news) == ([], [second], False)
    journal.note_admitted(first)
    journal.note_preempted(first, 4)
    first.tokens.extend([1, 2])
    for one, reason in zip((first, second, first, second), FinishReason, strict=True):
        journal.note_ended(one, reason)
    assert [tuple(event) for event in journal.take_events()] == [
        (EventKind.ADMITTED, first, 5),
        (EventKind.PREEMPTED, first, 4),
        (EventKind.FINISHED, first, 2),
        (EventKind.FINISHED, second, 0),
        (EventKind.ABORTED, first, 2),
        (EventKind.FAILED, second, 0),
    ]
    assert journal.has_news, "who changed is not taken yet"
    assert journal.take_changed() == [first, second]
    assert not journal.has_news


def test_the_numbers_of_events_are_those_that_pages_know() -> None:
    kinds = ["ADMITTED", "FINISHED", "ABORTED", "FAILED", "PREEMPTED", "EVICTED"]
    assert [(kind.name, kind.value) for kind in EventKind] == list(zip(kinds, range(6), strict=True))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_watched_scheduler_notes_everything_that_becomes_of_a_request(preemption: str) -> None:
    control = Control(num_blocks=6, num_host_blocks=8, preemption=preemption)
    before = control.add("before", [1, 2, 3], max_tokens=2)
    journal = control.scheduler.watch()
    assert journal.take_changed() == [before]
    control.run()
    kinds = [(event.kind, event.number) for event in journal.take_events()]
    assert kinds == [(EventKind.ADMITTED, 3), (EventKind.FINISHED, 2)]
    crowd = [control.add(f"r{number}", [number] * 7, max_tokens=9) for number in range(3)]
    assert journal.take_changed() == [before, *crowd]
    control.run()
    events = journal.take_events()
    counts = Counter(event.kind for event in events)
    assert counts[EventKind.FINISHED] == 3
    assert counts[EventKind.PREEMPTED] == control.scheduler.num_preemptions > 0
    assert counts[EventKind.ADMITTED] == 3 + counts[EventKind.PREEMPTED]
    assert sum(one.num_preemptions for one in crowd) == counts[EventKind.PREEMPTED]
    control.scheduler.unwatch()
    control.add("after", [1], max_tokens=1)
    control.run()
    assert not journal.has_news or journal.take_events() == []
