"""The oracle for paging: unbounded memory against the real manager, whatever happens and in whatever order.

The **model** is memory without end: a sequence is a list of tokens, and each position has the digest of all tokens up
to there, seeded by its salt. The **subject** is a `KVCacheManager` over a shadow cache, whose slots hold those digests.
Hypothesis plays the scheduler: it adds, admits, computes, forks, speculates, swaps, preempts, ends, resets, and lets
allocations fail, in any order that the protocol of `quire.scheduler` allows:

    between plans    add, collect a result (append, commit, fork), finish, drop, reset
    within a plan    running sequences in their order get room, and those behind may yield;
                     then, if nobody yielded, others are admitted or come back from the host
    end of a plan    tables change, moves and copies are carried out, tokens are written, then read

A rule that does not fit the phase ends the phase; one that finds nothing to act on lets the engine go on instead. So
every rule may always be drawn, and every step does something. Up to three plans are under way.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from quire.core.config import MemoryConfig
from quire.core.kept_block import KeptBlock
from quire.core.kv_spec import RECURRENT_WINDOW, KVCacheSpec, KVGroup
from quire.core.request import CacheScope, Request, RequestStatus
from quire.core.step import NO_BLOCK, BlockCopy, StepPlan, column
from quire.memory.block import BlockState
from quire.memory.block_hash import root_key
from quire.memory.block_pool import BlockPool
from quire.memory.manager import KVCacheManager
from quire.memory.prefix import PrefixEntry
from quire.memory.sequence import PrefixMatch
from support.block_picture import BlockPicture
from support.cache_picture import CachePicture
from support.covering import covering
from support.shadow import Content, ShadowCache, extend, root_digest
from support.shadow_disk import DiskChaos, ShadowDisk

VOCABULARY = 3
MAX_STEPS_UNDER_WAY = 3
MAX_SEQUENCES = 8
SCOPES = (
    CacheScope("a"),
    CacheScope("b"),
    CacheScope("a", salt="s"),
    CacheScope("b", salt="s"),
    CacheScope("a", salt="s", extra_keys=("k",)),
    CacheScope("a", extra_keys=("s", "k")),
)
SMALL = st.integers(0, 7)
TOKENS = st.sampled_from((0, 1, 2, 3, 5, 8, 16, 99))
LUCK = st.integers(0, 3)  # what ends or empties much is carried out one time in four
ANY = st.integers(0, 255)


@dataclass(frozen=True)
class Setting:
    """One kind of memory. `groups`: the attention of each KV group, with a + between them."""

    prefix_index: str
    eviction: str
    num_host_blocks: int
    groups: str
    hash_bits: int
    quota: int | None
    block_size: int
    num_disk_slots: int
    keeps_on_host: bool

    def __str__(self) -> str:
        quota = "free" if self.quota is None else f"quota{self.quota}"
        host = f"host{self.num_host_blocks}{'kept' * self.keeps_on_host}"
        return (
            f"{self.prefix_index}-{self.eviction}-{host}-{self.groups}"
            f"-{self.hash_bits}bit-{quota}-block{self.block_size}-disk{self.num_disk_slots}"
        )


AXES: dict[str, tuple[Any, ...]] = {
    "prefix_index": ("hash_chain", "radix_tree", "none"),
    "eviction": ("lru", "fifo", "priority"),
    "num_host_blocks": (0, 5, 200),
    "groups": ("full", "full+window", "window", "full+recurrent", "recurrent"),
    "hash_bits": (4, 128),
    "quota": (None, 2),
    "block_size": (1, 2, 4, 16),
    "num_disk_slots": (0, 3, 200),
    "keeps_on_host": (False, True),
}
SETTINGS = [Setting(*values) for values in itertools.product(*AXES.values())]


def scope_digest(scope: CacheScope) -> int:
    return root_digest(repr((scope.salt, scope.extra_keys)))


ROOT_DIGESTS = {root_key(scope): scope_digest(scope) for scope in SCOPES}


class FaultyPool(BlockPool):
    """A pool whose allocation number `fail_in`, counted from now, finds no block."""

    fail_in = 0
    has_failed = False

    def allocate(self, num_blocks: int) -> list[int] | None:
        self.fail_in -= 1
        if self.fail_in == 0:
            self.has_failed = True
            return None
        return super().allocate(num_blocks)


class Model:
    """One sequence in unbounded memory: all its tokens, those included that a step under way samples."""

    def __init__(self, request: Request, num_groups: int) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.digest = scope_digest(request.scope)
        self.contents: list[list[Content]] = [[] for _ in range(num_groups)]  # by group and position
        self.grow(request.tokens)

    def grow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.digest = extend(self.digest, token)
            for group, contents in enumerate(self.contents):
                contents.append(Content(group, len(self.tokens), self.digest))
            self.tokens.append(token)

    def next_tokens(self, num_tokens: int) -> list[int]:
        """What is sampled next: equal sequences go on equally."""
        digest, tokens = self.digest, []
        for _ in range(num_tokens):
            tokens.append(extend(digest, 1 << 20) % VOCABULARY)
            digest = extend(digest, tokens[-1])
        return tokens

    def branch(self, request: Request) -> Model:
        twin = copy.copy(self)
        twin.request = request
        twin.tokens = list(self.tokens)
        twin.contents = [list(contents) for contents in self.contents]
        return twin


@dataclass
class Work:
    """Tokens of one sequence in one plan, and what is sampled at their end."""

    model: Model
    start: int
    count: int
    samples: int
    sampled: list[int]
    contents: list[list[Content]]  # of the tokens and of everything before them, by group and position
    num_drafts: int
    generation: int


def operation(**arguments: st.SearchStrategy[int]) -> Callable[..., Any]:
    """A rule that is counted, and after which all books are checked."""

    def decorate(method: Callable[..., None]) -> Any:
        @functools.wraps(method)
        def run(machine: MemoryMachine, **drawn: int) -> None:
            machine.is_sound = False
            method(machine, **drawn)
            machine.check_books()
            machine.is_sound = True
            type(machine).num_rule_steps += 1

        return rule(**arguments)(run)

    return decorate


def is_at_rest(request: Request) -> bool:
    """Whether all known tokens but the last are computed, and no step of the request is under way."""
    return request.backlog == 1 and request.num_planned == request.num_computed


def pick(candidates: Sequence[Any], number: int) -> Any:
    return candidates[number % len(candidates)]


class MemoryMachine(RuleBasedStateMachine):
    """Plays the scheduler on one manager; subclasses name the setting."""

    setting: Setting
    num_rule_steps = 0
    is_sound = False

    @initialize(num_blocks=st.integers(8, 40), window=st.integers(1, 20))
    def start(self, num_blocks: int, window: int) -> None:
        setting = self.setting
        kinds: dict[str, Callable[[int], KVGroup]] = {
            "full": lambda layer: KVGroup((layer,)),
            "window": lambda layer: KVGroup((layer,), window),
            "recurrent": lambda layer: KVGroup((layer,), RECURRENT_WINDOW, recurrent=True),
        }
        groups = tuple(kinds[kind](layer) for layer, kind in enumerate(setting.groups.split("+")))
        self.block_size = setting.block_size
        self.spec = KVCacheSpec(setting.block_size, 1, 8, "float32", groups)
        config = MemoryConfig(
            num_blocks=num_blocks,
            num_host_blocks=setting.num_host_blocks,
            prefix_index=setting.prefix_index,
            eviction=setting.eviction,
            hash_bits=setting.hash_bits,
            hash_key=b"machine",
            max_cached_blocks_per_tenant=setting.quota,
            num_disk_slots=setting.num_disk_slots,
            keeps_on_host=setting.keeps_on_host,
            disk_write=("on_hit", "always")[window % 2],
        )
        seed = 100 * num_blocks + window
        self.disk = ShadowDisk(seed, DiskChaos.draw(random.Random(seed)))
        self.manager = KVCacheManager(self.spec, config, make_pool=FaultyPool)
        self.pool: FaultyPool = self.manager.pool  # type: ignore[assignment]
        self.shadow = ShadowCache(setting.block_size)
        self.longest = min(num_blocks // len(groups), 12 if setting.block_size < 4 else 6) * setting.block_size + 1
        self.waiting: list[Model] = []  # new ones, and those preempted or swapped out
        self.running: list[Model] = []  # in their order; branches of one sequence stand side by side
        self.tables: dict[Request, list[list[int]]] = {}  # as a worker knows them: from the differences
        self.past: deque[list[int]] = deque([[]], maxlen=12)  # token lists to begin like
        self.entry_contents: dict[PrefixEntry, list[Content]] = {}
        self.bundles: list[tuple[str, tuple[KeptBlock, ...]]] = []
        self.under_way: deque[list[Work]] = deque()
        self.num_added = 0
        self.picture = BlockPicture(self.manager, taken_every=1 + num_blocks % 3)
        self.news = CachePicture(self.manager, SCOPES, taken_every=1 + window % 3)
        self.clear_plan()
        self.is_sound = True

    # ---- phases -----------------------------------------------------------------------------------------------

    def clear_plan(self) -> None:
        self.is_planning = self.has_yielded = self.has_admitted = False
        self.place = 0  # running sequences before it have had their turn in this plan
        self.works: list[Work] = []
        self.copies: list[tuple[Model, BlockCopy]] = []  # that the plan must carry

    def plan_running(self) -> None:
        """Be where running sequences get room or yield."""
        if self.has_admitted:
            self.end_plan()
        self.begin_plan()

    def plan_admission(self) -> None:
        """Be where others are admitted."""
        if self.has_yielded:
            self.end_plan()
        self.begin_plan()
        self.place = len(self.running)

    def begin_plan(self) -> None:
        if not self.is_planning and len(self.under_way) == MAX_STEPS_UNDER_WAY:
            self.collect_result()
        self.is_planning = True

    def be_between_plans(self) -> None:
        if self.is_planning:
            self.end_plan()

    def go_on(self) -> None:
        """Do something that the engine would: admit, begin like an earlier sequence, take a step or its result."""
        self.be_between_plans()
        models, number = self.startable(), self.num_added
        if models and len(self.running) < 3:
            self.open(models[0], self.longest, patient=False)
        elif len(self.waiting) + len(self.running) < 3:
            prompt = self.like(number * 5)[: self.longest - 1 - number % 4] + [0] * (number % 3)
            self.new_model(prompt[: self.longest - 1] or [0], SCOPES[number % 3], number % 3)
        elif len(self.under_way) > number % MAX_STEPS_UNDER_WAY:
            self.collect_result()
        elif self.running:
            self.advance_all(1 + number % (2 * self.block_size))
        else:
            self.end(self.waiting[0])

    def like(self, number: int) -> list[int]:
        """Tokens of an earlier sequence, or of one that lives."""
        return pick([*self.past, *(model.tokens for model in self.running)], number)

    def startable(self) -> list[Model]:
        waiting = [m for m in self.waiting if self.manager.disk.landings.of(m.request) is None]
        return [m for m in waiting if m.request not in self.manager.memories and not m.request.num_late_results]

    def returnable(self) -> list[Model]:
        return [m for m in self.waiting if m.request in self.manager.memories and not m.request.num_late_results]

    @property
    def is_full(self) -> bool:
        return len(self.waiting) + len(self.running) >= MAX_SEQUENCES

    # ---- rules between plans ------------------------------------------------------------------------------------

    @operation(like=ANY, keep=TOKENS, tail=st.integers(0, VOCABULARY**6 - 1), kind=ANY)
    def add(self, like: int, keep: int, tail: int, kind: int) -> None:
        self.be_between_plans()
        if self.is_full:
            return self.go_on()
        own = [tail // VOCABULARY**place % VOCABULARY for place in range(6)] * self.block_size
        prompt = self.like(like)[: keep * self.block_size // 2] + own[: tail % (self.block_size + 2)]
        self.new_model(prompt[: self.longest - 1] or [0], pick(SCOPES, kind), kind % 3)

    def new_model(self, prompt: list[int], scope: CacheScope, priority: int) -> Model:
        request = Request(str(self.num_added), prompt, scope=scope, priority=priority)
        request.serial = self.num_added
        request.max_total_tokens = max(self.longest, len(prompt) + 1)
        self.num_added += 1
        model = Model(request, len(self.spec.groups))
        self.waiting.append(model)
        return model

    @operation()
    def collect(self) -> None:
        self.be_between_plans()
        self.collect_result() if self.under_way else self.go_on()

    @operation(which=ANY, luck=LUCK)
    def finish(self, which: int, luck: int) -> None:
        self.be_between_plans()
        models = self.running + self.waiting
        self.go_on() if luck > 1 or not models else self.end(pick(models, which))

    @operation(which=ANY, luck=LUCK)
    def drop(self, which: int, luck: int) -> None:
        """A sequence fails, wherever it is: nothing that it computed, and that no other holds, may be hit any more."""
        self.be_between_plans()
        models = self.running + self.waiting
        if not models or luck:
            return self.go_on()
        model = pick(models, which)
        held = {b for blocks in self.held(model) for b in blocks} if model.request in self.manager.memories else set()
        self.manager.disk.end_loads(model.request)
        name = model.request.request_id
        own = [block for block in self.pool.blocks if block.entry is not None and block.request_id == name]
        own = [block for block in own if block.ref_count == (block.block_id in held)]
        self.manager.drop(model.request)
        assert all(block.state is BlockState.FREE for block in own)
        self.forget(model)

    @operation(luck=LUCK)
    def reset(self, luck: int) -> None:
        self.be_between_plans()
        if luck:
            return self.go_on()
        self.manager.reset()
        assert self.pool.num_cached == 0
        assert len(self.manager.index) == 0

    @operation(luck=LUCK)
    def watch_anew(self, luck: int) -> None:
        """Somebody else begins to watch, and is told what is there a few blocks at a time, while all goes on."""
        if not luck:
            self.picture = BlockPicture(self.manager, taken_every=self.picture.taken_every)
        self.go_on()

    @operation(like=ANY, kind=ANY, luck=LUCK)
    def keep_a_prompt(self, like: int, kind: int, luck: int) -> None:
        """An operator has a prompt written to the disk."""
        self.be_between_plans()
        jobs, tokens = self.manager.jobs, self.like(like)
        jobs.keep("kept", array("i", tokens), pick(SCOPES, kind), wants_slots=True)
        found = jobs.figures()["kept"]
        assert max(found.num_cached_tokens, found.num_stored_tokens) <= len(tokens)
        assert len(found.slots) <= len(self.disk.slots)
        if not luck:
            jobs.end("kept")
        self.go_on()

    @operation(which=ANY, luck=LUCK)
    def take_a_bundle_in(self, which: int, luck: int) -> None:
        """Blocks that were on disk once come in again, some at a time."""
        self.be_between_plans()
        jobs = self.manager.jobs
        if luck == 0 or not self.bundles:
            self.bundles.append(self.disk.pack())
        name, blocks = pick(self.bundles, which)
        before = jobs.figures()[name].num_seen if name in jobs.figures() else 0
        some = blocks[before : before + 3]
        jobs.take(name, name, some)
        found = jobs.figures()[name]
        assert found.num_seen == before + len(some) >= found.num_known + found.num_left_out
        if not some:
            jobs.end(name)
        self.go_on()

    @operation(nth=st.integers(1, 3))
    def fail_allocation(self, nth: int) -> None:
        """The nth allocation from now on fails; then goes on with something that may allocate."""
        self.pool.fail_in = nth
        self.go_on()

    # ---- rules within a plan ------------------------------------------------------------------------------------

    @operation(which=ANY, count=TOKENS)
    def compute(self, which: int, count: int) -> None:
        """Give a running sequence room for some tokens, and take them up."""
        model = self.next_in_turn(which)
        if model is None:
            return self.go_on()
        self.advance(model, 1 + count)

    @operation(most=TOKENS)
    def step(self, most: int) -> None:
        """A whole step of the engine, and the result of the oldest one under way."""
        self.advance_all(1 + most)
        if self.under_way:
            self.collect_result()

    @operation(which=ANY, branches=st.integers(2, 3))
    def open_branches(self, which: int, branches: int) -> None:
        """Compute all that is known, and let the result open into several sequences."""
        model = self.next_in_turn(which)
        if model is None or self.is_full:
            return self.go_on()
        request = model.request
        if request.num_planned + request.backlog < request.max_total_tokens - 1 and self.allocate(
            model, request.num_planned + request.backlog
        ):
            self.take_up(model, request.backlog, samples=branches)
            self.place = self.running.index(model) + 1

    @operation(which=ANY, num_drafts=st.integers(1, 6), num_right=SMALL)
    def speculate(self, which: int, num_drafts: int, num_right: int) -> None:
        """Compute the last known token and some guessed ones, of which the first few are right."""
        model = self.next_in_turn(which, is_at_rest)
        if model is None:
            return self.go_on()
        request = model.request
        num_drafts = min(num_drafts, request.max_total_tokens - 2 - request.num_planned)
        if num_drafts > 0 and self.allocate(model, request.num_planned + 1 + num_drafts):
            sampled = model.next_tokens(min(num_right, num_drafts) + 1)
            wrong = [VOCABULARY] * (num_drafts + 1 - len(sampled))
            self.take_up(model, 1, samples=1, drafts=sampled[:-1] + wrong, sampled=sampled)
            self.place = self.running.index(model) + 1

    @operation(num_beams=st.integers(1, 3), gives_up=st.booleans(), swaps=st.booleans())
    def move_together(self, num_beams: int, gives_up: bool, swaps: bool) -> None:
        """Like beams: those next in turn each get room for a token; if one finds none, all of them yield."""
        if self.next_in_turn(0) is None:
            return self.go_on()
        beams = self.in_turn()[:num_beams]
        if all(self.allocate(beam, beam.request.num_planned + 1) for beam in beams) and not gives_up:
            for beam in beams:
                self.take_up(beam, 1, samples=1)
            self.place = self.running.index(beams[-1]) + 1
            return
        for beam in beams:
            if not swaps or not self.swap(beam):
                self.recompute(beam)
        self.end_plan()

    @operation(num_beams=st.integers(1, 3))
    def resume_together(self, num_beams: int) -> None:
        """Like beams: those that wait run again all together; where one finds no room, none of them does."""
        self.plan_admission()
        resumed: list[Model] = []
        for model in [model for model in self.waiting if not model.request.num_late_results][:num_beams]:
            request = model.request
            if request in self.manager.memories:
                found_room = self.come_back(model)
            else:
                match = self.manager.match_prefix(request)
                found_room = self.allocate(model, match.num_tokens + 1, match)
                if found_room:
                    self.run(model, match.num_tokens)
            if not found_room:
                for other in resumed:
                    self.recompute(other)
                return self.end_plan()
            resumed.append(model)
        if not resumed:
            self.go_on()

    @operation(which=ANY)
    def preempt(self, which: int) -> None:
        models = self.may_yield()
        self.recompute(pick(models, which)) if models else self.go_on()

    @operation(which=ANY)
    def swap_out(self, which: int) -> None:
        models = self.may_yield()
        self.swap(pick(models, which)) if models else self.go_on()

    @operation(which=ANY, count=TOKENS, patient=st.booleans())
    def admit(self, which: int, count: int, patient: bool) -> None:
        self.plan_admission()
        models = self.startable()
        self.open(pick(models, which), count, patient=patient) if models else self.go_on()

    @operation(which=ANY)
    def load(self, which: int) -> None:
        """A waiting sequence asks the disk for what it has, and waits until that has come, or is given up."""
        self.plan_admission()
        models = self.startable()
        if not models:
            return self.go_on()
        request = pick(models, which).request
        available, in_use = self.pool.num_available, self.pool.num_in_use
        if not self.manager.start_load(request, self.manager.match_prefix(request)):
            assert (self.pool.num_available, self.pool.num_in_use) == (available, in_use)

    @operation(luck=LUCK)
    def evict_all(self, luck: int) -> None:
        """The device forgets all that no sequence holds, as for one that needs the whole pool; the disk does not."""
        self.be_between_plans()
        if luck:
            return self.go_on()
        for block in list(self.pool.cached_blocks()):
            entry = self.pool.unpublish(block.block_id)
            assert entry is not None
            self.manager.index.discard(entry)

    @operation(luck=LUCK)
    def give_up_loads(self, luck: int) -> None:
        """A running sequence needs the room: every block that a load holds comes back at once."""
        self.begin_plan()
        if luck or not self.manager.disk.give_up_loads():
            return self.go_on()
        assert not list(self.manager.disk.landings.held_blocks())

    @operation(which=ANY, count=TOKENS)
    def swap_in(self, which: int, count: int) -> None:
        self.plan_admission()
        models = self.returnable()
        if not models:
            return self.go_on()
        model = pick(models, which)
        if self.come_back(model):
            self.advance(model, count)

    @operation(luck=LUCK)
    def exhaust(self, luck: int) -> None:
        """A sequence takes all that is left; then there is nothing for anybody."""
        self.plan_admission()
        size, num_groups = self.block_size, len(self.spec.groups)
        room = self.pool.num_available // num_groups * size
        if not room or luck or self.pool.fail_in > 0 or self.is_full:
            return self.go_on()
        unheard = [VOCABULARY + 1 + self.num_added]
        model = self.new_model(unheard * room, SCOPES[0], 1)
        assert self.open(model, room, patient=False)
        assert self.pool.num_available < num_groups
        one_more = Request("one more", unheard)
        before = self.books()
        assert not self.manager.allocate_slots(one_more, 1, PrefixMatch([], 0, None))
        assert self.books() == before

    # ---- what the rules do ----------------------------------------------------------------------------------------

    def next_in_turn(self, number: int, condition: Callable[[Request], bool] = lambda request: True) -> Model | None:
        """Choose among those whose turn comes; where there are none, steps go by until there are."""
        while True:
            self.plan_running()
            models = [model for model in self.in_turn() if condition(model.request)]
            if models:
                return pick(models, number)
            if not self.place and not self.under_way:
                return None
            self.end_plan()
            if self.under_way:
                self.collect_result()

    def in_turn(self) -> list[Model]:
        return [
            model
            for model in self.running[self.place :]
            if model.request.backlog and model.request.num_planned < model.request.max_total_tokens - 1
        ]

    def may_yield(self) -> list[Model]:
        """Those behind; but nobody frees a block in the very plan that copies it to another of its holders.

        The scheduler keeps that rule because sequences that share a tail stand side by side.
        """
        self.plan_running()
        sources = {pair.source for _, pair in self.copies}
        return [model for model in self.running[self.place :] if sources.isdisjoint(itertools.chain(*self.held(model)))]

    def advance_all(self, most: int) -> None:
        """Plan a whole step: everybody in turn computes what there is room for, the last yields where there is none."""
        self.plan_running()
        while models := self.in_turn():
            if self.advance(models[0], most):
                continue
            victims = self.may_yield()
            if not victims:
                break
            self.recompute(victims[-1])
        self.end_plan()

    def advance(self, model: Model, most: int) -> bool:
        """Give a sequence room for some tokens and take them up; False if there is no room."""
        request = model.request
        count = min(most, request.backlog, request.max_total_tokens - 1 - request.num_planned)
        if count <= 0:
            return False
        may_write = request.backlog == 1 and request.num_planned < request.num_slots
        if not may_write and not self.allocate(model, request.num_planned + count):
            return False
        self.take_up(model, count, samples=1)
        self.place = self.running.index(model) + 1
        return True

    def recompute(self, model: Model) -> None:
        self.leave(model)
        self.manager.free(model.request)
        model.request.forget_progress()
        model.request.num_preemptions += 1
        model.request.become(RequestStatus.PREEMPTED)

    def swap(self, model: Model) -> bool:
        """Move a running sequence to the host; False if there is no room."""
        request, host, behind = model.request, self.manager.host, self.num_behind_windows(model)
        num_logical = -(-request.num_planned // self.block_size)
        before, room = self.books(), host.num_blocks - host.num_in_use
        needed = sum(block_id != NO_BLOCK for table in self.held_tables(model) for block_id in table[:num_logical])
        if not self.manager.swap_out(request):
            assert needed - behind > room or host.keeps
            assert behind or self.books() == before
            return False
        assert host.keeps or needed - behind == room - (host.num_blocks - host.num_in_use)
        self.leave(model)
        request.num_preemptions += 1
        request.become(RequestStatus.SWAPPED)
        return True

    def come_back(self, model: Model) -> bool:
        """Move a sequence back from the host; False if there is no room."""
        request, behind = model.request, self.num_behind_windows(model)
        before, available = self.books(), self.pool.num_available
        needed = self.manager.num_blocks_needed(request, request.num_planned)
        if not self.manager.swap_in(request):
            assert self.take_failure() or needed > available
            assert behind or self.books() == before
            return False
        assert available - self.pool.num_available <= needed
        self.run(model, request.num_planned)
        return True

    def allocate(self, model: Model, end: int, match: PrefixMatch | None = None) -> bool:
        """Ask for room, and hold the answer against what the books say."""
        request, manager, pool = model.request, self.manager, self.pool
        needed = manager.num_blocks_needed(request, end, match)
        shared = self.shared_places(model, match)
        behind = self.num_behind_windows(model)
        before, available = self.books(), pool.num_available
        if not manager.allocate_slots(request, end, match):
            assert self.take_failure() or needed > pool.num_available
            assert behind or self.books() == before
            return False
        assert behind or available - pool.num_available == needed
        tables = manager.block_tables(request)
        for group, index, source in shared:
            assert tables[group][index] != source, "a shared block is about to be written"
            if all(move.device_block != tables[group][index] for move in manager.moves_in):
                self.copies.append((model, BlockCopy(source, tables[group][index])))
        assert min(map(len, tables)) * self.block_size >= end
        return True

    def shared_places(self, model: Model, match: PrefixMatch | None) -> list[tuple[int, int, int]]:
        """Where the next token is written into a block that somebody else holds: group, index, block."""
        if match is not None:
            index = len(match.entries) - 1
            tails = match.entries[-1].block_ids if match.ends_within_block(self.block_size) else []
            return [(group, index, tail) for group, tail in enumerate(tails) if self.pool.blocks[tail].ref_count]
        index, offset = divmod(model.request.num_planned, self.block_size)
        tails = [table[index] for table in self.held_tables(model)] if offset else []
        return [(group, index, tail) for group, tail in enumerate(tails) if self.pool.blocks[tail].ref_count > 1]

    def open(self, model: Model, count: int, *, patient: bool) -> bool:
        """Admit with what the cache holds; False if there is no room, or if it waits for somebody's block."""
        self.plan_admission()
        request = model.request
        match = self.manager.match_prefix(request)
        if self.setting.groups == "full":
            assert match.num_tokens == self.longest_hit(model)
        if self.spec.has_recurrent_layers:
            assert match.num_tokens % self.block_size == 0, "only the end of a block has a state"
        assert match.num_tokens < len(request.tokens), "nothing would yield a logit"
        if patient and match.frontier is not None and self.manager.is_being_computed(match.frontier):
            return False
        count = min(count, len(request.tokens) - match.num_tokens)
        if not self.allocate(model, match.num_tokens + count, match):
            return False
        self.run(model, match.num_tokens)
        if count:
            self.take_up(model, count, samples=1)
        return True

    def longest_hit(self, model: Model) -> int:
        """How many tokens are there to be hit, going by what each published block stands for."""
        entries = [block.entry for block in self.pool.blocks if block.entry is not None]
        copies = [(block.entry, block.group) for block in self.manager.host.copies() if block.entry is not None]
        entries += [entry for entry, group in copies if self.manager.host.place(entry, group) != NO_BLOCK]
        published = {self.contents_of(entry)[-1].digest for entry in entries}
        num_known = len(model.request.tokens)
        ends = itertools.takewhile(
            lambda end: model.contents[0][end - 1].digest in published,
            range(self.block_size, num_known + 1, self.block_size),
        )
        return min(max(ends, default=0), num_known - 1)

    def run(self, model: Model, start: int) -> None:
        request = model.request
        self.manager.disk.end_loads(request)
        self.waiting.remove(model)
        self.running.append(model)
        request.become(RequestStatus.RUNNING)
        request.row = request.serial * 1000 + request.branch
        request.num_computed = request.num_planned = start
        request.backlog = len(request.tokens) - start
        self.tables[request] = [[] for _ in self.spec.groups]
        self.has_admitted = True
        self.place = len(self.running)

    def take_up(
        self, model: Model, count: int, samples: int, drafts: Sequence[int] = (), sampled: Sequence[int] = ()
    ) -> None:
        request = model.request
        start = request.num_planned
        contents = model.contents
        request.backlog -= count
        if request.backlog:
            samples = 0
        elif samples == 1 and not drafts:
            sampled = model.next_tokens(1)
            request.backlog = 1
        if drafts:
            guess = model.branch(request)
            guess.grow(drafts)
            contents = guess.contents
        count += len(drafts)
        request.num_planned += count
        # The lists of the model only grow, so the plan may share them.
        self.works.append(Work(model, start, count, samples, list(sampled), contents, len(drafts), request.generation))
        model.grow(sampled)

    def leave(self, model: Model) -> None:
        """A running sequence loses its row."""
        request = model.request
        self.running.remove(model)
        self.waiting.append(model)
        self.has_yielded = True
        request.num_late_results = sum(work.model is model for works in self.under_way for work in works)
        request.row = -1
        del self.tables[request]
        self.copies = [(owner, pair) for owner, pair in self.copies if owner is not model]

    def end(self, model: Model) -> None:
        self.manager.disk.end_loads(model.request)
        if model.request in self.manager.memories:
            self.manager.free(model.request)
        self.forget(model)

    def forget(self, model: Model) -> None:
        request = model.request
        (self.running if model in self.running else self.waiting).remove(model)
        self.tables.pop(request, None)
        self.past.append(model.tokens[: self.longest])
        request.row = -1
        request.become(RequestStatus.FINISHED)

    # ---- results ----------------------------------------------------------------------------------------------

    def collect_result(self) -> None:
        for work in self.under_way.popleft():
            request = work.model.request
            if request.num_late_results:
                request.num_late_results -= 1
            if request.is_finished:
                continue
            if work.samples > 1:
                self.open_into(work)
                continue
            if work.generation != request.generation:
                request.backlog += len(work.sampled)
            elif work.num_drafts:
                request.num_computed += len(work.sampled)
                request.num_planned = request.num_computed
                request.backlog = 1
            else:
                request.num_computed += work.count
            self.append(work.model, work.sampled)
        self.manager.note_step(0, 0, self.disk.collect(self.shadow))
        self.check_published()

    def append(self, model: Model, tokens: Sequence[int]) -> None:
        """Append tokens, commit what is computed, and end where the longest length is reached."""
        request = model.request
        request.tokens.extend(tokens)
        if request.row >= 0:
            self.manager.commit(request, request.num_computed)
        if len(request.tokens) >= request.max_total_tokens:
            self.end(model)

    def open_into(self, work: Work) -> None:
        model, request = work.model, work.model.request
        if request.row < 0 or work.generation != request.generation:
            if work.generation == request.generation:
                request.num_computed += work.count - 1
                request.num_planned = request.num_computed
                request.backlog = 1
            return
        request.num_computed += work.count
        twins = [self.fork(model) for _ in range(1, work.samples)]
        first = model.next_tokens(1)[0]
        for branch, twin in enumerate([model, *twins]):
            token = (first + branch) % VOCABULARY
            twin.request.backlog = 1
            twin.grow([token])
            self.append(twin, [token])

    def fork(self, model: Model) -> Model:
        request = model.request
        self.num_added += 1
        twin = model.branch(request.open_branch(self.num_added))
        available = self.pool.num_available
        self.manager.fork(request, twin.request)
        assert self.pool.num_available >= available, "a fork takes no block"
        twin.request.row = request.serial * 1000 + self.num_added
        self.tables[twin.request] = [[] for _ in self.spec.groups]
        self.running.insert(self.running.index(model) + 1, twin)
        return twin

    # ---- the end of a plan --------------------------------------------------------------------------------------

    def end_plan(self) -> None:
        if not self.works and not (self.manager.has_moves or self.manager.has_transfers):
            return self.clear_plan()  # nothing to plan: the changes of tables wait for the next one
        changes = self.manager.take_changes()
        for request, group, index, block_id in changes.table_entries:
            if request.row >= 0:
                table = self.tables[request][group]
                table.extend([NO_BLOCK] * (index + 1 - len(table)))
                table[index] = block_id
        assert {model.request for model in self.running} == set(self.tables)
        for request, tables in self.tables.items():
            for known, table in zip(tables, self.manager.block_tables(request), strict=True):
                assert known[: len(table)] == table
        assert sorted(changes.copies) == sorted(pair for _, pair in self.copies)
        works = self.works
        plan = StepPlan(
            0,
            column(*(work.model.request.row for work in works)),
            column(*(work.start for work in works)),
            column(*(work.count for work in works)),
            column(*(work.samples for work in works)),
            moves_out=tuple(changes.moves_out),
            copies=tuple(changes.copies),
            moves_in=tuple(changes.moves_in),
            transfers=changes.transfers,
        )
        self.disk.apply(plan, self.shadow)
        self.shadow.apply(plan)
        for work in works:  # as in a layer of a model: all are written before any is read
            self.write(work)
        for work in works:
            self.read(work.model.request, work.contents, work.start, work.start + work.count)
        at_rest = {work.model.request for work in works}
        for model in self.running:
            if model.request not in at_rest:
                self.read(model.request, model.contents, model.request.num_computed, model.request.num_computed)
        self.under_way.append(works)
        self.clear_plan()
        self.check_published()

    def write(self, work: Work) -> None:
        size, blocks = self.block_size, self.pool.blocks
        for table, contents in zip(self.tables[work.model.request], work.contents, strict=True):
            for index in range(work.start // size, (work.start + work.count - 1) // size + 1):
                block = blocks[table[index]]
                assert block.ref_count == 1 and block.entry is None, "a block is written that others may see"
            for content in contents[work.start : work.start + work.count]:
                self.shadow.write(table, content)

    def read(self, request: Request, contents: list[list[Content]], start: int, end: int) -> None:
        """Read all that queries at `start` … need, up to `end`."""
        for group, kind in enumerate(self.spec.groups):
            table = self.tables[request][group]
            for content in contents[group][kind.first_needed(start) : end]:
                self.shadow.read(table, content)

    # ---- what must hold -------------------------------------------------------------------------------------------

    def check_books(self) -> None:
        manager = self.manager
        manager.check()
        self.picture.follow()
        if self.setting.hash_bits == 128:  # with fewer, blocks share their names
            self.news.follow()
        ledger = manager.ledger()
        held = sum(memory.num_held for memory in manager.memories.values())
        held += len(list(manager.disk.landings.held_blocks()))
        assert ledger.used_blocks + ledger.blocks_saved_by_sharing == held
        for model in self.running + self.waiting:
            request = model.request
            request.check()
            assert (request in manager.memories) == (request.row >= 0 or request.status is RequestStatus.SWAPPED)
        for request, memory in manager.memories.items():
            if memory.frontier is not None:  # or somebody would wait for a block that nobody computes
                start = memory.num_published * self.block_size
                block = request.tokens[start : start + self.block_size].tobytes()
                assert memory.frontier[1] == block and len(block) == 4 * self.block_size

    def check_published(self) -> None:
        """What may be hit holds exactly what its path says."""
        for entry in self.manager.index:
            for group, block_id in enumerate(entry.block_ids):
                if block_id != NO_BLOCK:
                    contents = self.contents_of(entry)
                    table = [block_id] * (contents[0].position // self.block_size + 1)
                    for content in contents:
                        self.shadow.read(table, Content(group, content.position, content.digest))
            for group in range(len(entry.block_ids)):
                host_id = self.manager.host.place(entry, group)
                for content in self.contents_of(entry) if host_id != NO_BLOCK else ():
                    self.shadow.read_host(host_id, Content(group, content.position, content.digest))

    def contents_of(self, entry: PrefixEntry) -> list[Content]:
        known = self.entry_contents.get(entry)
        if known is None:
            parent = entry.parent
            assert parent is not None
            if parent.parent is None:
                digest, position = ROOT_DIGESTS[parent.key], 0
            else:
                last = self.contents_of(parent)[-1]
                digest, position = last.digest, last.position + 1
            known = self.entry_contents[entry] = []
            for token in array("i", entry.key):
                digest = extend(digest, token)
                known.append(Content(0, position, digest))
                position += 1
        return known

    def books(self) -> object:
        """All that an operation without room must leave as it was."""
        manager = self.manager
        return (
            [(block.ref_count, block.entry, block.tenant, block.priority) for block in self.pool.blocks],
            manager.host.num_in_use,
            [(request, manager.block_tables(request), request.num_slots) for request in manager.memories],
            [(memory.num_published, memory.host_blocks, memory.frontier) for memory in manager.memories.values()],
            len(manager.index),
        )

    def take_failure(self) -> bool:
        failed, self.pool.has_failed = self.pool.has_failed, False
        return failed

    def held_tables(self, model: Model) -> list[list[int]]:
        return self.manager.block_tables(model.request)

    def held(self, model: Model) -> Iterator[list[int]]:
        for table in self.held_tables(model):
            yield [block_id for block_id in table if block_id != NO_BLOCK]

    def num_behind_windows(self, model: Model) -> int:
        """Blocks that the sequence gives back at its next turn."""
        memory = self.manager.memories.get(model.request)
        if memory is None:
            return 0
        num_blocks = 0
        for group, kind in enumerate(self.spec.groups):
            first, table = kind.first_needed(model.request.num_computed) // self.block_size, memory.tables[group]
            held = table.held if memory.host_blocks is None else memory.host_blocks[group]
            num_blocks += min(max(0, first - table.num_given_back), len(held))
        return num_blocks

    def teardown(self) -> None:
        """When all sequences have ended, nothing is in use; when the cache is reset, nothing is left."""
        if not self.is_sound:
            return
        self.be_between_plans()
        while self.under_way:
            self.collect_result()
        for model in self.running + self.waiting:
            self.end(model)
        self.end_plan()
        self.check_books()
        assert (self.pool.num_in_use, self.manager.host.num_in_use, len(self.manager.memories)) == (0, 0, 0)
        self.manager.reset()
        self.check_books()
        assert (self.pool.num_free, len(self.manager.index)) == (self.pool.num_blocks, 0)


def run_machine(setting: Setting, *, num_examples: int, num_steps: int, first_seed: int | None = None) -> int:
    """Run the machine of one setting; return how many rules were carried out."""
    machine = type(f"MemoryMachine[{setting}]", (MemoryMachine,), {"setting": setting})
    if first_seed is not None:
        machine = seed(first_seed)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            suppress_health_check=list(HealthCheck),
        ),
    )
    return machine.num_rule_steps


@pytest.mark.parametrize("setting", [Setting(*values) for values in covering(*AXES.values())], ids=str)
def test_every_read_finds_what_unbounded_memory_would_hold(
    setting: Setting, record_property: Callable[[str, object], None]
) -> None:
    num_rule_steps = run_machine(setting, num_examples=10, num_steps=50, first_seed=zlib.crc32(str(setting).encode()))
    record_property("rule_steps", num_rule_steps)
    assert num_rule_steps >= 400


STEPS_OF_ALL_SETTINGS = 1_000_000
NUM_PARTS = 216  # one test for each of thousands of settings would take longer to collect than the short tests


@pytest.mark.long
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_read_finds_what_unbounded_memory_would_hold_in_a_million_steps(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    """The number of steps of all settings together is printed at the end of the run."""
    share = -(-STEPS_OF_ALL_SETTINGS // len(SETTINGS))
    for setting in SETTINGS[part::NUM_PARTS]:
        num_rule_steps = 0
        while num_rule_steps < share:
            num_rule_steps += run_machine(setting, num_examples=8, num_steps=100)
        record_property("rule_steps", num_rule_steps)
