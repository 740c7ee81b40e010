"""Router: chooses which of several engines gets a request.

    round_robin    each engine in turn
    least_loaded   the engine with the fewest requests
    least_work     the engine with the least work: the tokens of this prompt that it would compute, the tokens of other
                   prompts that it has yet to compute, and the requests that it generates for

An engine that holds the prompt's first blocks has less to compute, so equal prefixes stay together. When that engine
has fallen behind by more than the prefix would save, another engine is cheaper, but only for this request: no mode is
switched, and there is no threshold. docs/design/routing.md explains the weight of a request.

    choose ──────────────► counts the request at once: the next choice, a microsecond later, sees it
    note(news) ──────────► updates the blocks that an engine can hit; an awaited block among them is computed
    started, finished ───► the prompt of a request is computed; a request has ended
    routes ──────────────► how many requests an engine was sent, and why (`ROUTES`)

Blocks of requests in flight count as held by the engine that they were sent to, so equal prefixes stay together even
before they are computed. A wrong entry costs time, but never causes a wrong token, because the engine compares tokens
itself. So digests suffice, and no tree of texts is kept. The router's memory is bounded by the blocks that engines hold
and by the requests in flight.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Final, NamedTuple

from quire.core.errors import InvalidConfigError, InvariantError
from quire.core.request import DEFAULT_SCOPE, CacheScope
from quire.memory.cache_journal import CacheNews
from quire.routing.held_blocks import HeldBlocks
from quire.routing.prompts import PromptNames, RoutedPrompt

ROUND_ROBIN, LEAST_LOADED, LEAST_WORK = "round_robin", "least_loaded", "least_work"
PREFIX, LOAD, NEW, ONLY = "prefix", "load", "new", "only"
ROUTES: Final = (PREFIX, LOAD, NEW, ONLY)
"""Why an engine was chosen: no other holds more of the prompt; another does, but has more work; none holds any block;
no other takes requests."""
REQUEST_WEIGHT: Final = 128
"""A request in flight counts as this many waiting tokens, because each step also generates for it."""


class Loan(NamedTuple):
    """An engine that holds more leading blocks of a prompt than the chosen engine knows."""

    lender: int
    num_held: int
    num_known: int


class RequestUnderWay:
    """A request sent to an engine. `awaited`, `num_waiting_tokens`: its blocks and tokens yet to be computed."""

    __slots__ = ("awaited", "digests", "num_waiting_tokens")

    def __init__(self, prompt: RoutedPrompt, num_known: int, num_waiting_tokens: int) -> None:
        self.digests = prompt.digests
        self.awaited = set(prompt.digests[num_known:])
        self.num_waiting_tokens = num_waiting_tokens


class Target:
    """One engine, as the router knows it."""

    def __init__(self, block_size: int) -> None:
        self.held = HeldBlocks()
        self.is_open = True
        self.num_waiting_tokens = 0  # tokens of prompts that are yet to be computed
        self.last_chosen = 0
        self.requests: dict[str, RequestUnderWay] = {}
        self._block_size = block_size
        self._expected: Counter[bytes] = Counter()  # blocks of requests in flight, with the number of requests
        self._known: set[bytes] = set()  # held or expected, in one set: prompts have thousands of blocks
        self._awaited: dict[bytes, list[RequestUnderWay]] = {}  # the requests that have yet to compute a block

    def num_known(self, prompt: RoutedPrompt) -> int:
        """Return how many leading blocks are held, or will be once the requests in flight are computed."""
        return len(tuple(takewhile(self._known.__contains__, prompt.digests)))

    def num_to_compute(self, prompt: RoutedPrompt, num_known: int) -> int:
        """Return how many tokens of a prompt the engine would compute: at least the last one."""
        return max(min(1, prompt.num_tokens), prompt.num_tokens - num_known * self._block_size)

    def work(self, prompt: RoutedPrompt, num_known: int) -> int:
        """Return the engine's work in tokens, if it gets a prompt. Does not mutate; O(1)."""
        own = self.num_to_compute(prompt, num_known)
        return own + self.num_waiting_tokens + REQUEST_WEIGHT * len(self.requests)

    def num_held(self, prompt: RoutedPrompt) -> int:
        """Return how many leading blocks are held now. Does not mutate; O(blocks)."""
        return len(tuple(takewhile(self.held.__contains__, prompt.digests)))

    def take(self, request_id: str, prompt: RoutedPrompt, num_known: int) -> None:
        """Count a request. Mutates; O(blocks)."""
        request = RequestUnderWay(prompt, num_known, self.num_to_compute(prompt, num_known))
        self.requests[request_id] = request
        self.num_waiting_tokens += request.num_waiting_tokens
        self._expected.update(request.digests)
        self._known.update(request.digests)
        for digest in request.awaited:
            self._awaited.setdefault(digest, []).append(request)

    def note(self, news: CacheNews) -> bool:
        """Process a report; return whether a survey must be requested. Mutates; O(blocks in the report)."""
        change = self.held.note(news)
        if change is None:
            return True
        self._known.difference_update(digest for digest in change.removed if digest not in self._expected)
        self._known.update(change.added)
        if self._awaited:
            for digest in change.added:
                for request in self._awaited.pop(digest, ()):
                    request.awaited.remove(digest)
                    self._wait_less(request, self._block_size)
        return False

    def start(self, request_id: str) -> None:
        """Note that the prompt of a request is computed. Mutates; O(blocks that it computed)."""
        request = self.requests[request_id]
        self._wait_less(request, request.num_waiting_tokens)
        for digest in request.awaited:
            waiters = self._awaited[digest]
            waiters.remove(request)
            if not waiters:
                del self._awaited[digest]
        request.awaited.clear()

    def end(self, request_id: str) -> None:
        """Forget a request. Mutates; O(blocks)."""
        self.start(request_id)
        expected = self._expected
        for digest in self.requests.pop(request_id).digests:
            if expected[digest] > 1:
                expected[digest] -= 1
                continue
            del expected[digest]
            if digest not in self.held:
                self._known.discard(digest)

    def _wait_less(self, request: RequestUnderWay, num_tokens: int) -> None:
        num_tokens = min(num_tokens, request.num_waiting_tokens)
        request.num_waiting_tokens -= num_tokens
        self.num_waiting_tokens -= num_tokens

    def check(self) -> None:
        """Raise `InvariantError` unless the counts are those of the requests."""
        requests = self.requests.values()
        if self.num_waiting_tokens != sum(request.num_waiting_tokens for request in requests):
            raise InvariantError(f"{self.num_waiting_tokens} tokens wait, but the requests have another number")
        if self._expected != Counter(digest for request in requests for digest in request.digests):
            raise InvariantError("the expected blocks are not those of the requests")
        num_unheld = sum(digest not in self.held for digest in self._expected)
        if len(self._known) != len(self.held) + num_unheld or not self._expected.keys() <= self._known:
            raise InvariantError("the known blocks are not those that are held or expected")
        awaited = Counter(digest for request in requests for digest in request.awaited)
        if {digest: len(waiters) for digest, waiters in self._awaited.items()} != awaited:
            raise InvariantError("the awaited blocks are not those of the requests")


Cost = Callable[[Target, RoutedPrompt, int], int]

COSTS: Final = MappingProxyType[str, Cost](
    {
        ROUND_ROBIN: lambda target, prompt, num_known: 0,
        LEAST_LOADED: lambda target, prompt, num_known: len(target.requests),
        LEAST_WORK: Target.work,
    }
)
"""The cost of an engine for a prompt, by policy; at equal costs, the engine chosen least recently is taken."""
ROUTERS: Final = tuple(COSTS)


class Router:
    """Chooses engines for requests; the caller numbers the engines. For one thread.

    `block_size`, `hash_key`: the same for all engines.

    >>> router = Router(block_size=2, hash_key=b"one for all")
    >>> router.add(0); router.add(1)
    >>> shared = array("i", range(1000))
    >>> [router.choose(f"request {number}", router.prompt(shared + array("i", [number]))) for number in range(3)]
    [0, 1, 0]
    >>> router.started("request 0"); router.choose("request 3", router.prompt(shared))
    0
    """

    def __init__(self, block_size: int, hash_key: bytes, policy: str = LEAST_WORK) -> None:
        if policy not in COSTS:
            raise InvalidConfigError("router", policy, f"one of {', '.join(ROUTERS)}")
        self.reads_blocks = policy == LEAST_WORK
        """Whether the policy depends on the blocks that engines hold, so that they must report them."""
        self.block_size = block_size
        self._names = PromptNames(block_size, hash_key)
        self._cost = COSTS[policy]
        self._targets: dict[int, Target] = {}
        self._places: dict[str, int] = {}  # the engine of each request in flight
        self._routes: dict[int, Counter[str]] = {}
        self._num_choices = 0
        self._num_taken = 0  # prompt tokens to compute, over all requests that were sent

    # ---- engines ----------------------------------------------------------------------------------------------

    def add(self, index: int) -> None:
        """Add an engine, which holds nothing yet. Mutates."""
        if index in self._targets:
            raise InvariantError(f"the router already has engine {index}")
        self._targets[index] = Target(self.block_size)

    def pause(self, index: int) -> None:
        """Do not choose an engine that is silent, draining or ending; its requests stay counted. Mutates; O(1)."""
        if index in self._targets:
            self._targets[index].is_open = False

    def resume(self, index: int) -> None:
        """Choose a paused engine again from now on. Mutates; O(1)."""
        self._targets[index].is_open = True

    def lose(self, index: int) -> list[str]:
        """Forget an engine and its blocks; return its requests in flight, the oldest first. Mutates."""
        target = self._targets.pop(index, None)
        lost = [] if target is None else list(target.requests)
        for request_id in lost:
            del self._places[request_id]
        return lost

    def note(self, index: int, news: CacheNews) -> bool:
        """Process an engine's report; return whether to request a survey from it. Mutates; O(blocks reported).

        A report of an engine that was lost is ignored.
        """
        target = self._targets.get(index)
        return target is not None and target.note(news)

    # ---- requests ---------------------------------------------------------------------------------------------

    def prompt(self, tokens: array[int], scope: CacheScope = DEFAULT_SCOPE) -> RoutedPrompt:
        """Return a prompt in the form for `choose`. Pure, so any thread may call it; about 1 µs for each block."""
        return self._names.of(tokens, scope) if self.reads_blocks else RoutedPrompt(len(tokens), ())

    def choose(self, request_id: str, prompt: RoutedPrompt) -> int | None:
        """Return the engine for a request, and count it there; None if no engine may be chosen.

        A request that is already in flight is moved. Mutates; O(engines × blocks).
        """
        self.finished(request_id)
        open_targets = [(index, target) for index, target in self._targets.items() if target.is_open]
        if not open_targets:
            return None
        known = {index: target.num_known(prompt) for index, target in open_targets}
        _, _, index = min((self._cost(each, prompt, known[at]), each.last_chosen, at) for at, each in open_targets)
        self._num_choices += 1
        target = self._targets[index]
        target.last_chosen = self._num_choices
        target.take(request_id, prompt, known[index])
        self._num_taken += target.requests[request_id].num_waiting_tokens
        self._places[request_id] = index
        self._routes.setdefault(index, Counter())[_reason(known, index)] += 1
        return index

    def routes(self, index: int) -> dict[str, int]:
        """Return how many requests an engine was sent, by reason, also before it was last lost. Does not mutate."""
        counts = self._routes.get(index, Counter())
        return {reason: counts[reason] for reason in ROUTES}

    def holder(self, prompt: RoutedPrompt, indices: Sequence[int]) -> int:
        """Return which of these engines holds the most of a prompt, the first one of equals. Does not mutate."""
        return max(indices, key=lambda index: self._targets[index].num_held(prompt))

    def lender(self, request_id: str, prompt: RoutedPrompt, indices: Sequence[int]) -> Loan | None:
        """Return an engine that holds more of a prompt than the engine to which it was just sent. Does not mutate.

        It is the one of `indices` that holds the most; None: none holds more. Its requests in flight do not count.
        """
        target = self._targets[self._places[request_id]]
        num_known = len(prompt.digests) - len(target.requests[request_id].awaited)
        index = self.holder(prompt, indices) if indices else None
        num_held = 0 if index is None else self._targets[index].num_held(prompt)
        return None if index is None or num_held <= num_known else Loan(index, num_held, num_known)

    def started(self, request_id: str) -> None:
        """Note that a request's first token came, so its prompt is computed. Mutates; O(blocks that it computed)."""
        index = self._places.get(request_id)
        if index is not None:
            self._targets[index].start(request_id)

    def finished(self, request_id: str) -> None:
        """Note that a request has ended, for any reason. Mutates; O(blocks)."""
        index = self._places.pop(request_id, None)
        if index is not None:
            self._targets[index].end(request_id)

    @property
    def num_waiting_tokens(self) -> int:
        """The number of prompt tokens that wait, over all engines."""
        return sum(target.num_waiting_tokens for target in self._targets.values())

    @property
    def num_done_tokens(self) -> int:
        """The number of prompt tokens that were sent and no longer wait, counted from the start."""
        return self._num_taken - self.num_waiting_tokens

    @property
    def num_busy(self) -> int:
        """The number of engines that have requests."""
        return sum(bool(target.requests) for target in self._targets.values())

    def under_way(self, index: int) -> Iterable[str]:
        """Return the requests in flight of an engine, the oldest first. Does not mutate."""
        target = self._targets.get(index)
        return () if target is None else tuple(target.requests)

    def check(self) -> None:
        """Raise `InvariantError` unless all counts agree. O(everything)."""
        for target in self._targets.values():
            target.check()
        places = {name: index for index, target in self._targets.items() for name in target.requests}
        if places != self._places:
            raise InvariantError("the places of requests are not those of the engines")


def _reason(known: Mapping[int, int], index: int) -> str:
    """Return why an engine was chosen among those that know this many blocks of a prompt."""
    if len(known) == 1:
        return ONLY
    most = max(known.values())
    return NEW if not most else PREFIX if known[index] == most else LOAD
