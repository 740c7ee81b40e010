"""POST /v1/completions: prompts as texts or token ids, one or many, and what follows them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.engine.outputs import CompletionDelta, Logprob
from quire.engine.text.prompts import Prompt
from quire.serve.endpoints.call import (
    Call,
    answer_call,
    chunks,
    encoded,
    long_answer,
    needs_truncation,
    now_s,
    shown_id,
    told_reason,
    truncated,
)
from quire.serve.errors import ApiError
from quire.serve.generation import Generation, Wanted, prepare
from quire.serve.logprobs import TextOffsets, TokenNames, completion_logprobs, prompt_logprobs
from quire.serve.schemas.completions import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    prompts_of,
)
from quire.serve.schemas.formats import Held, held_to
from quire.serve.schemas.sampling import include_usage, max_tokens_of, sampling_of
from quire.serve.services import Services
from quire.serve.sse import Envelope, EventStream

OBJECT: Final = "text_completion"


async def completions(request: Request) -> Response | EventStream:
    """Answer a call."""
    return await answer_call(request, CompletionRequest, _answer)


async def _answer(call: Call[CompletionRequest]) -> Response | EventStream:
    fields, services = call.fields, call.services
    tells_usage = include_usage(fields)
    if fields.stream and fields.prompt_logprobs is not None:
        message = "prompt_logprobs need stream: false; in a stream, use echo with logprobs"
        raise ApiError(400, message, code="invalid_value", param="prompt_logprobs")
    held = held_to(fields.response_format, fields.structured_outputs)
    sampling, given = _sampling(fields, services, held), prompts_of(fields.prompt)
    call.admit(given, sampling)
    prompts = [await _prompt(each, call, sampling) for each in given]
    wanted = Wanted(
        prompts=[each.given for each in prompts],
        sampling=sampling,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
        names={"beam_search": "use_beam_search", "grammar": held.field},
        prompts_only=_writes_nothing(fields),
    )
    generation = await prepare(services, call.context, wanted)
    texts = _Texts(fields, generation, services, [each.text for each in prompts])
    answer_id, created = shown_id("cmpl-", call.context, fields.request_id), now_s()
    if fields.stream:
        fixed = {"id": answer_id, "object": OBJECT, "created": created, "model": call.model}
        envelope = Envelope(fixed, tells_usage=tells_usage[0])
        return EventStream(chunks(generation, envelope, texts.render, tells_usage), services.config)
    found = await generation.collect()
    usage = generation.usage

    def answer() -> Completion:
        choices = [choice for prompt_index, output in found for choice in texts.render(prompt_index, output)]
        return Completion(answer_id, OBJECT, created, call.model, choices, usage)

    return await long_answer(call, answer, usage)


def _writes_nothing(fields: CompletionRequest) -> bool:
    """Return whether only the prompt is wanted back, with its log-probabilities."""
    return bool(fields.echo) and max_tokens_of(fields.max_tokens, fields.max_completion_tokens) == 0


def _sampling(fields: CompletionRequest, services: Services, held: Held) -> SamplingParams:
    asked = max_tokens_of(fields.max_tokens, fields.max_completion_tokens)
    max_tokens = DEFAULT_MAX_TOKENS if asked is None else asked
    if _writes_nothing(fields):
        max_tokens = 1  # the engine cannot write less; it is not told
    elif max_tokens == 0:
        raise InvalidRequestError("max_tokens", 0, "an integer of at least 1, or 0 if echo is true")
    changes: dict[str, object] = {"max_tokens": max_tokens, "logprobs": fields.logprobs, "grammar": held.grammar}
    if fields.echo and fields.logprobs is not None:
        changes["prompt_logprobs"] = max(fields.logprobs, fields.prompt_logprobs or 0)
    return sampling_of(fields, services.model.get_default_sampling_params(), **changes)


@dataclass(frozen=True, slots=True)
class _Given:
    """A prompt as the engine gets it, and the text of which it is all; None: it came as ids, or was cut."""

    given: Prompt
    text: str | None


async def _prompt(prompt: str | list[int], call: Call[CompletionRequest], sampling: SamplingParams) -> _Given:
    fields, services = call.fields, call.services
    cuts, tokenizer = needs_truncation(fields), services.model.tokenizer
    if isinstance(prompt, str):
        if tokenizer is None or not prompt or (fields.add_special_tokens is not False and not cuts):
            return _Given(prompt, prompt)
        ids = await encoded(call, tokenizer, prompt, add_special_tokens=fields.add_special_tokens is not False)
    else:
        ids = prompt
    kept = truncated(ids, fields, services, sampling.max_tokens)
    return _Given(kept, prompt if isinstance(prompt, str) and len(kept) == len(ids) else None)


class _Texts:
    """What the client of one call is told of its texts, as they grow."""

    def __init__(
        self, fields: CompletionRequest, generation: Generation, services: Services, texts: list[str | None]
    ) -> None:
        self._fields = fields
        self._generation = generation
        self._tokenizer = services.model.tokenizer
        self._names = TokenNames(self._tokenizer, bool(fields.return_tokens_as_token_ids))
        self._texts = texts
        self._writes_nothing = _writes_nothing(fields)
        self._offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()

    def render(self, prompt_index: int, output: CompletionDelta) -> list[CompletionChoice]:
        """Return what is told of what is new of a text. Mutates."""
        fields, index = self._fields, self._generation.index_of(prompt_index, output)
        is_first = index not in self._begun
        self._begun.add(index)
        shows_prompt = bool(fields.echo) and is_first
        text = "" if self._writes_nothing else output.text
        token_ids = [] if self._writes_nothing else output.token_ids
        finish_reason = told_reason(output)
        if self._writes_nothing and finish_reason is not None:
            finish_reason = "length"
        prompt_entries = self._generation.prompt_logprobs.get(prompt_index)
        return [
            CompletionChoice(
                index=index,
                text=self._prompt_text(prompt_index) + text if shows_prompt else text,
                logprobs=self._logprobs(index, prompt_index, output, shows_prompt),
                finish_reason=finish_reason,
                stop_reason=None if self._writes_nothing else output.stop_reason,
                token_ids=token_ids if fields.return_token_ids else UNSET,
                prompt_token_ids=self._prompt_ids(prompt_index) if fields.return_token_ids and is_first else UNSET,
                prompt_logprobs=UNSET
                if fields.prompt_logprobs is None or prompt_entries is None
                else prompt_logprobs(prompt_entries, fields.prompt_logprobs),
            )
        ]

    def _logprobs(
        self, index: int, prompt_index: int, output: CompletionDelta, shows_prompt: bool
    ) -> CompletionLogprobs | None:
        if self._fields.logprobs is None:
            return None
        token_ids: list[int] = []
        entries: list[dict[int, Logprob] | None] = []
        offsets: list[int] = []
        if shows_prompt:
            token_ids += self._prompt_ids(prompt_index)
            entries += self._generation.prompt_logprobs[prompt_index]
            offsets += self._prompt_offsets(prompt_index)
        if not self._writes_nothing:
            known = self._offsets.get(index) or self._begin_offsets(index, prompt_index)
            token_ids += output.token_ids
            entries += output.logprobs or []
            offsets += [known.take(token_id) for token_id in output.token_ids]
        return completion_logprobs(token_ids, entries, offsets, self._fields.logprobs, self._names)

    def _begin_offsets(self, index: int, prompt_index: int) -> TextOffsets:
        prepared = self._generation.prepared[prompt_index]
        self._offsets[index] = offsets = TextOffsets(
            self._tokenizer,
            prepared.request.prompt_token_ids,
            skip_special_tokens=prepared.wanted.skip_special_tokens,
            start=len(self._prompt_text(prompt_index)) if self._fields.echo else 0,
        )
        return offsets

    def _prompt_ids(self, prompt_index: int) -> list[int]:
        return self._generation.prepared[prompt_index].request.prompt_token_ids.tolist()

    def _prompt_text(self, prompt_index: int) -> str:
        """Return the prompt as it was sent; of token ids that is the text of all of them, special ones too."""
        text = self._texts[prompt_index]
        if text is None and self._tokenizer is not None:
            text = self._tokenizer.decode(self._prompt_ids(prompt_index), skip_special_tokens=False)
            self._texts[prompt_index] = text
        return text or ""

    def _prompt_offsets(self, prompt_index: int) -> list[int]:
        """Return where the tokens of a prompt begin in its text; what the tokenizer has put before it takes no room."""
        text, ids = self._prompt_text(prompt_index), self._prompt_ids(prompt_index)
        found: list[int] = []
        tokenizer = self._tokenizer
        if tokenizer is not None and ids[0] in tokenizer.special_token_ids:
            found += [] if text.startswith(tokenizer.token_text(ids[0])) else [0]
        offsets = TextOffsets(self._tokenizer, skip_special_tokens=False)
        return found + [min(offsets.take(token_id), len(text)) for token_id in ids[len(found) :]]
