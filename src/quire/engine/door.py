"""Door: the way into an engine that all front ends share. It turns a prompt into a request that the engine can serve.

    settings ──► plan_engine ──► Tokenizer ──► EngineCore         refused in this order, the cheap checks first
    prompt ──► tokens ──► validate ──► PreparedRequest            refused before anything is enqueued

The engine is in this process (`open_engine`) or in another one: the door only needs its limits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final, cast

from quire.core.adapters import AdapterFacts
from quire.core.clock import Clock
from quire.core.config import EngineConfig, EngineSettings, ResolvedConfig
from quire.core.errors import InvalidConfigError, InvalidRequestError, shortened
from quire.core.executor import NoteLoaded
from quire.core.grammar import Grammar, GrammarChecker
from quire.core.pooling import Pooling
from quire.core.request import DEFAULT_SCOPE, CacheScope
from quire.core.sampling_params import FORBIDDEN, MAX_BIASES, SamplingParams
from quire.core.validate import RequestLimits, validate, validate_sampling
from quire.engine.commands import Add
from quire.engine.core import EngineCore
from quire.engine.images.parts import has_images
from quire.engine.near_names import keyword_meant_by
from quire.engine.process.adapter_set import AdapterSet
from quire.engine.records.report import EngineReport
from quire.engine.seeds import SeedCounter
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.grammar_turns import GrammarTurns
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.prompts import (
    Encoded,
    Prompt,
    encode_prompt,
    estimated_tokens,
    is_message,
    with_bad_words,
    with_options,
)
from quire.engine.text.scores import AS_PAIR
from quire.engine.text.tenant_pool import TenantPool
from quire.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.factory import EngineBlueprint

logger = logging.getLogger("quire.engine")


CONDEMNED = "a simpler one: this grammar could not be enforced"

OF_PROMPT: Final = ("prompt", "messages")
"""The beginnings of the fields that a prompt has for itself: a call may have several."""

LONG_PROMPT: Final = 2_500
"""Estimated tokens from which a prompt is encoded off the event loop."""

TEXT_THREADS: Final = 2
"""Threads for long texts, at most one per tenant. More would take cores from the engine."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a caller can set for a request besides prompt and sampling. Without an id, the engine chooses one.

    With `pooling` the request returns a vector, and its sampling must be `FOR_VECTORS`. `adapter`: the name of the
    adapter to compute it with.
    """

    request_id: str = ""
    scope: CacheScope = DEFAULT_SCOPE
    priority: int = 0
    pooling: Pooling | None = None
    adapter: str | None = None


NO_TICKET = Ticket()
FOR_VECTORS: Final = SamplingParams(max_tokens=1)


class Door:
    """The tokenizer of an engine, the threads for long texts, and the defaults and seeds of its requests.

    `text_pool`: threads shared with other doors, which the caller closes; None: its own threads.
    """

    def __init__(self, blueprint: EngineBlueprint, *, text_pool: TenantPool | None = None) -> None:
        self.config = blueprint.config
        self.report = blueprint.report
        self.default_sampling = blueprint.default_sampling
        self.pooling = blueprint.pooling
        self._suppressed = blueprint.model.suppressed
        self.adapters = AdapterSet(blueprint.adapters, blueprint.check_adapter, blueprint.adapter_budget)
        self.tokenizer: Tokenizer | None = None
        if not self.config.skip_tokenizer_init:
            context = self.config.max_model_len or self.report.context_length
            self.tokenizer = Tokenizer.open(
                blueprint.tokenizer_files, vocab_size=blueprint.vocab_size, max_tokens=context, images=blueprint.images
            )
        self.grammars: GrammarChecker | None = blueprint.grammars
        self._has_own_pool = text_pool is None
        self.text_pool = TenantPool("quire-text", num_threads=TEXT_THREADS) if text_pool is None else text_pool
        self._turns = GrammarTurns(blueprint.grammars)
        self._seeds = SeedCounter(self.config.seed)
        self._num_prepared = 0

    def encode(self, prompt: Prompt, chat: ChatOptions | None = None) -> Encoded:
        """Return the tokens of a prompt; raises `InvalidRequestError` if it is not a prompt. Does not mutate."""
        is_conversation = isinstance(prompt, list | tuple) and bool(prompt) and is_message(prompt[0])
        if self.config.one_step and is_conversation and chat != AS_PAIR:
            allowed = "texts to embed or to score: this model cannot generate text"
            raise InvalidRequestError("messages", "a conversation", allowed)
        return encode_prompt(prompt, self.tokenizer, chat)

    async def prepare_beside(
        self,
        prompt: Prompt,
        limits: RequestLimits,
        sampling: SamplingParams | None,
        ticket: Ticket,
        chat: ChatOptions | None,
    ) -> PreparedRequest:
        """Encode a prompt and return its request.

        Encodes long prompts, decodes images, and compiles grammars, off the event loop.
        """
        if has_images(prompt) or estimated_tokens(prompt, LONG_PROMPT) >= LONG_PROMPT:
            encoded = await self.text_pool.run(ticket.scope.tenant, lambda: self.encode(prompt, chat))
        else:
            encoded = self.encode(prompt, chat)
        wanted = self._wanted(sampling, limits, ticket)
        if wanted.grammar is not None:
            await self._turns.check_beside(wanted.grammar)
        return self._prepare(encoded, limits, wanted, ticket)

    def prepare(
        self,
        prompt: Encoded,
        limits: RequestLimits,
        sampling: SamplingParams | None = None,
        ticket: Ticket = NO_TICKET,
    ) -> PreparedRequest:
        """Return the request of a prompt; raises `InvalidRequestError` if the engine cannot serve it.

        Mutates only the counters of ids and seeds. The engine's own id of a request is always ours, so that callers
        can choose equal ids.
        """
        wanted = self._wanted(sampling, limits, ticket)
        if wanted.grammar is not None:
            self._turns.check(wanted.grammar)
        return self._prepare(prompt, limits, wanted, ticket)

    def pooling_for(self, kind: str | None, dimensions: int) -> Pooling:
        """Return how to pool vectors; raises `InvalidRequestError` if nothing specifies it. Does not mutate."""
        found = kind or self.pooling
        if not found:
            raise InvalidRequestError("pooling", None, "last or mean").saying(
                'this model names no pooling, the way to make a vector of a text; give LLM or the call pooling="mean" '
                'or pooling="last"'
            )
        return Pooling(found, dimensions)

    def condemn(self, grammar: Grammar) -> None:
        """Refuse a grammar from now on, because it could not be enforced. Mutates the verdicts on grammars."""
        if self.grammars is not None:
            self.grammars.condemn(grammar, CONDEMNED)

    def _wanted(self, sampling: SamplingParams | None, limits: RequestLimits, ticket: Ticket) -> SamplingParams:
        """Return the parameters of a request, checked; a grammar gets its owner."""
        wanted = self.default_sampling if sampling is None else sampling
        validate_sampling(wanted, limits)
        if wanted.grammar is None:
            return wanted
        return replace(wanted, grammar=replace(wanted.grammar, owner=ticket.scope.tenant))

    def _prepare(
        self, prompt: Encoded, limits: RequestLimits, wanted: SamplingParams, ticket: Ticket
    ) -> PreparedRequest:
        request_id = str(self._num_prepared)
        scope = ticket.scope
        if ticket.adapter is not None:
            scope = replace(scope, adapter=self.adapters.digest_of(ticket.adapter))
        request = Add(
            request_id, prompt.token_ids, wanted, scope, ticket.priority, pooling=ticket.pooling, images=prompt.images
        )
        validate(request.to_request(), limits)
        if wanted.bad_words:
            request = replace(request, sampling=with_bad_words(wanted, self.tokenizer))
            validate(request.to_request(), limits)
        self._num_prepared += 1
        request = replace(request, sampling=self._internal(request.sampling, ticket))
        return PreparedRequest(request, ticket.request_id or request_id, prompt.text, wanted)

    def close(self) -> None:
        """End the door's own threads, and the processes that compile grammars. May be called twice."""
        if self._has_own_pool:
            self.text_pool.close()
        self.adapters.close()
        self._turns.close()

    def prepare_all(
        self,
        prompts: Sequence[Prompt],
        limits: RequestLimits,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        *,
        chat: ChatOptions | None = None,
        options: Mapping[str, Any] | None = None,
        ticket: Ticket = NO_TICKET,
    ) -> list[PreparedRequest]:
        """Check all prompts and return their requests; `sampling` is one for all, or one for each."""
        if isinstance(sampling, list | tuple):
            if len(sampling) != len(prompts):
                raise InvalidRequestError("sampling_params", f"a list of {len(sampling)}", f"one, or {len(prompts)}")
            each = list(sampling)
        else:
            each = [self.default_sampling if sampling is None else sampling] * len(prompts)
        for wanted in each:
            if not isinstance(wanted, SamplingParams):
                raise InvalidRequestError("sampling_params", wanted, "SamplingParams")
        prepared = list[PreparedRequest]()
        for index, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
            try:
                sampling = with_options(wanted, options or {})
                prepared.append(self.prepare(self.encode(prompt, chat), limits, sampling, ticket))
            except InvalidRequestError as error:
                if len(prompts) == 1 or not error.field.startswith(OF_PROMPT):
                    raise
                raise error.saying(f"prompts[{index}]: {error}") from None
        return prepared

    def _internal(self, wanted: SamplingParams, ticket: Ticket) -> SamplingParams:
        """Return the parameters with a seed, biases against suppressed tokens, and log-probabilities that rank.

        A beam search has no biases, and ranks texts by the model's own probabilities.
        """
        if wanted.seed is None:
            wanted = replace(wanted, seed=self._seeds.take(ticket.scope.tenant))
        if self._suppressed and ticket.pooling is None and not wanted.beam_search:
            biases = dict(wanted.biases) | dict.fromkeys(self._suppressed, FORBIDDEN)
            if len(biases) > MAX_BIASES:
                allowed = f"at most {MAX_BIASES - len(self._suppressed)}: the model itself forbids tokens"
                raise InvalidRequestError("logit_bias", f"{len(wanted.biases)} entries", allowed)
            wanted = replace(wanted, logit_bias=biases)
        is_ranked = wanted.beam_search or wanted.num_sequences > wanted.n
        if is_ranked and wanted.num_beams == 1 and wanted.logprobs is None:
            wanted = replace(wanted, logprobs=0)
        return wanted


def open_engine(config: EngineConfig, clock: Clock, note_loaded: NoteLoaded | None = None) -> tuple[Door, EngineCore]:
    """Open an engine in this process; return its door, and the engine."""
    from quire.engine.factory import plan_engine  # imported late: it loads numpy

    blueprint = plan_engine(config)
    door = Door(blueprint)
    blueprint = blueprint.measured(note_loaded)
    door.report = blueprint.report
    core = blueprint.build(clock, note_loaded)
    logger.info("started\n%s", door.report)
    return door, core


class OpenModel:
    """The properties of an open model, wherever its engine runs."""

    def __init__(self, door: Door) -> None:
        self._door = door

    @property
    def config(self) -> ResolvedConfig:
        """The settings in use."""
        return self._door.config

    @property
    def report(self) -> EngineReport:
        """The start-up table; `str` returns its text."""
        return self._door.report

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None with `skip_tokenizer_init`."""
        return self._door.tokenizer

    @property
    def text_pool(self) -> TenantPool:
        """The threads for long texts."""
        return self._door.text_pool

    def pooling_for(self, kind: str | None, dimensions: int) -> Pooling:
        """Return how to pool vectors; raises `InvalidRequestError` if nothing specifies it. Does not mutate."""
        return self._door.pooling_for(kind, dimensions)

    @property
    def adapters(self) -> Mapping[str, AdapterFacts]:
        """The adapters that requests can use, by name."""
        return self._door.adapters.by_name

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's recommended sampling, which a call without sampling parameters gets."""
        return self._door.default_sampling


class LocalModel(OpenModel):
    """A model whose engine is in this process."""

    def __init__(self, door: Door, core: EngineCore) -> None:
        super().__init__(door)
        self._core = core

    @property
    def engine(self) -> EngineCore:
        """The engine, for inspecting its scheduler, memory and ledger while no other thread runs it."""
        return self._core


def make_config(model: str | os.PathLike[str] | EngineConfig, settings: EngineSettings) -> EngineConfig:
    """Return the given `EngineConfig`, or build one from a model and keywords; raises if one has no such name."""
    known = [field.name for field in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            hint = keyword_meant_by(name, known) or "see quire.EngineConfig"
            sentence = f"{shortened(name)!r} is not a setting of quire; {hint}"
            raise InvalidConfigError("settings", name, "the fields of EngineConfig").saying(sentence)
    if not isinstance(model, EngineConfig):
        return EngineConfig(**cast(dict[str, Any], {"model": model, **settings}))  # converts paths to text
    if settings:
        raise InvalidConfigError("settings", sorted(settings), "none, because an EngineConfig is given")
    return model
