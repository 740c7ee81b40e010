"""The client of an engine in this process: updates add up to each sequence, once, whatever is aborted meanwhile."""

from __future__ import annotations

import gc
import weakref
from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.errors import ExecutionError, InvalidRequestError, InvariantError
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import FinishReason
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.client import EngineClient, SequenceUpdate, refused
from quire.engine.commands import Abort, Add, Clear, Fail, Stop
from quire.engine.core import EngineCore
from quire.memory.manager import KVCacheManager
from quire.scheduler.scheduler import Scheduler
from support.shadow import ShadowExecutor, expected_tokens
from support.step_faults import StepFaults

VOCAB = 1000
SPEC = KVCacheSpec.from_layers([None], block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
Place = tuple[str, int]


def client_of(**settings: Any) -> EngineClient:
    config = SchedulerConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64} | settings)
    manager = KVCacheManager(SPEC, MemoryConfig(num_blocks=64))
    scheduler = Scheduler(config, manager, RequestLimits(VOCAB, 64, 64 * 4, 4))
    return EngineClient(EngineCore(scheduler, ShadowExecutor(SPEC, VOCAB), ManualClock()))


def add(name: str, length: int = 5, max_tokens: int = 6, **more: Any) -> Add:
    return Add(name, array("i", range(length)), SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more))


@dataclass
class Reader:
    """What a door makes of the updates: the tokens of each sequence, and its end."""

    tokens: dict[Place, list[int]] = field(default_factory=dict)
    ends: dict[Place, SequenceUpdate] = field(default_factory=dict)

    def take(self, updates: list[SequenceUpdate]) -> None:
        places = [(update.request_id, update.branch) for update in updates]
        assert len(set(places)) == len(places), "one update for each sequence that got further"
        for place, update in zip(places, updates, strict=True):
            assert place not in self.ends, "an update after the last one"
            assert update.token_ids or update.finish_reason is not None, "an update that tells nothing"
            self.tokens.setdefault(place, []).extend(update.token_ids)
            if update.finish_reason is not None:
                self.ends[place] = update


COMMANDS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.integers(1, 8), st.integers(1, 3)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.sampled_from(["abort", "fail"]), st.integers(0, 5)),
        st.tuples(st.just("stop"), st.integers(0, 5), st.integers(0, 3)),
    ),
    max_size=14,
)


@given(COMMANDS, st.integers(1, 2))
def test_updates_add_up_to_every_sequence_that_nobody_ended(commands: list[Any], depth: int) -> None:
    client, reader = client_of(max_steps_under_way=depth), Reader()
    added: dict[str, Add] = {}
    silent: set[Place] = set()  # nothing of them may come any more

    def step() -> None:
        updates = client.receive()
        assert not silent & {(update.request_id, update.branch) for update in updates}
        reader.take(updates)

    for command in commands:
        match command:
            case ("add", length, max_tokens, n):
                request = add(f"r{len(added)}", length, max_tokens, n=n)
                client.send(request)
                added[request.request_id] = request
            case ("step", count):
                for _ in range(count):
                    step()
            case ("stop", index, branch):
                if (f"r{index}", branch) in reader.tokens:  # before it opens a door knows no branch
                    client.send(Stop(f"r{index}", branch))
                    silent.add((f"r{index}", branch))
            case (kind, index):
                client.send(Abort(f"r{index}") if kind == "abort" else Fail(f"r{index}", "broken"))
                if f"r{index}" in added:
                    silent |= {(f"r{index}", branch) for branch in range(3)}
    for _ in range(1000):
        if client.is_idle:
            break
        step()
    assert client.is_idle
    for name, request in added.items():
        prompt, sampling = request.prompt_token_ids.tolist(), request.sampling
        for branch in range(sampling.n):
            place = (name, branch)
            expected = expected_tokens(prompt, sampling.max_tokens or 0, VOCAB, branch=branch)
            if place in silent:
                found = reader.tokens.get(place, [])
                assert found == expected[: len(found)]
            else:
                assert reader.tokens[place] == expected
                assert reader.ends[place].finish_reason is FinishReason.LENGTH
    assert client.stats().num_used_blocks == 0


def run(client: EngineClient) -> Reader:
    reader = Reader()
    while not client.is_idle:
        reader.take(client.receive())
    return reader


def test_what_was_in_the_cache_is_told_with_every_update() -> None:
    client = client_of()
    client.send(add("first", 9))
    assert all(update.num_cached_tokens == 0 for update in run(client).ends.values())
    client.send(add("second", 9))
    while not client.is_idle:
        for update in client.receive():
            assert update.num_cached_tokens == 8  # two blocks of 4; the last token is always computed


def test_beams_are_told_once_all_of_them_when_the_search_is_over() -> None:
    client = client_of()
    client.send(add("search", 4, 5, n=2, best_of=3, beam_search=True, temperature=0))
    updates: list[SequenceUpdate] = []
    while not client.is_idle:
        assert updates == [], "nothing of a search is told before its end"
        updates += client.receive()
    assert sorted(update.branch for update in updates) == [0, 1, 2]
    assert all(update.finish_reason is FinishReason.LENGTH for update in updates)
    assert all(len(update.token_ids) == 5 for update in updates)


def test_a_group_that_ends_before_it_opens_ends_every_sequence() -> None:
    client = client_of(max_num_batched_tokens=4)
    executor = client._core._executor
    assert isinstance(executor, ShadowExecutor)
    executor.fault = StepFaults({"group": 0}).fault()
    client.send(add("group", 12, 5, n=3))
    client.send(add("search", 9, 5, n=2, beam_search=True, temperature=0))
    client.send(add("other", 4, 3))
    reader = run(client)
    ends = {place: (update.finish_reason, update.error) for place, update in reader.ends.items()}
    assert ends == {
        **{("group", branch): (FinishReason.ERROR, "group is poison") for branch in range(3)},
        **{("search", branch): (FinishReason.LENGTH, "") for branch in range(2)},
        ("other", 0): (FinishReason.LENGTH, ""),
    }


@pytest.mark.parametrize(("more", "branches"), [({"n": 3}, 3), ({"best_of": 4, "beam_search": True}, 4), ({}, 1)])
def test_a_request_that_an_engine_could_not_take_in_ends_with_all_its_sequences(more: Any, branches: int) -> None:
    request = add("r", 5, 5, temperature=0 if "beam_search" in more else 1, **more)
    updates = refused(request, "too large")
    assert [(update.request_id, update.branch) for update in updates] == [("r", branch) for branch in range(branches)]
    assert {(update.finish_reason, update.error) for update in updates} == {(FinishReason.ERROR, "too large")}


def test_a_request_that_can_never_be_served_is_refused_and_the_others_go_on() -> None:
    client = client_of()
    client.send(add("good"))
    with pytest.raises(InvalidRequestError):
        client.send(add("long", 65))
    reader = run(client)
    assert reader.ends.keys() == {("good", 0)}


def test_unknown_requests_and_branches_are_nobodys() -> None:
    client = client_of()
    for command in (Abort("none"), Fail("none", "x"), Stop("none", 0)):
        client.send(command)
    client.send(add("one", 3, 4))
    reader = Reader()
    reader.take(client.receive())
    client.send(Stop("one", 7))
    while not client.is_idle:
        reader.take(client.receive())
    assert len(reader.tokens["one", 0]) == 4


def test_an_engine_that_has_failed_is_not_used_again() -> None:
    client = client_of()
    client.send(add("one"))

    def broken() -> None:
        raise ZeroDivisionError("a mistake")

    client._core.step = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(ZeroDivisionError):
        client.receive()
    words = "^the engine has failed: ZeroDivisionError: a mistake$"
    for call in (client.receive, lambda: client.send(add("two"))):
        with pytest.raises(ExecutionError, match=words):
            call()
    client.close()
    with pytest.raises(ExecutionError, match=words):  # closing it does not hide why
        client.receive()


def test_a_closed_engine_says_so_and_one_that_cannot_go_on_is_broken() -> None:
    client = client_of()
    client.close()
    with pytest.raises(ExecutionError, match=r"^the engine is closed$"):
        client.send(add("one"))
    stuck = client_of()
    stuck.send(add("one"))
    stuck._core.step = lambda: None  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="requests are waiting, but none can be scheduled"):
        stuck.receive()


@pytest.mark.parametrize("command", [Stop("one", 0), Abort("one"), Fail("one", "broken")])
def test_what_ends_a_request_of_a_closed_engine_does_nothing(command: Any) -> None:
    client = client_of()
    client.send(add("one"))
    assert client.receive()
    client.close()
    client._core.send = None  # type: ignore[method-assign,assignment]
    client.send(command)
    with pytest.raises(ExecutionError, match=r"^the engine is closed$"):
        client.send(Clear())


@pytest.mark.parametrize("command", [Stop("long", 0), Abort("long"), Fail("long", "broken")])
def test_a_sequence_that_is_ended_takes_no_more_steps(command: Any) -> None:
    client = client_of()
    client.send(add("long", 3, 50))
    assert client.receive()
    client.send(command)
    before = client.stats().steps_total
    assert run(client).tokens == {}
    assert client.stats().steps_total - before <= 2


@pytest.mark.parametrize(
    ("end", "beams"),
    [(end, beams) for end in ("its tokens", "an abort", "a failure", "stops") for beams in (False, True)][:-1],
)
def test_a_group_is_freed_when_it_ends_and_not_at_a_collection(beams: bool, end: str) -> None:
    client = client_of()
    search = {"beam_search": True, "temperature": 0.0} if beams else {}
    gc.disable()
    try:
        client.send(add("r", max_tokens=6, n=3, **search))
        for _ in range(2):
            client.receive()
        members = [weakref.ref(member.tokens) for member in client._members("r")]
        assert len(members) == 3
        match end:
            case "an abort":
                client.send(Abort("r"))
            case "a failure":
                client.send(Fail("r", "broken"))
            case "stops":
                for branch in range(3):
                    client.send(Stop("r", branch))
        while not client.is_idle:
            client.receive()
        client.send(add("next", max_tokens=1))  # the engine's last step is another one
        while not client.is_idle:
            client.receive()
        assert [member() for member in members] == [None] * 3
    finally:
        gc.enable()
