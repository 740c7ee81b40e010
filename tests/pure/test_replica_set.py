"""A set of engines whose connections lose, double, delay and tear, and which die: no text is lost, and none changes."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from array import array
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import ExecutionError
from quire.core.request import FinishReason
from quire.core.sampling_params import SamplingParams
from quire.engine.client import SequenceUpdate
from quire.engine.commands import Abort, Add, Clear, Fail, Stop, Survey
from quire.engine.process.heartbeat import BEAT_S
from quire.engine.records.stats import ModelState
from quire.engine.replicas import replica as replica_module
from quire.engine.replicas import replica_set as replica_set_module
from quire.engine.replicas import rolling
from quire.engine.replicas.parts import Part, TrackedRequest
from quire.engine.replicas.replica import Replica
from quire.engine.replicas.replica_set import AT_FAULT, GIVEN_UP, MOST_WAIT_S
from quire.engine.replicas.suspects import Suspects
from support.fake_engines import POISON, VOCAB, FakeEngine, Fleet
from support.shadow import expected_search, expected_tokens
from support.waiting import run


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine is started again without a delay."""
    monkeypatch.setattr(replica_module, "FIRST_RESTART_S", 0.0)
    monkeypatch.setattr(rolling, "LOOK_S", 0.0)


def add(name: str, prompt: list[int], max_tokens: int = 8, **more: Any) -> Add:
    return Add(name, array("i", prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=5, **more))


def require_whole(fleet: Fleet, *requests: Add) -> None:
    """Fail unless each request has all the tokens that it would have had in one engine."""
    for request in requests:
        prompt, sampling = request.prompt_token_ids.tolist(), request.sampling
        for branch in range(sampling.num_sequences):
            place = request.request_id, branch
            expected = expected_tokens(prompt, sampling.max_tokens or 0, VOCAB, branch=branch)
            if sampling.num_beams > 1:
                expected = expected_search(prompt, sampling.num_beams, sampling.max_tokens or 0, VOCAB)[0][branch]
            assert fleet.reader.tokens[place] == expected, place
            assert fleet.reader.ends[place].finish_reason is FinishReason.LENGTH


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 12), st.integers(1, 3), st.booleans()),
        st.tuples(st.just("step"), st.integers(0, 2), st.sampled_from(["", "", "", "late", "doubled"])),
        st.tuples(st.just("break"), st.integers(0, 2), st.sampled_from(["killed", "lost", "torn"])),
        st.tuples(st.sampled_from(["abort", "stop"]), st.integers(0, 5)),
    ),
    max_size=16,
)


@settings(deadline=None)
@given(ACTIONS, st.integers(1, 3))
def test_whatever_becomes_of_engines_each_text_is_whole(actions: list[Any], num_replicas: int) -> None:
    async def test() -> None:
        async with Fleet(num_replicas) as fleet:
            added: dict[str, Add] = {}
            left: set[str] = set()
            num_broken = 0
            for action in actions:
                match action:
                    case ("add", length, max_tokens, n, is_search):
                        more = {"best_of": n + 1, "beam_search": True, "temperature": 0.0} if is_search else {"n": n}
                        name = f"r{len(added)}"
                        added[name] = add(name, list(range(100, 100 + length)), max_tokens, **more)
                        fleet.set.send(added[name])
                    case ("step", index, fault):
                        await fleet.step(index % num_replicas, fault=fault)
                    case ("break", index, how) if num_broken < 2:  # nobody is alone at a third death
                        num_broken += 1
                        engine = fleet.engine(index % num_replicas)
                        if how == "killed":
                            engine.kill()
                        else:
                            engine.step(how)
                            engine.step()
                    case ("abort" | "stop" as verb, index):
                        name = f"r{index}"
                        left.add(name)
                        fleet.set.send(Abort(name) if verb == "abort" else Stop(name, 0))
                await fleet.settle()
            await fleet.run()
            assert not fleet.reader.lost
            require_whole(fleet, *(request for name, request in added.items() if name not in left))
            assert all(engine.client.stats().num_used_blocks == 0 for engine in map(fleet.engine, range(num_replicas)))

    run(test)


MOVES = ["add"] * 3 + ["step"] * 3 + ["kill"] * 4 + ["end"] * 3 + ["leave", "move", "close", "open", "recycle"]


class Walk:
    """What may happen to engines and requests, drawn from a seed."""

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self.fleet, self.rng = fleet, rng
        self.added: dict[str, Add] = {}
        self.left: set[str] = set()

    async def go(self, num_actions: int) -> None:
        fleet, rng = self.fleet, self.rng
        for _ in range(num_actions):
            index = rng.randrange(len(fleet.engines))
            self.act(fleet.set.replicas[index], fleet.engine(index))
            await fleet.settle()
        for replica in fleet.set.replicas:
            fleet.set.open_to_requests(replica)
            fleet.engine(replica.index).may_end.set()
        await fleet.settle()
        await fleet.run()

    def act(self, replica: Replica, engine: FakeEngine) -> None:
        fleet, rng = self.fleet.set, self.rng
        match rng.choice(MOVES):
            case "add" if fleet.state is ModelState.READY:
                self.add()
            case "step":
                engine.step(rng.choice(["", "doubled"]))
            case "kill":
                engine.kill()
                if rng.random() < 0.5:
                    engine.may_end.clear()
            case "end":
                engine.may_end.set()
            case "leave" if self.added:
                name = rng.choice(list(self.added))
                self.left.add(name)
                is_known = (name, 0) in self.fleet.reader.tokens  # before a branch has begun, nobody stops it
                fleet.send(Stop(name, 0) if is_known and rng.random() < 0.5 else Abort(name))
            case "move" if replica.is_ready:
                fleet.move(replica, rng.choice([1, 2, 8]))
            case "close":
                fleet.close_to_requests(replica)
            case "open":
                fleet.open_to_requests(replica)
            case "recycle" if replica.is_ready:
                replica.recycle()

    def add(self) -> None:
        rng, name = self.rng, f"r{len(self.added)}"
        is_search = rng.random() < 0.2
        more = {"best_of": 2, "beam_search": True, "temperature": 0.0} if is_search else {"n": rng.randint(1, 3)}
        prompt = [*range(100, 100 + rng.randint(1, 12)), *([POISON] if rng.random() < 0.05 else [])]
        self.added[name] = add(name, prompt, rng.randint(1, 30), **more)
        self.fleet.set.send(self.added[name])
        for part in self.fleet.set.book.of(self.fleet.set.book.requests[name]):
            assert part.replica is None or part.replica.is_ready


@pytest.mark.parametrize("seed", range(24))
def test_each_text_is_whole_or_at_fault_however_often_engines_die(seed: int) -> None:
    async def test() -> None:
        async with Fleet(1 + seed % 3) as fleet:
            walk = Walk(fleet, random.Random(seed))
            await walk.go(60)
            errors = fleet.reader.errors()
            assert not fleet.reader.lost and {*errors.values()} <= {AT_FAULT}
            require_whole(fleet, *(each for name, each in walk.added.items() if name not in walk.left | errors.keys()))

    run(test)


def test_requests_go_to_the_engine_with_the_fewest_tokens_to_compute() -> None:
    async def test() -> None:
        async with Fleet(2) as fleet:
            long, short, shorter = add("long", [1] * 30), add("short", [2] * 3), add("shorter", [3] * 2)
            for request in (long, short, shorter):
                fleet.set.send(request)
            assert [len(fleet.engine(index).scheduler.requests) for index in (0, 1)] == [1, 2]
            await fleet.step()
            fleet.set.send(add("next", [4]))  # nothing waits in either
            assert len(fleet.engine(0).scheduler.requests) == 2
            await fleet.run()
            require_whole(fleet, long, short, shorter)

    run(test)


def test_requests_that_begin_alike_go_where_their_blocks_are() -> None:
    async def test() -> None:
        async with Fleet(3) as fleet:
            shared = [list(range(100 * number, 100 * number + 60)) for number in range(1, 4)]
            for number in range(9):
                request = add(str(number), [*shared[number % 3], number], 4)
                fleet.set.send(request)
                await fleet.run()
                require_whole(fleet, request)
            hits = [fleet.engine(index).client.stats().hit_tokens_total for index in range(3)]
            assert hits == [120, 120, 120], "each beginning is computed once, in an engine of its own"

    run(test)


def test_after_a_report_that_was_lost_an_engine_is_surveyed() -> None:
    async def test() -> None:
        async with Fleet(2) as fleet:
            first, second = list(range(200, 260)), list(range(300, 360))
            for number, (prompt, fault) in enumerate([(first, "silent"), (second, ""), (first, ""), (first, "")]):
                fleet.set.send(add(str(number), [*prompt, number], 4))
                for _ in range(8):
                    await fleet.step(fault=fault)
            assert not fleet.set.book.requests
            surveys = [fleet.engine(index).commands.count(Survey()) for index in (0, 1)]
            assert max(surveys) > 1
            assert sum(fleet.engine(index).client.stats().hit_tokens_total for index in (0, 1)) >= 60

    run(test)


@pytest.mark.parametrize("how", ["killed", "lost", "torn"])
def test_the_texts_of_an_engine_go_on_in_two_halves(how: str) -> None:
    async def test() -> None:
        async with Fleet(3) as fleet:
            requests = [add(str(index), [20 + index] * 5, 9, n=1 + index % 2) for index in range(9)]
            for request in requests:
                fleet.set.send(request)
            await fleet.step()
            await fleet.step()
            doomed = fleet.engine(1)
            if how == "killed":
                doomed.kill()
            else:
                doomed.step(how)
                doomed.step()
            await fleet.settle()
            moved = [
                [
                    command
                    for command in fleet.engine(index).commands
                    if isinstance(command, Add) and "~" in command.request_id
                ]
                for index in (0, 2)
            ]
            assert all(moved)
            assert abs(len(moved[0]) - len(moved[1])) <= 2
            assert all(len(command.output_token_ids) == 2 for half in moved for command in half)
            assert fleet.starts == [0, 1, 2, 1]
            await fleet.run()
            require_whole(fleet, *requests)
            assert fleet.set.num_continued == sum(map(len, moved))

    run(test)


def test_what_comes_twice_or_late_changes_nothing() -> None:
    async def test() -> None:
        async with Fleet(1) as fleet:
            request = add("r", [5, 6], 12, n=2)
            fleet.set.send(request)
            for fault in ("", "doubled", "late", "late", "", "doubled", "late", ""):
                await fleet.step(fault=fault)
            await fleet.run()
            require_whole(fleet, request)
            assert fleet.starts == [0]

    run(test)


def test_the_request_that_kills_engines_ends_alone_and_no_other() -> None:
    async def test() -> None:
        async with Fleet(3) as fleet:
            others = [add(str(index), [20 + index] * 5, 30) for index in range(11)]
            poison = add("poison", [POISON, 4], 30)
            for request in [*others[:5], poison, *others[5:]]:
                fleet.set.send(request)
            await fleet.run()
            require_whole(fleet, *others)
            assert fleet.reader.errors() == {"poison": AT_FAULT}
            assert len(fleet.starts) == 3 + 3, "three engines have died"
            assert fleet.set.num_at_fault == 1
            late = add("late", [9] * 4)
            fleet.set.send(late)
            await fleet.run()
            require_whole(fleet, late)

    run(test)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_samples_that_have_begun_go_on_alone_each(num_replicas: int) -> None:
    async def test() -> None:
        async with Fleet(num_replicas) as fleet:
            requests = [add("samples", [5] * 6, 30, n=3), add("one", [6] * 4, 30), add("two", [7] * 3, 30, n=2)]
            search = add("search", [8] * 4, 6, best_of=3, beam_search=True, temperature=0.0)
            for request in [*requests, search]:
                fleet.set.send(request)
            for _ in range(2):
                await fleet.step()
                await fleet.step()
                for index in range(num_replicas):
                    fleet.engine(index).kill()
                await fleet.settle()
            on_trial = [len(fleet.engine(index).scheduler.requests) for index in range(num_replicas)]
            assert max(on_trial) == 1
            await fleet.run()
            require_whole(fleet, *requests, search)

    run(test)


def test_samples_that_begin_in_their_trial_go_on_once_each() -> None:
    async def test() -> None:
        async with Fleet(1) as fleet:
            requests = [add("samples", [5] * 6, 30, n=2), add("next", [6] * 4, 30)]
            for request in requests:
                fleet.set.send(request)
            for _ in range(2):
                fleet.engine(0).kill()  # before the first token, so that the samples stay one part
                await fleet.settle()
            assert fleet.set.book.suspects.on_trial is not None
            await fleet.run()
            require_whole(fleet, *requests)

    run(test)


def test_a_trial_that_ends_with_its_engine_and_others_is_held_again() -> None:
    suspects = Suspects()
    tried, other = (Part(TrackedRequest(add(name, [5]), 0)) for name in ("tried", "other"))
    for _ in range(2):
        suspects.note_death([tried])
    suspects.begin(tried, cast(Any, "engine"))
    assert suspects.note_death([tried, other]) == ([other], [], None)
    assert (suspects.waiting, suspects.on_trial, suspects.engine) == ([tried], None, None)


def test_a_text_that_fails_as_its_trial_ends_is_not_computed_again() -> None:
    async def test() -> None:
        async with Fleet(1) as fleet:
            requests = [add(name, [5] * 4, max_tokens=60) for name in "abc"]
            for request in requests:
                fleet.set.send(request)
            for _ in range(2):
                await fleet.step()
                fleet.engine(0).kill()
                await fleet.settle()
            suspects, tell = fleet.set.book.suspects, fleet.reader.process
            failed = list[str]()

            def tell_and_fail(updates: list[SequenceUpdate]) -> None:
                tell(updates)
                if suspects.on_trial is not None and suspects.has_passed(suspects.on_trial) and not failed:
                    failed.append(updates[0].request_id)
                    fleet.set.send(Fail(updates[0].request_id, "its text cannot be decoded"))

            fleet.reader.process = tell_and_fail  # type: ignore[method-assign]
            await fleet.run()
            assert failed == ["a"]
            require_whole(fleet, *requests[1:])

    run(test)


def test_requests_that_come_while_the_engine_of_a_trial_ends_keep_no_suspect_waiting() -> None:
    async def test() -> None:
        async with Fleet(2) as fleet:
            requests = [add(str(index), [20 + index] * 4, 30) for index in range(6)]
            for request in requests[:2]:
                fleet.set.send(request)
            for _ in range(2):
                fleet.engine(0).kill()
                fleet.engine(1).kill()
                await fleet.settle()
            on_trial = fleet.set.book.suspects.on_trial
            assert on_trial is not None and on_trial.replica is not None
            ending = fleet.engine(on_trial.replica.index)
            ending.may_end.clear()
            ending.kill()
            await fleet.settle()
            for request in requests[2:]:
                fleet.set.send(request)
            ending.may_end.set()
            await fleet.settle()
            await fleet.run()
            require_whole(fleet, *requests[1:])
            assert fleet.reader.errors() == {"0": AT_FAULT}

    run(test)


def test_of_a_request_that_kills_engines_all_samples_end() -> None:
    async def test() -> None:
        async with Fleet(2) as fleet:
            poison, other = add("poison", [POISON, 4], 30, n=3), add("other", [5] * 4, 40)
            for request in (poison, other):
                fleet.set.send(request)
            await fleet.run()
            require_whole(fleet, other)
            assert len(fleet.reader.ends) == 4
            assert set(fleet.reader.errors()) == {"poison"}
            assert len(fleet.starts) == 2 + 3

    run(test)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_several_such_requests_end_each_by_itself(num_replicas: int) -> None:
    async def test() -> None:
        async with Fleet(num_replicas) as fleet:
            others = [add(str(index), [20 + index] * 5, 40) for index in range(5)]
            poisons = [add(f"poison {index}", [POISON, index], 30) for index in range(3)]
            for request in [*others, *poisons]:
                fleet.set.send(request)
            await fleet.run()
            require_whole(fleet, *others)
            assert fleet.reader.errors() == {request.request_id: AT_FAULT for request in poisons}

    run(test)


def test_an_engine_of_other_bits_goes_on_with_nothing_but_what_has_not_begun() -> None:
    async def test() -> None:
        async with Fleet(2, ["same", "same", "other"]) as fleet:
            begun, new = add("begun", [5] * 4, 9), add("new", [6] * 4, 9)
            fleet.set.send(begun)
            await fleet.step()
            fleet.engine(0).kill()
            await fleet.settle()
            assert len(fleet.engine(1).scheduler.requests) == 1, "of the same bits"
            fleet.engine(1).kill()
            fleet.fingerprints = ["other"]
            await fleet.settle()
            assert [each.fingerprint for each in fleet.set.replicas] == ["other", "other"]
            assert len(fleet.set.book.waiting) == 1
            fleet.set.send(new)
            for _ in range(20):
                await fleet.step()
            require_whole(fleet, new)
            assert len(fleet.set.book.waiting) == 1
            fleet.clock.advance(MOST_WAIT_S - 1)
            await asyncio.sleep(1.5 * BEAT_S)
            assert not fleet.reader.lost
            fleet.clock.advance(2)
            await asyncio.sleep(1.5 * BEAT_S)
            assert fleet.reader.lost == {"begun": f"no engine could continue this request within {MOST_WAIT_S:g} s"}
            assert not fleet.set.book.requests

    run(test)


def test_any_engine_may_go_on_where_that_is_allowed() -> None:
    async def test() -> None:
        async with Fleet(1, ["one", "other"], continue_on="any") as fleet:
            request = add("r", [5] * 4, 9)
            fleet.set.send(request)
            await fleet.step()
            fleet.engine(0).kill()
            await fleet.settle()
            await fleet.run()
            require_whole(fleet, request)

    run(test)


def test_never_means_that_texts_end_with_their_engine() -> None:
    async def test() -> None:
        async with Fleet(2, continue_on="never") as fleet:
            first, second = add("first", [5] * 4), add("second", [6] * 4, n=2)
            fleet.set.send(first)
            fleet.set.send(second)
            await fleet.step()
            fleet.engine(1).kill()
            await fleet.settle()
            assert list(fleet.reader.lost) == ["second"]
            assert "status -9" in fleet.reader.lost["second"]
            await fleet.run()
            require_whole(fleet, first)

    run(test)


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("continue_on", ["same", "never"])
def test_an_engine_whose_process_still_ends_gets_nothing_new(continue_on: str, is_planned: bool) -> None:
    async def test() -> None:
        async with Fleet(2, continue_on=continue_on) as fleet:
            requests = [add(str(index), [20 + index] * 4) for index in range(5)]
            for request in requests[:2]:
                fleet.set.send(request)
            await fleet.run()
            ending = fleet.engine(0)
            ending.may_end.clear()
            fleet.set.replicas[0].recycle() if is_planned else ending.kill()
            await fleet.settle()
            assert fleet.starts == [0, 1]
            for request in requests[2:]:
                fleet.set.send(request)
            await fleet.settle()
            assert len(fleet.engine(1).scheduler.requests) == 3
            ending.may_end.set()
            await fleet.run()
            assert fleet.starts == [0, 1, 0]
            require_whole(fleet, *requests)

    run(test)


def test_a_rolling_restart_ends_no_text() -> None:
    async def test() -> None:
        async with Fleet(3) as fleet:
            requests = [add(str(index), [20 + index] * 5, 60, n=1 + index % 2) for index in range(9)]
            for request in requests:
                fleet.set.send(request)
            await fleet.step()
            rolling = asyncio.gather(*(fleet.set.roll() for _ in range(3)))  # it is done once
            while not rolling.done():
                fleet.clock.advance(2.0)
                await fleet.step()
            await rolling
            assert fleet.starts == [0, 1, 2, 0, 1, 2]
            assert fleet.set.num_moved > 0
            await fleet.run()
            require_whole(fleet, *requests)
            assert fleet.set.num_continued == 0, "nobody is a suspect"

    run(test)


def test_engines_are_restarted_while_a_suspect_is_on_trial() -> None:
    async def test() -> None:
        async with Fleet(2) as fleet:
            requests = [add(str(index), [20 + index] * 5, 60) for index in range(4)]
            for request in requests:
                fleet.set.send(request)
            for _ in range(2):
                await fleet.step()
                fleet.engine(0).kill()
                fleet.engine(1).kill()
                await fleet.settle()
            assert fleet.set.book.waiting, "some wait for their trial"
            rolling = asyncio.create_task(fleet.set.roll())
            while not rolling.done():
                fleet.clock.advance(2.0)
                await fleet.step()
            await rolling
            await fleet.run()
            require_whole(fleet, *requests)

    run(test)


def test_the_only_engine_is_restarted_too() -> None:
    async def test() -> None:
        async with Fleet(1) as fleet:
            request = add("r", [5] * 4, 20)
            fleet.set.send(request)
            await fleet.step()
            rolling = asyncio.create_task(fleet.set.roll())
            while not rolling.done():
                await fleet.step()
            await rolling
            await fleet.run()
            require_whole(fleet, request)
            assert fleet.starts == [0, 0]

    run(test)


def test_a_silent_engine_gets_nothing_new() -> None:
    async def test() -> None:
        async with Fleet(2) as fleet:
            fleet.set.replicas[0].judge(6.0)
            assert fleet.set.state is ModelState.READY
            for index in range(3):
                fleet.set.send(add(str(index), [5] * 4))
            assert [len(fleet.engine(index).scheduler.requests) for index in (0, 1)] == [0, 3]
            fleet.set.replicas[1].judge(6.0)
            assert fleet.set.state is ModelState.UNRESPONSIVE
            with pytest.raises(ExecutionError, match="not running"):
                fleet.set.send(add("more", [5]))
            fleet.engine(0).tell_stats()
            await fleet.settle()
            assert fleet.set.state is ModelState.READY
            await fleet.run()

    run(test)


def test_an_engine_that_cannot_be_started_keeps_no_other_from_serving(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        fleet = Fleet(3)
        fleet.broken = {0, 2}
        async with fleet:
            states = [replica.state for replica in fleet.set.replicas]
            assert states == [ModelState.FAILED, ModelState.READY, ModelState.FAILED]
            assert fleet.set.state is ModelState.READY
            assert fleet.set.settled.is_set()
            request = add("r", [5] * 4)
            fleet.set.send(request)
            for _ in range(12):
                await fleet.step(1)
            require_whole(fleet, request)
            assert [record.getMessage() for record in caplog.records] == [
                f"replica {index}: the engine process: no process for engine {index}; {GIVEN_UP}" for index in (0, 2)
            ]

    run(test)


def test_where_no_engine_can_be_started_the_set_has_failed_and_says_why() -> None:
    async def test() -> None:
        fleet = Fleet(2)
        fleet.broken = {0, 1}
        async with fleet:
            assert fleet.set.state is ModelState.FAILED
            assert fleet.set.settled.is_set()
            assert fleet.set.failure == "the engine process: no process for engine 0"

    run(test)


def test_a_bug_in_the_supervision_ends_an_engine_and_not_the_supervision(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        async with Fleet(1) as fleet:
            request = add("r", [5] * 4)
            fleet.set.send(request)
            await fleet.step()
            with monkeypatch.context() as patched:
                patched.setattr(fleet.set, "take_updates", lambda *_: {}["a bug"])
                await fleet.step()
            await fleet.settle()
            assert len(fleet.starts) == 2 and fleet.set.state is ModelState.READY
            await fleet.run()
            require_whole(fleet, request)
            messages = [record.getMessage() for record in caplog.records]
            assert messages[0] == "the supervision of an engine failed"
            assert messages[1].startswith("replica 0: the engine process: KeyError: 'a bug'; restarting it in")

    run(test)


def test_an_engine_that_does_not_come_back_ends_what_waits_for_it() -> None:
    async def test() -> None:
        async with Fleet(1) as fleet:
            fleet.set.send(add("r", [5] * 4))
            await fleet.step()
            fleet.broken = {0}
            fleet.engine(0).kill()
            while fleet.set.state is not ModelState.FAILED:
                await fleet.settle()
            assert fleet.reader.lost == {"r": "the engine process: no process for engine 0"}
            assert len(fleet.starts) == 1 + replica_module.MOST_FAILED_STARTS

    run(test)


@pytest.mark.parametrize(("load_s", "waits_s"), [(0.0, MOST_WAIT_S), (20.0, 40.0), (300.0, 600.0)])
def test_a_text_waits_for_as_long_as_two_loads(monkeypatch: pytest.MonkeyPatch, load_s: float, waits_s: float) -> None:
    monkeypatch.setattr(replica_set_module, "BEAT_S", 0.0)
    monkeypatch.setattr(replica_module, "MOST_FAILED_STARTS", 1 << 30)
    monkeypatch.setattr(replica_module, "LONGEST_RESTART_S", 0.0)

    async def test() -> None:
        fleet = Fleet(1)
        fleet.load_s = load_s
        async with fleet:
            fleet.set.send(add("r", [5] * 4))
            await fleet.step()
            fleet.broken = {0}
            fleet.engine(0).kill()
            await fleet.settle()
            fleet.clock.advance(waits_s - 1)
            await fleet.settle()
            assert not fleet.reader.lost
            fleet.clock.advance(2)
            await fleet.settle()
            assert fleet.reader.lost == {"r": f"no engine could continue this request within {waits_s:.0f} s"}

    run(test)


def test_commands_for_all_go_to_all_and_closing_ends_everything() -> None:
    async def test() -> None:
        fleet = Fleet(2)
        async with fleet:
            fleet.set.send(Clear())
            assert [fleet.engine(index).commands for index in (0, 1)] == [[Survey(), Clear()]] * 2
            fleet.set.send(add("r", [5] * 4))
        assert fleet.reader.lost == {"r": "the engine is closed"}
        assert fleet.set.state is ModelState.CLOSED
        assert all(fleet.engine(index).is_dead for index in (0, 1))

    run(test)


def test_an_engine_that_still_loads_is_killed_when_the_set_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would read that it should end only once it has loaded."""

    async def test() -> None:
        killed = list[FakeEngine]()

        def kill(engine: FakeEngine) -> None:
            killed.append(engine)

        monkeypatch.setattr(FakeEngine, "kill", kill)
        fleet = Fleet(2)
        start = fleet.set.replicas[1]._start

        async def start_silent(index: int) -> FakeEngine:
            engine = cast(FakeEngine, await start(index))
            engine._queue = asyncio.Queue()
            return engine

        fleet.set.replicas[1]._start = start_silent
        async with fleet:
            assert [each.state for each in fleet.set.replicas] == [ModelState.READY, ModelState.STARTING]
            monkeypatch.setattr(FakeEngine, "send", lambda *_: None)
        await fleet.set.close()
        assert killed == [fleet.engine(1)]

    run(test)


def test_an_engine_is_added_while_requests_would_wait_and_ended_when_none_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_set_module, "BEAT_S", 0.0)
    caplog.set_level(logging.INFO, "quire.scaling")

    async def test() -> None:
        fleet = Fleet(3, least=1)

        async def seconds(count: int) -> None:
            for _ in range(count):
                fleet.clock.advance(1)
                await asyncio.sleep(0)
                await asyncio.sleep(0)

        async with fleet:
            assert (fleet.starts, len(fleet.set.in_use), fleet.set.state) == ([0], 1, ModelState.READY)
            await seconds(400)
            assert fleet.starts == [0], "nothing is added while nothing waits"
            requests = [add(str(number), [20 + number] * 12, 8) for number in range(8)]
            for request in requests:
                fleet.set.send(request)
            await seconds(9)
            assert fleet.starts == [0]
            await seconds(4)
            await fleet.settle()
            assert fleet.starts == [0, 1]
            fleet.set.send(add("next", [9] * 5))
            assert len(fleet.engine(1).scheduler.requests) == 1
            for _ in range(200):
                await fleet.step(0, 1)
            require_whole(fleet, *requests, add("next", [9] * 5))
            await seconds(200)
            await fleet.settle()
            assert not fleet.engine(1).is_dead
            late = add("late", [3] * 5, 30)
            fleet.set.send(late)
            await fleet.step(0, 1)
            await seconds(400)
            assert len(fleet.set.in_use) == 2, "one of two is busy"
            for _ in range(60):
                await fleet.step(0, 1)
            require_whole(fleet, late)
            await seconds(500)
            await fleet.settle()
            assert fleet.engine(1).is_dead
            assert [each.is_in_use for each in fleet.set.replicas] == [True, False, False]
            assert fleet.set.stats().replicas[1].state is ModelState.CLOSED
            starts, ends = (record.getMessage() for record in caplog.records if record.name == "quire.scaling")
            assert re.fullmatch(r"replica 1 starts: a request would wait for \d+\.\d s", starts)
            assert ends == "replica 1 ends: the others have capacity for its requests"
            for number in range(3):
                fleet.set.send(add(f"last {number}", [4 + number] * 5))
            assert len(fleet.engine(0).scheduler.requests) == 3
            await fleet.step(0)
            for _ in range(30):
                await fleet.step(0)
            assert not fleet.set.book.requests

    run(test)


def test_texts_of_an_engine_that_is_ended_go_on_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolling, "DRAIN_S", 0.0)

    async def test() -> None:
        fleet = Fleet(2, least=1)
        async with fleet:
            fleet.set.replicas[1].begin()
            await fleet.settle()
            requests = [add(str(number), [20 + number] * 4, 9) for number in range(6)]
            for request in requests:
                fleet.set.send(request)
            await fleet.step(0, 1)
            removal = asyncio.create_task(fleet.set._remove(fleet.set.replicas[1]))
            while not removal.done():
                fleet.engine(0).step()
                await fleet.settle()
            assert fleet.engine(1).is_dead and fleet.set.num_moved == 3
            for _ in range(60):
                await fleet.step(0)
            require_whole(fleet, *requests)
            fleet.set.replicas[1].begin()
            await fleet.settle()
            assert fleet.starts == [0, 1, 1] and fleet.set.replicas[1].is_ready

    run(test)


RESIZED = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 12), st.integers(1, 3)),
        st.tuples(st.just("step"), st.integers(0, 2)),
        st.tuples(st.just("kill"), st.integers(0, 2)),
        st.tuples(st.just("resize"), st.integers(0, 2)),
    ),
    max_size=20,
)


@settings(deadline=None)
@given(RESIZED)
def test_texts_are_whole_however_engines_come_and_go(actions: list[Any]) -> None:
    async def test() -> None:
        async with Fleet(3, least=1) as fleet:
            replicas, added, num_killed = fleet.set.replicas, list[Add](), 0
            removal: asyncio.Task[None] | None = None
            for action in actions:
                match action:
                    case ("add", length, max_tokens, n):
                        added.append(add(f"r{len(added)}", list(range(100, 100 + length)), max_tokens, n=n))
                        fleet.set.send(added[-1])
                    case ("step", index) if fleet.engines[index] is not None:
                        await fleet.step(index)
                    case ("kill", index) if replicas[index].is_ready and num_killed < 2:
                        num_killed += 1
                        fleet.engine(index).kill()
                    case ("resize", index) if not replicas[index].is_in_use:
                        replicas[index].begin()
                    case ("resize", index) if len(fleet.set.in_use) > 1 and (removal is None or removal.done()):
                        removal = asyncio.create_task(fleet.set._remove(replicas[index]))
                await fleet.settle()
            for _ in range(2000):
                if not fleet.set.book.requests and (removal is None or removal.done()):
                    break
                for engine in fleet.engines:
                    if engine is not None:
                        engine.step()
                await fleet.settle()
            assert not fleet.reader.lost and not fleet.set.book.requests
            require_whole(fleet, *added)
            assert removal is None or removal.exception() is None
            assert any(replica.is_ready for replica in replicas)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rolling, "DRAIN_S", 0.0)
        run(test)
