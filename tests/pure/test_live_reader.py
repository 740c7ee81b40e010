"""What readers are shown of simulated engines: an operator everything, a tenant its own, however slowly they read."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from quire.core.clock import ManualClock
from quire.core.config import EngineConfig
from quire.core.request import CacheScope, Request
from quire.engine.records.live import MOST_UNSEEN, LiveFrame, LiveJournal, packed
from quire.engine.records.stats import EngineStats, ModelState, ReplicaStats
from quire.serve.errors import ApiError
from quire.serve.gate import Gate
from quire.serve.gate_limits import GateLimits
from quire.serve.live import MOST_CALLS, Live
from quire.serve.live_places import LiveShared, live_places
from quire.serve.live_reader import MOST_EVENTS, MOST_OWED, MOST_SAMPLES, LiveReader
from quire.serve.tenants import ANYBODY, Tenant
from support.bare_server import FakeModel
from support.live_lines import Picture
from support.live_picture import parent_of
from support.simulation import Scenario, Simulation

STATES = {"free": 0, "in use": 1, "cached": 2}


class WatchedModel(FakeModel):
    """A model whose frames a test makes."""

    def __init__(self, block_size: int = 16) -> None:
        super().__init__()
        self.config = replace(self.config, block_size=block_size)
        self.state = ModelState.READY
        self.show: Any = None

    def watch(self, every_s: float, show: Any, replica: int = 0) -> None:
        assert every_s > 0
        self.show = show

    def unwatch(self, replica: int = 0) -> None:
        self.show = None


def make_live(model: WatchedModel, max_live_readers: int = 4) -> tuple[Live, Gate]:
    clock = ManualClock()
    gate = Gate(clock, GateLimits(1, 100), lambda: model.state)
    return Live(model, ["made up"], gate, LiveShared(live_places(max_live_readers, ())), clock), gate  # type: ignore[arg-type]


def test_a_tenant_is_told_only_the_names_that_it_may_call() -> None:
    clock, shared = ManualClock(), LiveShared(live_places(4, ()))
    tuned = WatchedModel()
    tuned.adapters = {"tune": None, "other": None}
    lives = [
        Live(model, names, Gate(clock, GateLimits(1, 100), lambda: ModelState.READY), shared, clock)  # type: ignore[arg-type]
        for model, names in ((tuned, ("base", "second")), (WatchedModel(), ("large",)))
    ]

    def told(index: int, models: tuple[str, ...] | None) -> tuple[str, list[str]]:
        reader = lives[index].join(replace(tenant("t"), models=models))
        hello = lives[index].hello(reader)
        lives[index].leave(reader)
        names = {"base", "second", "tune", "other", "large"}
        shown = {name for name in names if f'"{name}' in json.dumps(hello)}
        assert models is None or shown <= {name.removesuffix(":latest") for name in models}
        return hello["model"], hello["models"]

    assert told(0, None) == ("base", ["base", "large"])
    assert told(0, ("tune",)) == ("tune", ["tune"])
    assert told(0, ("second:latest", "large")) == ("second", ["second", "large"])
    assert told(1, ("large",)) == ("large", ["large"])


def tenant(name: str) -> Tenant:
    return Tenant(name, CacheScope(name, name))


def line_of(live: Live, reader: LiveReader) -> dict[str, Any]:
    return json.loads(b"".join(live.frame(reader)))  # type: ignore[no-any-return]


def parted(scenario: Scenario) -> Scenario:
    """The same requests, with tenants that cannot hit each other's blocks, as a server has them."""
    jobs = [replace(job, scope=replace(job.scope, salt=job.scope.tenant + job.scope.salt)) for job in scenario.jobs]
    return replace(scenario, jobs=jobs)


class ShownSimulation(Simulation):
    """A simulation with three readers: an operator and both tenants. Each reads when it has luck."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._luck = random.Random(scenario.seed + 3)
        self.model = WatchedModel(scenario.spec.block_size)
        self.live, _ = make_live(self.model)
        self.journal = LiveJournal(self.scheduler, began_s=0.0)
        self.readers = {name: self.live.join(tenant(name)) for name in ("a", "b")}
        self.readers[""] = self.live.join(ANYBODY)
        self.pictures = {name: Picture() for name in self.readers}
        self._pace = {name: self._luck.choice([1.0, 0.5, 0.1]) for name in self.readers}
        self.num_shown = 0

    def _advance(self) -> None:
        super()._advance()
        self.show_all(lambda name: self._luck.random() < self._pace[name])

    def _check_nothing_left(self) -> None:
        self.show_all(lambda _: True)
        for name, picture in self.pictures.items():
            assert not picture.requests
            ends = Counter(kind for _, kind, _, _ in picture.events)
            mine = [request for request in self.requests if name in ("", request.scope.tenant)]
            members = [member for request in mine for member in (request.group.members if request.group else [request])]
            assert ends["finished"] + ends["aborted"] + ends["failed"] == len(members)
            assert picture.last["num_ended"] == len(members)
            assert picture.num_listed == len(members) or self._pace[name] < 1.0
        super()._check_nothing_left()

    def show_all(self, is_lucky: Any) -> None:
        self.model.show(self.journal.take(float(self.num_actions), EngineStats()))
        for name, reader in self.readers.items():
            if is_lucky(name):
                self.pictures[name].take_in(line_of(self.live, reader))
                self.compare(name, self.pictures[name])
                self.num_shown += 1

    def compare(self, name: str, picture: Picture) -> None:
        """What is shown is what a scan finds: of an operator by its ids, of a tenant by what it is."""
        found = {}
        owners = self.owners()
        for block in self.memory.pool.blocks:
            whose = owners.get(block.block_id, block.tenant if block.entry is not None else None)
            if block.state.value != "free" and name in ("", whose):
                found[block.block_id] = (STATES[block.state.value], block.ref_count, parent_of(block))
        shown = {row[0]: (row[1], row[2], row[4]) for row in picture.blocks.values()}
        requests = [request for request in self.alive() if name in ("", request.scope.tenant)]
        if not name:
            assert shown == found
        else:
            assert kinds_of(shown) == kinds_of(found)
            assert {row[2] for row in picture.requests.values()} <= {name}
            assert max([*shown, -1]) < self.memory.pool.num_blocks
        assert Counter(row[1] for row in picture.requests.values()) == Counter(each.status.value for each in requests)
        assert sorted(row[3:8] for row in picture.requests.values()) == sorted(
            [each.num_prompt_tokens, each.num_computed, len(each.tokens), each.num_cached_tokens, each.num_preemptions]
            for each in requests
        )

    def alive(self) -> list[Request]:
        leaders = self.scheduler.requests.values()
        members = [member for leader in leaders for member in (leader.group.members if leader.group else [leader])]
        return [member for member in members if not member.is_finished]

    def owners(self) -> dict[int, str]:
        return {
            block_id: request.scope.tenant
            for request, memory in self.memory.memories.items()
            for table in memory.tables
            for block_id in table.held
        }


def kinds_of(blocks: dict[int, tuple[int, int, int]]) -> Counter[tuple[int, int, int, tuple[int, ...]]]:
    """Blocks without their numbers: each as it is, and how those are that stand before it."""
    kinds: Counter[tuple[int, int, int, tuple[int, ...]]] = Counter()
    for state, refs, parent in blocks.values():
        path, before = [], parent
        while before >= 0:
            path.append(blocks[before][1])
            before = blocks[before][2]
        kinds[state, refs, before, tuple(path)] += 1
    return kinds


def test_everybody_is_shown_what_is_theirs() -> None:
    num_shown = 0
    for seed in range(300, 318):
        shown = ShownSimulation(parted(Scenario.draw(seed)))
        shown.run()
        num_shown += shown.num_shown
    assert num_shown > 500


def frame_of(num_blocks: int, block_ids: range, **fields: Any) -> LiveFrame:
    """A frame in which these blocks are held by a request of the tenant "a"."""
    values: dict[str, Any] = {
        "at_s": 1.0,
        "begins": True,
        "is_whole": True,
        "num_blocks": num_blocks,
        "stats": EngineStats(num_running=1, num_waiting=2),
        "tenants": ["a"],
        "blocks": packed((block_id, 1, 1, 0, -2, 0) for block_id in block_ids),
        "block_times": b"\x00" * 8 * len(block_ids),
        "requests": packed([(0, 1, 0, 5, 4, 6, 0, 0, 0, 0)]),
        "ids": ["31"],
        "gone": b"",
        "slots": b"",
        "events": b"",
        "event_times": b"",
    }
    return LiveFrame(**values | fields)


def test_a_long_first_frame_is_written_in_parts() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    reader = live.join(ANYBODY)
    model.show(frame_of(10_000, range(10_000)))
    pieces = list(live.frame(reader))
    assert len(pieces) == 3
    line = json.loads(b"".join(pieces))
    assert [row[0] for row in line["blocks"]] == list(range(10_000))
    assert line["full"] and line["ledger"]["used"] == 10_000


def test_what_changes_while_a_frame_is_written_is_owed_anew() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    reader, picture = live.join(tenant("a")), Picture()
    model.show(frame_of(10_000, range(10_000)))
    pieces = live.frame(reader)
    first = next(pieces)
    freed = packed((block_id, 0, 0, -1, -2, -1) for block_id in range(0, 10_000, 7))
    times = b"\x00" * 8 * len(range(0, 10_000, 7))
    model.show(frame_of(10_000, range(0), begins=False, tenants=[], blocks=freed, block_times=times))
    line = json.loads(first + b"".join(pieces))
    line["ledger"] = {"used": len(line["blocks"]), "cached": 0, "saved": 0}  # of another moment than the rows
    picture.take_in(line)
    picture.take_in(line_of(live, reader))
    assert len(picture.blocks) == 10_000 - len(range(0, 10_000, 7))


def test_whoever_is_owed_too_much_is_shown_everything_anew() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    reader = live.join(ANYBODY)
    num_blocks = MOST_OWED + 10
    model.show(frame_of(num_blocks, range(1)))
    assert line_of(live, reader)["full"]
    for _ in range(2):
        model.show(frame_of(num_blocks, range(num_blocks), begins=False, tenants=[]))
    line = line_of(live, reader)
    assert line["full"] and len(line["blocks"]) == num_blocks
    assert not line_of(live, reader)["full"]


def test_latencies_and_events_are_kept_up_to_a_number_and_told_to_whom_they_concern() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    mine, others, every = live.join(tenant("a")), live.join(tenant("b")), live.join(ANYBODY)
    for index in range(MOST_SAMPLES + 5):
        live.note_gap(tenant("a"), index / 1000)
    live.note_first_token(tenant("a"), 0.25)
    events = packed((1, 0, index, 0) for index in range(MOST_EVENTS + 3))
    model.show(frame_of(4, range(2), events=events, event_times=b"\x00" * 8 * (MOST_EVENTS + 3)))
    for reader in (mine, every):
        line = line_of(live, reader)
        assert line["itl_ms"] == [float(index) for index in range(5, MOST_SAMPLES + 5)]
        assert line["ttft_ms"] == [250.0]
        assert [event[3] for event in line["events"]] == list(range(3, MOST_EVENTS + 3))
        assert not line_of(live, reader)["itl_ms"]
    line = line_of(live, others)
    assert (line["itl_ms"], line["ttft_ms"], line["events"], line["blocks"], line["running"]) == ([], [], [], [], 0)


def short_requests(first: int, number: int, tenant: int = 0, **fields: Any) -> LiveFrame:
    """A later frame in which requests have begun and ended."""
    numbers = range(first, first + number)
    return frame_of(
        4,
        range(0),
        begins=False,
        tenants=[],
        requests=packed((each, 4, tenant, 5, 6, 6, 0, 0, 0, 0) for each in numbers),
        ids=[str(each) for each in numbers],
        gone=packed((each, 6, 6, 4, 0, 0) for each in numbers),
        events=packed((kind, each, 5, tenant) for each in numbers for kind in (0, 1)),
        event_times=b"\x00" * 16 * number,
        **fields,
    )


def test_requests_that_end_before_a_reader_was_shown_them_are_listed_up_to_a_number_and_all_counted() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    mine, others, every = live.join(tenant("a")), live.join(tenant("b")), live.join(ANYBODY)
    live.note_call("40", "req-40")
    model.show(frame_of(4, range(0), tenants=["a", "b"], requests=packed([]), ids=[]))
    for reader in (mine, others, every):
        assert (line_of(live, reader)["num_ended"], reader.num_ended) == (0, 0)
    for first in range(1, 41, 8):  # while nobody reads
        model.show(short_requests(first, 8))
    line = line_of(live, every)
    assert [row[0] for row in line["requests"]] == list(range(41 - MOST_UNSEEN, 41))
    assert line["requests"][-1] == [40, "finished", "a", 5, 6, 6, 4, 0, "req-40", 0, 0]
    assert line["gone"] == [[number, 6, 6, 4, 0, 0] for number in range(41 - MOST_UNSEEN, 41)]
    assert line["num_ended"] == 40
    line = line_of(live, mine)
    assert [row[0] for row in line["requests"]] == [row[0] for row in line["gone"]] == list(range(MOST_UNSEEN))
    assert [row[8] for row in line["requests"]][-2:] == ["", "req-40"]
    ends = {event[2]: event[1] for event in line["events"]}
    assert {ends[row[0]] for row in line["gone"]} == {"finished"}
    line = line_of(live, others)
    assert (line["requests"], line["gone"], line["num_ended"]) == ([], [], 0)
    for reader in (mine, others, every):
        line = line_of(live, reader)
        assert (line["requests"], line["gone"], line["num_ended"]) == ([], [], reader.num_ended)
    model.show(short_requests(41, 2))
    evictions = packed([(5, -1, 1, 0)] * MOST_EVENTS)  # no event of the requests is left
    model.show(frame_of(4, range(0), begins=False, tenants=[], requests=b"", ids=[], events=evictions,
                        event_times=b"\x00" * 8 * MOST_EVENTS))  # fmt: skip
    assert [row[0] for row in line_of(live, mine)["gone"]] == [0, 1]
    model.show(short_requests(43, 2))
    assert [row[0] for row in line_of(live, mine)["gone"]] == [0, 1], "their numbers are free again"


def test_a_request_that_ends_while_a_slow_reader_does_not_read_is_listed_with_its_end() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    reader = live.join(ANYBODY)
    model.show(frame_of(4, range(0), requests=b"", ids=[]))
    assert line_of(live, reader)["full"]
    model.show(frame_of(4, range(0), begins=False, tenants=[]))
    beam = (1, 1, 0, 5, 4, 6, 0, 0, 0, 0)  # is replaced, which is no end
    model.show(frame_of(4, range(0), begins=False, tenants=[], requests=packed([beam]), ids=["32"]))
    end = {
        "gone": packed([(0, 9, 9, 0, 0, 0), (1, 9, 9, 0, 0, 0)]),
        "events": packed([(1, 0, 4, 0)]),
        "event_times": b"\x00" * 8,
    }
    model.show(frame_of(4, range(0), begins=False, tenants=[], requests=b"", ids=[], **end))
    line = line_of(live, reader)
    assert [(row[0], row[1], row[5]) for row in line["requests"]] == [(0, "running", 9)]
    assert (line["gone"], line["num_ended"]) == ([[0, 9, 9, 0, 0, 0]], 1)


def test_ended_requests_are_counted_even_if_a_reader_is_shown_everything_again() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    reader = live.join(ANYBODY)
    num_blocks = MOST_OWED + 10
    model.show(frame_of(num_blocks, range(1)))
    assert line_of(live, reader)["full"]
    model.show(short_requests(1, 3))
    model.show(frame_of(num_blocks, range(num_blocks), begins=False, tenants=[]))
    model.show(short_requests(4, 3))
    line = line_of(live, reader)
    assert (line["full"], line["gone"], line["num_ended"]) == (True, [], 6)


def test_the_work_of_others_neither_wakes_a_tenant_nor_counts_in_its_frames() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    mine, others, every = live.join(tenant("a")), live.join(tenant("b")), live.join(ANYBODY)
    model.show(frame_of(8, range(2), stats=EngineStats(steps_total=70)))
    assert all(reader.wake.is_set() for reader in (mine, others, every))
    assert [line_of(live, reader)["step"] for reader in (mine, others, every)] == [None, None, 70]
    for reader in (mine, others, every):
        reader.wake.clear()
    model.show(frame_of(8, range(2, 4), begins=False, tenants=[]))
    assert [reader.wake.is_set() for reader in (mine, others, every)] == [True, False, True]


def test_tenants_share_the_places_and_one_is_kept_for_operators() -> None:
    owner = Tenant("owner", CacheScope("owner"), is_operator=True)
    places = live_places(16, [tenant("a"), tenant("b"), tenant("c"), owner])
    watching: list[Tenant] = []
    for name in "abc":
        for _ in range(5):
            places.require(tenant(name), watching)
            watching.append(tenant(name))
        with pytest.raises(ApiError, match="already has 5 readers of /live") as caught:
            places.require(tenant(name), watching)
        assert caught.value.status == 429
    places.require(owner, watching)
    with pytest.raises(ApiError, match="16 clients already read"):
        places.require(owner, [*watching, owner])
    many = live_places(4, [owner, *(tenant(str(number)) for number in range(9))])
    with pytest.raises(ApiError, match="4 clients already read"):
        many.require(tenant("8"), [tenant("0"), tenant("1"), tenant("2")])
    many.require(owner, [tenant("0"), tenant("1"), tenant("2")])
    for none in (live_places(0, ()), live_places(0, [tenant("a")])):
        with pytest.raises(ApiError, match="0 clients"):
            none.require(tenant("a"), [])


def test_calls_that_are_turned_away_are_told_to_whom_they_concern() -> None:
    model = WatchedModel()
    live, gate = make_live(model)
    mine, others, every = live.join(tenant("a")), live.join(tenant("b")), live.join(ANYBODY)
    model.show(frame_of(4, range(0)))
    with gate.enter(tenant("a"), 1, 1), pytest.raises(ApiError):
        gate.enter(tenant("a"), 1, 1)
    for reader, number in ((mine, 1), (every, 1), (others, 0)):
        line = line_of(live, reader)
        assert line["totals"]["rejected"] == number
        assert [event[1:] for event in line["events"]] == [["rejected", -1, 1]] * number
        assert not line_of(live, reader)["events"]


def test_an_engine_that_is_gone_has_nothing_to_show() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    reader = live.join(ANYBODY)
    assert line_of(live, reader)["full"]  # nothing has come yet
    model.show(frame_of(4, range(2)))
    line_of(live, reader)
    model.state = ModelState.RESTARTING
    line = line_of(live, reader)
    assert (line["full"], line["blocks"], line["requests"], line["state"]) == (True, [], [], "restarting")
    assert line["ledger"]["free"] == 64  # as was planned
    model.show(frame_of(4, range(2), begins=False))  # left over from the old one
    assert line_of(live, reader)["full"]
    model.state = ModelState.READY
    model.show(frame_of(4, range(3)))
    assert len(line_of(live, reader)["blocks"]) == 3


def test_why_an_engine_ended_is_told_to_operators_at_once_also_without_a_change_of_its_state() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    operator, other = live.join(ANYBODY), live.join(tenant("a"))
    for failure in ("the engine process is ending", "the engine process has ended with status -9"):
        lost = ReplicaStats(ModelState.RESTARTING, failure, 0, 0, {}, EngineStats())
        model.counts = replace(model.counts, replicas=(lost,))
        assert line_of(live, other)["replicas"] == [] and live.states(other) == ("ready",)
        assert live.states(operator) != operator.states
        (row,) = line_of(live, operator)["replicas"]
        assert row["failure"] == failure and live.states(operator) == operator.states


def test_what_is_not_whole_is_not_shown() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    reader = live.join(ANYBODY)
    model.show(frame_of(8, range(2), is_whole=False))
    assert not line_of(live, reader)["blocks"]
    model.show(frame_of(8, range(2, 5), begins=False, tenants=[]))
    line = line_of(live, reader)
    assert line["full"] and [row[0] for row in line["blocks"]] == [0, 1, 2, 3, 4]


def test_the_last_reader_ends_the_watch() -> None:
    model = WatchedModel()
    live, _ = make_live(model, max_live_readers=2)
    first, second = live.join(ANYBODY), live.join(ANYBODY)
    with pytest.raises(ApiError, match="2 clients already read /live"):
        live.join(ANYBODY)
    live.leave(first)
    assert model.show is not None
    live.leave(second)
    assert model.show is None and live.num_readers == 0


def test_engine_settings_are_told_first() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    hello = live.hello(live.join(tenant("a")))
    assert hello["block_size"] == EngineConfig().resolved().block_size
    assert (hello["num_blocks"], hello["bytes_per_block"], hello["num_groups"]) == (64, 1024, 1)
    assert (hello["scope"], hello["tenant"], hello["model"]) == ("tenant", "a", "made up")


def test_only_operators_see_the_folder_of_the_disk_cache() -> None:
    model = WatchedModel()
    model.report = replace(model.report, disk_cache="/home/ada/blocks")
    live, _ = make_live(model)
    operator, other = (live.hello(live.join(who)) for who in (ANYBODY, tenant("a")))
    assert "/home/ada/blocks" in json.dumps(operator) and "/home/ada" not in json.dumps(other)


def test_a_block_that_goes_to_somebody_else_is_free_and_its_number_is_the_next() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    reader = live.join(tenant("a"))
    model.show(frame_of(50, range(40, 43)))
    assert [row[0] for row in line_of(live, reader)["blocks"]] == [0, 1, 2]
    others = packed([(41, 1, 1, 0, -2, 1), (49, 1, 1, 0, -2, 1)])
    model.show(frame_of(50, range(0), begins=False, tenants=["b"], blocks=others, block_times=b"\x00" * 16))
    line = line_of(live, reader)
    assert [row[:5] for row in line["blocks"]] == [[1, 0, 0, -1, -2]]
    assert line["ledger"]["used"] == 2
    model.show(frame_of(50, range(30, 31), begins=False, tenants=[]))
    assert [row[0] for row in line_of(live, reader)["blocks"]] == [1]


def test_whoever_comes_late_need_not_wait_and_whoever_is_first_waits_for_the_engine() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    first = live.join(ANYBODY)
    assert not first.wake.is_set()
    model.show(frame_of(8, range(2)))
    assert first.wake.is_set() and live.join(ANYBODY).wake.is_set()
    model.state = ModelState.RESTARTING
    assert live.join(ANYBODY).wake.is_set()


def test_a_request_is_shown_with_the_id_of_its_call() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    reader = live.join(ANYBODY)
    live.note_call("31", "req-1f2a")
    model.show(frame_of(4, range(1)))
    assert line_of(live, reader)["requests"] == [[0, "running", "a", 5, 4, 6, 0, 0, "req-1f2a", 0, 0]]
    model.show(frame_of(4, range(1), begins=False, requests=packed([(0, 1, 0, 5, 5, 7, 4, 0, 3, 1)]), ids=[""]))
    assert line_of(live, reader)["requests"] == [[0, "running", "a", 5, 5, 7, 4, 0, "req-1f2a", 3, 1]]
    model.show(frame_of(4, range(1), begins=False, requests=b"", ids=[], gone=packed([(0, 6, 8, 4, 3, 1)])))
    assert line_of(live, reader)["gone"] == [[0, 6, 8, 4, 3, 1]]


def test_ids_of_calls_are_forgotten_when_there_are_too_many() -> None:
    model = WatchedModel()
    live, _ = make_live(model)
    for number in range(MOST_CALLS + 31):
        live.note_call(str(number), f"req-{number}")
    reader = live.join(ANYBODY)
    requests = packed([(number, 1, 0, 5, 4, 6, 0, 0, 0, 0) for number in range(2)])
    model.show(frame_of(4, range(1), requests=requests, ids=["30", "31"]))
    assert [row[8] for row in line_of(live, reader)["requests"]] == ["", "req-31"]
