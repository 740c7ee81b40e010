"""Request: one sequence of tokens, from prompt to end.

A request has **known tokens** (the prompt, then the generated ones) and **computed tokens** (their keys and values are
in the cache). Every step computes some known tokens; when the last known one is computed, a new one is sampled. There
are no phases.

Positions of a running request with one step in flight:

    0              num_computed      num_planned     len(tokens)      max_total_tokens
    ├── committed ──────┼── in flight ───┼── backlog ────┼─ ─ ─ to come ─ ─ ─┤

`backlog` counts the tokens, known or being sampled, that no plan has. A running decode always has a backlog of exactly
one: each plan takes one token and causes a new one. So `backlog` may be 1 while num_planned == len(tokens): the step in
flight still samples the token at that position. If the next plan depends on a result (drafts to verify, beams to
choose, a prompt about to open into several sequences), the backlog is 0 until the result arrives.

The scheduler (or code that uses the memory alone) writes the status and the progress, and the memory manager reads
them. The manager raises `num_slots` when it makes room; the scheduler lowers it so that the next token needs another
call to the manager. Requests that were opened from one prompt (n, best_of, beams) share a `RequestGroup`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from quire.core.errors import InvalidRequestError, InvariantError, RequestStateError
from quire.core.images import Image, names_of
from quire.core.logprobs import TokenLogprobs
from quire.core.pooling import Pooling
from quire.core.sampling_params import SamplingParams


class RequestStatus(Enum):
    """The status of a request; `TRANSITIONS` has the allowed changes."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    SWAPPED = "swapped"
    FINISHED = "finished"


TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.SWAPPED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.SWAPPED: frozenset({RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class CacheScope:
    """The cached blocks that a request may hit: those with the same salt, extra keys and adapter.

    `tenant` is charged for the blocks. `persist`: whether they may be written to the disk cache, if there is one.
    `adapter`: the digest of the adapter that computed their keys and values; empty: none.
    """

    tenant: str = ""
    salt: str = ""
    extra_keys: tuple[str, ...] = ()
    persist: bool = True
    adapter: str = ""


DEFAULT_SCOPE = CacheScope()
NO_DRAFTS = array("i")


class RequestGroup:
    """The sequences opened from one prompt. Beams stay together; parallel samples are independent once opened."""

    __slots__ = ("members", "num_sequences", "beam_search", "opened")

    def __init__(self, leader: Request) -> None:
        self.members = [leader]
        self.num_sequences = leader.sampling.num_sequences
        self.beam_search = leader.sampling.beam_search
        self.opened = False


class Request:
    """One sequence; see the module for the meaning of its counts.

    >>> request = Request("r", [5, 6, 7])
    >>> request.backlog, request.status.value
    (3, 'waiting')
    """

    __slots__ = (
        "request_id",
        "branch",
        "group",
        "sampling",
        "scope",
        "pooling",
        "priority",
        "arrival_s",
        "serial",
        "tokens",
        "images",
        "names",
        "awaits_images",
        "num_prompt_tokens",
        "max_total_tokens",
        "stop_ids",
        "status",
        "finish_reason",
        "error",
        "row",
        "num_computed",
        "num_planned",
        "backlog",
        "num_slots",
        "next_event",
        "num_late_results",
        "generation",
        "drafts",
        "guesser",
        "awaits_drafts",
        "num_cached_tokens",
        "num_disk_tokens",
        "num_host_tokens",
        "waited_s",
        "num_preemptions",
        "logprobs",
        "prompt_logprobs",
        "cumulative_logprob",
        "vector",
    )

    def __init__(
        self,
        request_id: str,
        prompt: Iterable[int],
        sampling: SamplingParams | None = None,
        *,
        scope: CacheScope = DEFAULT_SCOPE,
        priority: int = 0,
        arrival_s: float = 0.0,
    ) -> None:
        self.request_id = request_id
        self.branch = 0
        self.sampling = SamplingParams() if sampling is None else sampling
        self.scope = scope
        self.priority = priority
        self.arrival_s = arrival_s
        self.tokens = token_array(prompt)
        self.images: tuple[Image, ...] = ()  # of the prompt, in their order; set before the request is added
        self.names: array[int] | None = None  # of the prompt's tokens, in the cache; None: the tokens themselves
        self.awaits_images = False  # it does not start until its images are encoded
        self.num_prompt_tokens = len(self.tokens)
        self.pooling: Pooling | None = None  # set before the request is added: the result is a vector, not a text
        self.group: RequestGroup | None = None
        self.serial = 0  # order of arrival, given by the scheduler
        self.max_total_tokens = 0  # prompt and output together, given by the scheduler
        self.stop_ids: frozenset[int] = frozenset()  # given by the scheduler; empty until min_tokens is reached
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.error = ""
        self.row = -1
        self.num_computed = 0
        self.num_planned = 0
        self.backlog = self.num_prompt_tokens
        self.num_slots = 0  # positions below it may be planned without asking the memory manager
        self.next_event = 0  # computed tokens at which update() has more to do than append a token
        self.num_late_results = 0  # of steps in flight when it was preempted; awaited before it resumes
        self.generation = 0  # counts how often progress was thrown away, to recognise late results
        self.drafts = NO_DRAFTS  # guesses of the next tokens, to be verified by the next plan
        self.guesser = ""  # the proposer of the last guesses
        self.awaits_drafts = False  # a step in flight will return guesses; until then the request is not planned
        self.num_cached_tokens = 0  # at the first admission, for the caller
        self.num_disk_tokens = 0  # the part of num_cached_tokens that was loaded from disk for this request
        self.num_host_tokens = 0  # the part of num_cached_tokens that was moved from the host for this request
        self.waited_s: float | None = None  # from its arrival to its first step, for the caller
        self.num_preemptions = 0
        self.logprobs: list[TokenLogprobs] = []  # of the generated tokens, if requested
        self.prompt_logprobs: list[TokenLogprobs] = []  # of the prompt's tokens but the first; one list for a group
        self.cumulative_logprob: float | None = None  # of a beam search's text, once it is over
        self.vector = b""  # float32 numbers, once a pooled request is over

    def begin_with(self, output: Iterable[int]) -> None:
        """Set the beginning of the output to tokens that another engine generated, before the request runs. Mutates.

        >>> request = Request("r", [5, 6, 7])
        >>> request.begin_with([8, 9])
        >>> request.num_prompt_tokens, request.output_token_ids, request.backlog
        (3, [8, 9], 5)
        """
        self.tokens += token_array(output, "output_token_ids")
        self.backlog = len(self.tokens)

    def name_tokens(self, block_size: int) -> None:
        """Name the tokens of the prompt for the cache; see `quire.core.images`. Mutates."""
        self.names = names_of(self.tokens[: self.num_prompt_tokens], self.images, block_size) if self.images else None

    def key(self, start: int, end: int) -> bytes:
        """Return the packed names of tokens, by which the cache knows their blocks. Does not mutate.

        >>> Request("r", [5, 6, 7]).key(1, 3) == token_array([6, 7]).tobytes()
        True
        """
        names = self.names
        if names is None or start >= len(names):
            return self.tokens[start:end].tobytes()
        return (names[start:end] + self.tokens[max(start, len(names)) : end]).tobytes()

    @property
    def longest_image(self) -> int:
        """The most tokens of an image that one step must compute; 0: there is none."""
        return max((image.num_tokens for image in self.images if image.is_whole), default=0)

    def unsplit(self, start: int, count: int) -> int:
        """Return how many tokens from `start` on to compute if up to `count` may be, without splitting an image.

        That is more than `count` if an image begins at `start` and has more tokens. Does not mutate.
        """
        end = start + count
        for image in self.images:
            if image.is_whole and image.start < end < image.end:
                end = image.start if image.start > start else image.end
        return end - start

    def halved(self, start: int, count: int) -> int:
        """Return a smaller number of tokens from `start` on that splits no image; 0: there is none. Does not mutate."""
        half = self.unsplit(start, count // 2)
        return half if half < count else 0

    def open_branch(self, branch: int) -> Request:
        """Return a sibling with the same progress and its own tokens. Its memory is forked elsewhere."""
        sibling = Request.__new__(Request)
        for name in Request.__slots__:
            setattr(sibling, name, getattr(self, name))
        sibling.branch = branch
        sibling.tokens = self.tokens[:]
        sibling.logprobs = self.logprobs[:]
        sibling.row = -1
        sibling.num_slots = 0
        sibling.num_late_results = 0
        sibling.drafts, sibling.awaits_drafts = NO_DRAFTS, False
        return sibling

    @property
    def num_output_tokens(self) -> int:
        """The number of generated tokens."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt_tokens :].tolist()

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.status is RequestStatus.FINISHED

    @property
    def num_prompt_logits_wanted(self) -> int:
        """The number of leading positions whose logits are needed for `prompt_logprobs` that are not complete yet.

        While there are any, every position must be computed, without cache hits.
        """
        most = self.num_prompt_tokens - 1
        return most if self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < most else 0

    @property
    def reads_whole_prompt(self) -> bool:
        """Whether every position of the prompt must be computed, without cache hits."""
        return self.num_prompt_logits_wanted > 0 or (self.pooling is not None and self.pooling.kind == "mean")

    def become(self, status: RequestStatus) -> None:
        """Change the status; raises `RequestStateError` unless the table allows it. Mutates the request."""
        if status not in TRANSITIONS[self.status]:
            raise RequestStateError(
                f"request {self.request_id!r} is {self.status.value} and cannot become {status.value}"
            )
        self.status = status

    def forget_progress(self) -> None:
        """Reset the progress: all known tokens must be computed again. Mutates the request."""
        self.num_computed = 0
        self.num_planned = 0
        self.backlog = len(self.tokens)
        self.num_slots = 0
        self.next_event = 0
        self.generation += 1

    def check(self) -> None:
        """Raise `InvariantError` unless the counts are consistent."""
        idle = self.num_planned == self.num_computed and not self.num_late_results and not self.is_finished
        facts = {
            "0 <= num_computed <= num_planned": 0 <= self.num_computed <= self.num_planned,
            "a row is held exactly while running": (self.row >= 0) == (self.status is RequestStatus.RUNNING),
            "computed tokens are known": self.num_computed <= len(self.tokens),
            "known tokens stay within the maximum": len(self.tokens) <= self.max_total_tokens,
            "backlog counts the tokens that no plan has": self.backlog >= 0
            and (not idle or self.backlog == len(self.tokens) - self.num_planned),
        }
        for fact, holds in facts.items():
            if not holds:
                raise InvariantError(f"request {self.request_id!r}: not true that {fact}")


def token_array(tokens: Iterable[int], field: str = "prompt") -> array[int]:
    """Return token ids as 32-bit integers; raises `InvalidRequestError` for anything but integers that fit.

    >>> token_array([1, 2.5])
    Traceback (most recent call last):
    ...
    quire.core.errors.InvalidRequestError: prompt[1] is 2.5; allowed: a token id (an integer)
    """
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens[:]
    if isinstance(tokens, str | bytes | bytearray | dict | set | frozenset):
        raise InvalidRequestError(field, tokens, "a list of token ids")
    try:
        values = list(tokens)
    except TypeError:
        raise InvalidRequestError(field, tokens, "a list of token ids") from None
    if not set(map(type, values)) <= {int}:
        index = next(i for i, value in enumerate(values) if type(value) is not int)
        raise InvalidRequestError(f"{field}[{index}]", values[index], "a token id (an integer)")
    try:
        return array("i", values)
    except OverflowError:
        index = next(i for i, value in enumerate(values) if not -(1 << 31) <= value < 1 << 31)
        raise InvalidRequestError(f"{field}[{index}]", values[index], "a token id from 0 to 2147483647") from None
