"""Router: which of several engines gets a request, and what it goes by.

    round_robin    one after another
    least_loaded   the engine with the fewest requests
    least_work     the engine with the least work: the tokens of this prompt that it would compute, those of other
                   prompts that it has still to compute, and the requests that it generates for

An engine that holds the prompt's first blocks has less to compute, so equal prefixes stay together. When that engine
has fallen behind by more than the prefix would save, another one is cheaper, for this request alone: nothing is
switched over, and there is no threshold. Why requests weigh what they weigh: docs/design/routing.md.

    choose ──────────────► counts the request at once: the next choice, a microsecond later, sees it
    note(news) ──────────► what each engine can hit, block by block; a block that was waited for is computed
    started, finished ───► nothing of the prompt waits any more; nothing is under way any more
    routes ──────────────► how many requests an engine was sent, and why (`ROUTES`)

Blocks of prompts under way count as held by the engine that they were sent to, so equal prefixes stay together although
nothing is computed yet. A wrong entry costs time, never a wrong token: the engine compares tokens
itself. So digests suffice, and no tree of texts is kept. What the router remembers is bounded by what the engines hold
and by the requests under way.
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
"""Why an engine was chosen: no other holds more of the prompt; one does, but has more work; none holds any block;
no other takes requests."""
REQUEST_WEIGHT: Final = 128
"""A request under way counts like this many waiting tokens: each step also generates for it."""


class Loan(NamedTuple):
    """Leading blocks of a prompt that an engine holds, of which the one that was chosen knows fewer."""

    lender: int
    num_held: int
    num_known: int


class RequestUnderWay:
    """A request that was sent to an engine.

    `awaited`: the blocks that it is to compute; `num_waiting_tokens`: its prompt tokens still to be computed.
    """

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
        self.num_waiting_tokens = 0  # tokens of prompts that are still to be computed
        self.last_chosen = 0
        self.requests: dict[str, RequestUnderWay] = {}
        self._block_size = block_size
        self._expected: Counter[bytes] = Counter()  # by how many requests under way
        self._known: set[bytes] = set()  # held or expected, in one set: prompts have thousands of blocks
        self._awaited: dict[bytes, list[RequestUnderWay]] = {}  # which requests are to compute a block

    def num_known(self, prompt: RoutedPrompt) -> int:
        """Return how many leading blocks are held, or will be once the requests under way are computed."""
        return len(tuple(takewhile(self._known.__contains__, prompt.digests)))

    def num_to_compute(self, prompt: RoutedPrompt, num_known: int) -> int:
        """Return the tokens of a prompt that the engine would compute: the last one at least."""
        return max(min(1, prompt.num_tokens), prompt.num_tokens - num_known * self._block_size)

    def work(self, prompt: RoutedPrompt, num_known: int) -> int:
        """Return what there is to do, with a prompt, in tokens. Does not mutate; O(1)."""
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
        """Take a report in; return whether a survey is to be asked for. Mutates; O(blocks in the report)."""
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
        """Nothing of the prompt of a request waits any more. Mutates; O(blocks that it computed)."""
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
            raise InvariantError(f"{self.num_waiting_tokens} tokens wait, by the requests it is another number")
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
"""What an engine costs a prompt, by the name of the policy; of equal ones the least recently chosen is taken."""
ROUTERS: Final = tuple(COSTS)


class Router:
    """Sends requests to engines, which are numbered by the caller. For one thread.

    `block_size`, `hash_key`: those of all engines.

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
        """Whether it goes by what engines hold, so that they are to report it."""
        self.block_size = block_size
        self._names = PromptNames(block_size, hash_key)
        self._cost = COSTS[policy]
        self._targets: dict[int, Target] = {}
        self._places: dict[str, int] = {}  # of the requests under way
        self._routes: dict[int, Counter[str]] = {}
        self._num_choices = 0
        self._num_taken = 0  # prompt tokens to compute, of all requests that were sent

    # ---- engines ----------------------------------------------------------------------------------------------

    def add(self, index: int) -> None:
        """An engine may be chosen from now on; it holds nothing yet. Mutates."""
        if index in self._targets:
            raise InvariantError(f"engine {index} is known to the router already")
        self._targets[index] = Target(self.block_size)

    def pause(self, index: int) -> None:
        """Do not choose an engine that is silent, draining or ending; its requests stay counted. Mutates; O(1)."""
        if index in self._targets:
            self._targets[index].is_open = False

    def resume(self, index: int) -> None:
        """An engine that was paused may be chosen again. Mutates; O(1)."""
        self._targets[index].is_open = True

    def lose(self, index: int) -> list[str]:
        """Forget an engine and what it held; return its requests under way, the oldest first. Mutates."""
        target = self._targets.pop(index, None)
        lost = [] if target is None else list(target.requests)
        for request_id in lost:
            del self._places[request_id]
        return lost

    def note(self, index: int, news: CacheNews) -> bool:
        """Take an engine's report in; return whether it is to be asked for a survey. Mutates; O(blocks reported).

        A report of an engine that was lost is ignored.
        """
        target = self._targets.get(index)
        return target is not None and target.note(news)

    # ---- requests ---------------------------------------------------------------------------------------------

    def prompt(self, tokens: array[int], scope: CacheScope = DEFAULT_SCOPE) -> RoutedPrompt:
        """Return a prompt as `choose` takes it. Pure, so any thread may call it; about 1 µs for each block."""
        return self._names.of(tokens, scope) if self.reads_blocks else RoutedPrompt(len(tokens), ())

    def choose(self, request_id: str, prompt: RoutedPrompt) -> int | None:
        """Return the engine for a request, and count it there; None if no engine may be chosen.

        A request that is under way already moves. Mutates; O(engines × blocks).
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
        """Return how many requests an engine was sent, by why, also before it was last lost. Does not mutate."""
        counts = self._routes.get(index, Counter())
        return {reason: counts[reason] for reason in ROUTES}

    def holder(self, prompt: RoutedPrompt, indices: Sequence[int]) -> int:
        """Return which of these engines holds the most of a prompt, the first of several. Does not mutate."""
        return max(indices, key=lambda index: self._targets[index].num_held(prompt))

    def lender(self, request_id: str, prompt: RoutedPrompt, indices: Sequence[int]) -> Loan | None:
        """Return what another engine holds of a prompt that was just sent and its own lacks. Does not mutate.

        Of `indices` the engine that holds the most; None: none has more. Requests under way there do not count.
        """
        target = self._targets[self._places[request_id]]
        num_known = len(prompt.digests) - len(target.requests[request_id].awaited)
        index = self.holder(prompt, indices) if indices else None
        num_held = 0 if index is None else self._targets[index].num_held(prompt)
        return None if index is None or num_held <= num_known else Loan(index, num_held, num_known)

    def started(self, request_id: str) -> None:
        """The first token of a request came: its prompt is computed. Mutates; O(blocks that it computed)."""
        index = self._places.get(request_id)
        if index is not None:
            self._targets[index].start(request_id)

    def finished(self, request_id: str) -> None:
        """A request ended, for any reason. Mutates; O(blocks)."""
        index = self._places.pop(request_id, None)
        if index is not None:
            self._targets[index].end(request_id)

    @property
    def num_waiting_tokens(self) -> int:
        """The prompt tokens that wait, at all engines."""
        return sum(target.num_waiting_tokens for target in self._targets.values())

    @property
    def num_done_tokens(self) -> int:
        """The prompt tokens that were sent and wait no more, since the beginning."""
        return self._num_taken - self.num_waiting_tokens

    @property
    def num_busy(self) -> int:
        """The engines that have requests."""
        return sum(bool(target.requests) for target in self._targets.values())

    def under_way(self, index: int) -> Iterable[str]:
        """Return the requests that an engine has, the oldest first. Does not mutate."""
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
