"""The server's record of running requests, with which they can continue in another engine (ADR 50).

    TrackedRequest  the request as sent by the caller, and the tokens of each sequence so far
    Part            the request, or one of its sequences, in one engine after another, each time under a new name

A request is one part until it has to move to another engine after its samples have begun: then each unfinished sample
becomes a part. Beams and vectors show no output before they end, so they start again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import replace
from typing import Final, Protocol

from quire.core.sampling_params import MAX_SEED
from quire.engine.client import SequenceUpdate
from quire.engine.commands import Add
from quire.engine.replicas.replica import Replica

AGAIN: Final = "~"
"""Separates the id in a part's name from the number of times it was sent again; ids of the door never contain it."""


def request_id_of(name: str) -> str:
    """Return the id of a part's request. Pure.

    >>> request_id_of("17~2"), request_id_of("17"), request_id_of("")
    ('17', '17', '')
    """
    return name.partition(AGAIN)[0]


class TrackedRequest:
    """A running request. `order`: its rank by arrival. It must have a seed, or each name would give it another one."""

    __slots__ = ("add", "ended", "num_names", "order", "outputs")

    def __init__(self, add: Add, order: int) -> None:
        self.add = add
        self.order = order
        self.outputs: dict[int, array[int]] = {}  # by branch
        self.ended: set[int] = set()
        self.num_names = 0

    @property
    def is_over(self) -> bool:
        """Whether all its sequences have ended."""
        return len(self.ended) == self.add.sampling.num_sequences

    @property
    def may_go_on(self) -> bool:
        """Whether its sequences can continue from their tokens; beams and vectors start again."""
        return self.add.pooling is None and self.add.sampling.num_beams == 1


class Hold(Protocol):
    """Holds parts after an engine was chosen for them."""

    def leave(self, part: Part) -> None:
        """Stop holding a part, without sending it to that engine."""
        ...


class Part:
    """A request (`branch` None), or one of its sequences. `replica`: None while it waits for an engine.

    `fingerprint`: that of the engine that generated its tokens. `num_deaths`: the number of engines that died while
    they had it. `fetch`: the fetch that holds it, so that its engine does not have it yet.
    """

    __slots__ = ("branch", "fetch", "fingerprint", "name", "num_deaths", "replica", "request", "waits_since_s")

    def __init__(self, request: TrackedRequest, branch: int | None = None, num_deaths: int = 0) -> None:
        self.request = request
        self.branch = branch
        self.num_deaths = num_deaths
        self.name = request.add.request_id
        self.replica: Replica | None = None
        self.fetch: Hold | None = None
        self.fingerprint = ""
        self.waits_since_s = 0.0

    @property
    def output(self) -> array[int]:
        """The generated tokens from which it continues; empty: it starts at the prompt."""
        request, branch = self.request, self.branch or 0
        is_whole = self.branch is None and request.add.sampling.num_sequences > 1
        return array("i") if is_whole or not request.may_go_on else request.outputs.get(branch, array("i"))

    @property
    def num_tokens(self) -> int:
        """The number of tokens that an engine computes before it can continue."""
        return len(self.request.add.prompt_token_ids) + len(self.output)

    @property
    def progress(self) -> int:
        """The number of tokens of its longest sequence."""
        outputs = self.request.outputs
        branches = outputs if self.branch is None else (self.branch,)
        return max((len(outputs[branch]) for branch in branches if branch in outputs), default=0)

    def pieces(self) -> list[Part]:
        """Return the parts to move to another engine: this one, or one per unfinished sample. Does not mutate."""
        request = self.request
        num_sequences = request.add.sampling.num_sequences
        if self.branch is not None or num_sequences == 1 or not request.may_go_on or not request.outputs:
            return [self]
        going_on = [branch for branch in range(num_sequences) if branch not in request.ended]
        pieces = [Part(request, branch, self.num_deaths) for branch in going_on]
        for piece in pieces:
            piece.fingerprint, piece.waits_since_s = self.fingerprint, self.waits_since_s
        return pieces

    def next_add(self) -> Add:
        """Return the command that starts or continues it in an engine, under a new name. Mutates the name."""
        request, output = self.request, self.output
        if request.num_names:
            self.name = f"{request.add.request_id}{AGAIN}{request.num_names}"
        request.num_names += 1
        sampling = request.add.sampling
        if self.branch is not None:
            seed = None if sampling.seed is None else (sampling.seed + self.branch) & MAX_SEED
            sampling = replace(sampling, n=1, best_of=None, seed=seed)
        if output:
            sampling = replace(sampling, prompt_logprobs=None)  # they came with the first token
        return replace(request.add, request_id=self.name, sampling=sampling, output_token_ids=output[:])

    def take(self, update: SequenceUpdate) -> SequenceUpdate:
        """Record the tokens of an update, and return it with the id of the request. Mutates."""
        request = self.request
        branch = update.branch if self.branch is None else self.branch
        if update.token_ids:
            request.outputs.setdefault(branch, array("i")).extend(update.token_ids)
        if update.finish_reason is not None:
            request.ended.add(branch)
        if self.name == request.add.request_id and self.branch is None:
            return update
        return replace(update, request_id=request.add.request_id, branch=branch)

    @property
    def is_over(self) -> bool:
        """Whether all its sequences have ended."""
        return self.request.is_over if self.branch is None else self.branch in self.request.ended

    def branches(self) -> Iterator[int]:
        """Its sequences that have not ended. Does not mutate."""
        every = range(self.request.add.sampling.num_sequences) if self.branch is None else (self.branch,)
        return (branch for branch in every if branch not in self.request.ended)
