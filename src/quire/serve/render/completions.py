"""The answer of /v1/completions, in one piece or as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from itertools import chain
from typing import Final

from msgspec import UNSET

from quire.engine.outputs import CompletionDelta, Logprob
from quire.serve.errors import ApiError
from quire.serve.render.answer import chunks, shown_id, shown_model, shown_reason, usage_of
from quire.serve.render.events import Envelope, error_event
from quire.serve.render.logprobs import TextOffsets, TokenNames, completion_logprobs, prompt_logprobs
from quire.serve.run.generation import Generation, Results
from quire.serve.schemas.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest

OBJECT: Final = "text_completion"


class CompletionAnswer:
    """The answer to one call. Mutable."""

    def __init__(self, fields: CompletionRequest, generation: Generation) -> None:
        self._fields = fields
        self._generation = generation
        self._tokenizer = generation.services.model.tokenizer
        self._names = TokenNames(self._tokenizer, bool(fields.return_tokens_as_token_ids))
        self._id = shown_id("cmpl-", generation.context, fields.request_id)
        self._texts = list(generation.prompt_texts)
        self._writes_nothing = generation.request.prompts_only
        self._offsets: dict[int, TextOffsets] = {}
        self._begun: set[int] = set()

    def whole(self, results: Results) -> Completion:
        """Return the answer in one piece. Mutates."""
        return Completion(
            id=self._id,
            object=OBJECT,
            created=self._generation.created_s,
            model=shown_model(self._fields, self._generation),
            choices=[choice for index, output in results.texts for choice in self._new_choices(index, output)],
            usage=usage_of(results.counts),
        )

    def events(self) -> AsyncGenerator[bytes, None]:
        """Run the call, and yield the events of its stream. Mutates."""
        generation = self._generation
        model = shown_model(self._fields, generation)
        fixed = {"id": self._id, "object": OBJECT, "created": generation.created_s, "model": model}
        envelope = Envelope(fixed, tells_usage=generation.request.stream_usage[0])
        return chunks(generation, envelope, self._new_choices, self._num_shown)

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream. Does not mutate."""
        return error_event(error)

    def _num_shown(self, prompt_index: int, output: CompletionDelta) -> int:
        """Return how many tokens of a prompt the new part of a text shows. Does not mutate."""
        index = self._generation.index_of(prompt_index, output)
        is_shown = self._fields.echo and index not in self._begun
        return len(self._generation.prepared[prompt_index].request.prompt_token_ids) if is_shown else 0

    def _new_choices(self, prompt_index: int, output: CompletionDelta) -> list[CompletionChoice]:
        """Return the new part of a text. Mutates."""
        fields, index = self._fields, prompt_index * self._generation.request.sampling.n + output.index
        is_first = index not in self._begun
        self._begun.add(index)
        shows_prompt = bool(fields.echo) and is_first
        text = "" if self._writes_nothing else output.text
        token_ids = [] if self._writes_nothing else output.token_ids
        finish_reason = shown_reason(output)
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
        entries: list[Sequence[dict[int, Logprob] | None]] = []
        offsets: list[int] = []
        if shows_prompt:
            token_ids += self._prompt_ids(prompt_index)
            entries.append(self._generation.prompt_logprobs[prompt_index])
            offsets += self._prompt_offsets(prompt_index)
        if not self._writes_nothing:
            known = self._offsets.get(index) or self._begin_offsets(index, prompt_index)
            token_ids += output.token_ids
            entries.append(output.logprobs or [])
            offsets += [known.take(token_id) for token_id in output.token_ids]
        return completion_logprobs(token_ids, chain.from_iterable(entries), offsets, self._fields.logprobs, self._names)

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
        """Return the prompt as it was sent; for token ids, their text including special tokens."""
        text = self._texts[prompt_index]
        if text is None and self._tokenizer is not None:
            text = self._tokenizer.decode(self._prompt_ids(prompt_index), skip_special_tokens=False)
            self._texts[prompt_index] = text
        return text or ""

    def _prompt_offsets(self, prompt_index: int) -> list[int]:
        """Return where a prompt's tokens begin in its text; a token that the tokenizer added has no length."""
        text, ids = self._prompt_text(prompt_index), self._prompt_ids(prompt_index)
        found: list[int] = []
        tokenizer = self._tokenizer
        if tokenizer is not None and ids[0] in tokenizer.special_token_ids:
            found += [] if text.startswith(tokenizer.token_text(ids[0])) else [0]
        offsets = TextOffsets(self._tokenizer, skip_special_tokens=False)
        return found + [min(offsets.take(token_id), len(text)) for token_id in ids[len(found) :]]
