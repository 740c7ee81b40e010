"""Generation: all prompts of one call, from the check of the first to the last token of the last.

    Gate.enter ◄── admit ──► prepare all prompts ──────────► deltas ─┐
                   by bytes  a bad one refuses the call      deltas ├──► steps: what is new, whenever anything is
                             before anything is enqueued     deltas ┘

A call is one thing to its client: it is refused as a whole, it fails as a whole, and when its reader leaves, all its
parts end at once. So the reader of `steps` must close them (`aclosing`); then nothing of the call is left in the
engine. A stream passes each step on; an answer in one piece is the sum of the same steps, so the two cannot differ.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from quire.core.errors import InvalidRequestError, InvariantError, RequestTooLargeError
from quire.core.grammar import CANNOT_HOLD
from quire.core.sampling_params import SamplingParams
from quire.engine.door import Ticket
from quire.engine.outputs import CompletionDelta, Logprob, RequestDelta
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.prompts import ChatOptions, Prompt, estimated_tokens
from quire.serve.errors import (
    ApiError,
    api_error_of,
    context_length_exceeded,
    generation_aborted,
    generation_failed,
    grammar_exhausted,
)
from quire.serve.frame import RequestContext
from quire.serve.gate import Visit
from quire.serve.model import ServedModel
from quire.serve.schemas.common import Usage
from quire.serve.services import Services

_HEAD: Final = re.compile(r"[^.\[]*")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a call wants written. `names` are the names that its request has for fields of the engine.

    With `prompts_only` the texts are not told, so their tokens are none that the client has asked for. The special
    tokens `shown_token_ids` are a part of the texts, whatever the client wants of others.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    chat: ChatOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    prompts_only: bool = False
    shown_token_ids: frozenset[int] = frozenset()
    blame: Callable[[InvalidRequestError], InvalidRequestError] = lambda error: error
    """Says of a refusal what of the request it is about, where that is not one field."""


class Step(NamedTuple):
    """What is new of one prompt of a call."""

    prompt_index: int
    delta: RequestDelta


def admit(services: Services, context: RequestContext, prompts: Sequence[object], sampling: SamplingParams) -> None:
    """Let a call in before its texts are worked on; raises `ApiError` where it must come again. Mutates the context.

    `prompts` are what becomes the prompts, in any form; their tokens are estimated until they are known.
    """
    require_few_choices(len(prompts), sampling, services.config.max_choices)
    longest = services.model.limits.max_model_len  # a prompt that is longer will be refused
    num_tokens = sum(estimated_tokens(prompt, longest) for prompt in prompts)
    num_sequences = max(1, len(prompts) * sampling.num_sequences)  # what cannot be is refused later
    context.visit = services.gate.enter(context.tenant, num_sequences, num_tokens)


async def prepare(services: Services, context: RequestContext, wanted: Wanted) -> Generation:
    """Return an admitted call that can be run; raises `ApiError` for one that cannot, before anything is enqueued."""
    visit = context.visit
    if visit is None:
        raise InvariantError("a request was prepared before it was admitted")
    scope = context.tenant.scope_for(wanted.cache_salt)
    ticket = Ticket(context.request_id, scope, context.tenant.priority_for(wanted.priority))
    prepared = []
    for index, prompt in enumerate(wanted.prompts):
        if index:
            await asyncio.sleep(0)  # other calls go on meanwhile
        try:
            request = await services.model.prepare(prompt, wanted.sampling, ticket, chat=wanted.chat)
            prepared.append(replace(request, shown_token_ids=wanted.shown_token_ids))
        except InvalidRequestError as error:
            raise renamed(wanted.blame(error), wanted.names, index if len(wanted.prompts) > 1 else None) from error
    visit.correct(sum(len(each.request.prompt_token_ids) for each in prepared))
    grammar_field = wanted.names.get("grammar", "grammar")
    return Generation(services, context, visit, prepared, prompts_only=wanted.prompts_only, grammar_field=grammar_field)


def renamed(error: InvalidRequestError, names: Mapping[str, str], prompt_index: int | None = None) -> ApiError:
    """Return the answer to a refusal of the engine, in the words of the request. Does not mutate.

    >>> renamed(InvalidRequestError("prompt[4]", -1, "a token id"), {}, 2).detail.param
    'prompt[2][4]'
    """
    place = names.get("prompt", "prompt") + ("" if prompt_index is None else f"[{prompt_index}]")
    if isinstance(error, RequestTooLargeError):
        return context_length_exceeded(error, place)
    match = _HEAD.match(error.field)
    head = match[0] if match else error.field
    name = place if head == "prompt" else names.get(head, head)
    return api_error_of(InvalidRequestError(name + error.field[len(head) :], error.value, error.allowed))


def require_few_choices(num_prompts: int, sampling: SamplingParams, limit: int) -> None:
    """Raise where a call asks for more texts than it may; what `n` may be by itself is said by the engine."""
    if num_prompts > limit:
        raise InvalidRequestError("prompt", f"{num_prompts} prompts", f"at most {limit} prompts")
    if num_prompts * sampling.num_sequences > limit:
        name = "n" if sampling.best_of is None else "best_of"
        allowed = f"at most {limit // num_prompts}: a request may ask for {limit} texts over all its prompts"
        raise InvalidRequestError(name, sampling.num_sequences, allowed)


class Generation:
    """A call that can be run, once."""

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        visit: Visit,
        prepared: Sequence[PreparedRequest],
        *,
        prompts_only: bool = False,
        grammar_field: str = "grammar",
    ) -> None:
        self.prepared = prepared
        self.prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}
        """Those of the prompts that they are known of, by the index of the prompt."""
        self._services = services
        self._context = context
        self._visit = visit
        self._prompts_only = prompts_only
        self._grammar_field = grammar_field
        self._known: list[RequestDelta | None] = [None] * len(prepared)
        self._seen_s = [context.arrival_s] * len(prepared)
        self._reasons: list[str] = []
        self._left = "abort"  # why texts end that are left when nobody reads on

    @property
    def request_id(self) -> str:
        """The id of the call; it is ours, and nobody else's."""
        return self._context.request_id

    @property
    def num_choices(self) -> int:
        """How many texts are returned."""
        return sum(each.wanted.n for each in self.prepared)

    @property
    def usage(self) -> Usage:
        """What has been taken so far, as the client is told."""
        known = [delta for delta in self._known if delta is not None]
        return Usage.of(
            sum(len(each.request.prompt_token_ids) for each in self.prepared),
            0 if self._prompts_only else sum(delta.num_generated_tokens for delta in known),
            sum(delta.num_cached_tokens for delta in known),
        )

    def index_of(self, prompt_index: int, output: CompletionDelta) -> int:
        """Return the index that a text has among those of all prompts. Does not mutate."""
        return prompt_index * self.prepared[prompt_index].wanted.n + output.index

    async def steps(self) -> AsyncGenerator[Sequence[Step], None]:
        """Run the call; yield new output as it comes. A reader that leaves early must close the iterator.

        Raises `ApiError` if a text fails or is aborted from elsewhere.
        """
        with self._visit as visit:
            try:
                async with aclosing(self._merged()) as merged:
                    async for steps in merged:
                        self._take_in(steps, visit)
                        yield steps
            except Exception:
                self._left = "error"
                raise
            finally:
                self._tell()

    async def collect(self) -> list[tuple[int, CompletionDelta]]:
        """Run the call to its end; return its texts in their order, each whole, with the index of its prompt."""
        parts: list[tuple[int, list[CompletionDelta]]] = [
            (index, []) for index, each in enumerate(self.prepared) for _ in range(each.wanted.n)
        ]
        async with aclosing(self.steps()) as all_steps:
            async for steps in all_steps:
                for prompt_index, delta in steps:
                    for output in delta.outputs:
                        parts[self.index_of(prompt_index, output)][1].append(output)
        return [(prompt_index, joined(each)) for prompt_index, each in parts]

    async def _merged(self) -> AsyncGenerator[Sequence[Step], None]:
        """The deltas of all prompts. Those of one step of the engine come together."""
        model = self._services.model
        if len(self.prepared) == 1:  # the usual call needs no task but its own
            async with aclosing(model.deltas(self.prepared[0])) as deltas:
                async for delta in deltas:
                    yield (Step(0, delta),)
            return
        inbox = _Inbox()
        tasks = [asyncio.create_task(inbox.fill(index, model, each)) for index, each in enumerate(self.prepared)]
        try:
            while steps := await inbox.take(tasks):
                yield steps
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _take_in(self, steps: Sequence[Step], visit: Visit) -> None:
        """Keep what is told later, and count. Mutates."""
        now = self._services.clock.now()
        for index, delta in steps:
            self._count(self._known[index], delta, now - self._seen_s[index])
            self._seen_s[index] = now
            self._known[index] = delta
            if delta.prompt_logprobs is not None:
                self.prompt_logprobs[index] = delta.prompt_logprobs
            for output in delta.outputs:
                if output.finish_reason is not None:
                    self._finish(output, now)
        if visit.is_waiting and None not in self._known:
            visit.begin()

    def _count(self, known: RequestDelta | None, delta: RequestDelta, seconds: float) -> None:
        """Count the tokens of a delta, and the time since the one before it: `known`, or None at the first. Mutates."""
        metrics, live, tenant = self._services.metrics, self._services.live, self._context.tenant
        num_prompt = num_cached = 0
        num_generated = 0 if self._prompts_only else delta.num_generated_tokens
        if known is None:
            metrics.note_first_token(seconds)
            live.note_first_token(tenant, seconds)
            num_prompt, num_cached = delta.num_prompt_tokens, delta.num_cached_tokens
        else:
            metrics.note_gap(seconds)
            live.note_gap(tenant, seconds)
            num_generated -= 0 if self._prompts_only else known.num_generated_tokens
        metrics.note_tokens(num_prompt, num_generated, num_cached)
        live.note_tokens(tenant, num_prompt, num_generated, num_cached)

    def _finish(self, output: CompletionDelta, now: float) -> None:
        """A text has ended: count it, and raise where it did not end well. Mutates."""
        reason = output.finish_reason or ""
        self._reasons.append(reason)
        self._services.metrics.note_finish(reason, now - self._context.arrival_s)
        if reason == "error" and output.error.startswith(CANNOT_HOLD):
            raise grammar_exhausted(output.error, self._grammar_field)
        if reason == "error":
            raise generation_failed(output.error)
        if reason == "abort":
            raise generation_aborted()

    def _tell(self) -> None:
        """Tell the log what the call has taken; texts that have not ended were given up. Mutates."""
        usage, context, metrics = self.usage, self._context, self._services.metrics
        for _ in range(self.num_choices - len(self._reasons)):
            self._reasons.append(self._left)
            metrics.note_finish(self._left, self._services.clock.now() - context.arrival_s)
        context.num_prompt_tokens = usage.prompt_tokens
        context.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
        context.num_output_tokens = usage.completion_tokens
        context.finish_reason = ",".join(sorted(set(self._reasons)))


class _Inbox:
    """Deltas of several prompts on their way to one reader. A slow reader holds the prompts up, not their texts."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()

    async def fill(self, index: int, model: ServedModel, prepared: PreparedRequest) -> None:
        """Run a prompt and put its deltas in, each when the one before it is out. Mutates."""
        try:
            async with aclosing(model.deltas(prepared)) as deltas:
                async for delta in deltas:
                    self._steps.append(Step(index, delta))
                    taken = self._taken
                    self._changed.set()
                    await taken.wait()
        finally:
            self._changed.set()

    async def take(self, tasks: Sequence[asyncio.Task[None]]) -> list[Step]:
        """Return what is new; nothing once all tasks have ended. Raises what one of them has raised. Mutates."""
        while not self._steps:
            for task in tasks:
                if task.done():
                    task.result()
            if all(task.done() for task in tasks):
                return []
            await self._changed.wait()
            self._changed.clear()
        steps, self._steps = self._steps, []
        self._taken.set()
        self._taken = asyncio.Event()
        return steps


def joined(parts: Sequence[CompletionDelta]) -> CompletionDelta:
    """Return the whole of a text from all its pieces. Does not mutate.

    >>> whole = joined([CompletionDelta(0, "so ", [1]), CompletionDelta(0, "it is", [2, 3], finish_reason="stop")])
    >>> whole.text, whole.token_ids, whole.finish_reason
    ('so it is', [1, 2, 3], 'stop')
    """
    last = parts[-1]
    if len(parts) == 1:
        return last
    logprobs = None if last.logprobs is None else [entry for part in parts for entry in part.logprobs or ()]
    return CompletionDelta(
        index=last.index,
        text="".join([part.text for part in parts]),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )
