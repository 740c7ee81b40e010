"""The answers of llama-server's /completion, in one piece or as a stream, and of /props."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec import UNSET, UnsetType

import quire
from quire.engine.outputs import CompletionDelta, Logprob
from quire.serve.errors import ApiError
from quire.serve.json_line import encode
from quire.serve.render.answer import shown_model
from quire.serve.render.events import error_event
from quire.serve.render.logprobs import Entry, TokenNames, likeliest, told, written
from quire.serve.run.generation import Generation, Results, TokenCounts
from quire.serve.schemas.llama_server import (
    OPTION_NAMES,
    LlamaCompletion,
    LlamaDefaults,
    LlamaLikely,
    LlamaProbability,
    LlamaProps,
    LlamaTextFields,
    LlamaTimings,
    StopType,
)
from quire.serve.services import Services


class LlamaReply:
    """The answer to one call. Mutable."""

    def __init__(self, fields: LlamaTextFields, generation: Generation) -> None:
        self._fields = fields
        self._generation = generation
        self._names = TokenNames(generation.services.model.tokenizer)

    def whole(self, results: Results) -> LlamaCompletion:
        """Return the answer in one piece. Mutates."""
        [(_, output)] = results.texts
        return self._part(output, results.counts, is_whole=True)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Run the call, and yield the events of its stream. Mutates."""
        async with aclosing(self._generation.steps()) as all_steps:
            async for steps in all_steps:
                yield b"".join(
                    b"data: " + encode(self._part(output, self._generation.counts)) + b"\n\n"
                    for _, delta in steps
                    for output in delta.outputs
                )

    def failed(self, error: ApiError) -> bytes:
        """Return the event that ends a failed stream. Does not mutate."""
        return error_event(error)

    def _part(self, output: CompletionDelta, counts: TokenCounts, *, is_whole: bool = False) -> LlamaCompletion:
        """Return an answer, or a part of one; the last part has the finish reason. Does not mutate."""
        is_last, writes_nothing = output.finish_reason is not None, self._generation.request.prompts_only
        shows_tokens = (self._fields.return_tokens or not is_whole) and not writes_nothing
        part: dict[str, Any] = {
            "content": "" if writes_nothing else output.text,
            "tokens": list(output.token_ids) if shows_tokens else [],
            "stop": is_last,
            "tokens_predicted": counts.output,
            "tokens_evaluated": counts.prompt,
            "completion_probabilities": UNSET if writes_nothing else self._probabilities(output),
        }
        if not is_last:
            return LlamaCompletion(**part)
        ends_by_length = writes_nothing or output.finish_reason == "length"
        word = output.stop_reason if isinstance(output.stop_reason, str) and not ends_by_length else ""
        stop_type: StopType = "limit" if ends_by_length else "word" if word else "eos"
        return LlamaCompletion(
            **part,
            model=shown_model(self._fields, self._generation),
            stop_type=stop_type,
            stopping_word=word,
            truncated=False,
            timings=self._timings(counts),
        )

    def _probabilities(self, output: CompletionDelta) -> list[LlamaProbability] | UnsetType:
        if not self._fields.n_probs or not output.logprobs:
            return UNSET
        return written(map(self._probability, output.token_ids, output.logprobs))

    def _probability(self, token_id: int, entry: Entry) -> LlamaProbability:
        top = [self._likely(each, at) for each, at in likeliest(entry, self._fields.n_probs or 0)]
        itself = self._likely(token_id, entry[token_id])
        return LlamaProbability(itself.id, itself.token, itself.bytes, itself.logprob, top)

    def _likely(self, token_id: int, entry: Logprob) -> LlamaLikely:
        name, token_bytes = self._names.name(token_id, entry), self._names.bytes_of(token_id) or []
        return LlamaLikely(token_id, name, token_bytes, told(entry.logprob))

    def _timings(self, counts: TokenCounts) -> LlamaTimings:
        """Return the times, from the arrival on: the wait in the queue counts as prompt time."""
        generation = self._generation
        began, first, now = generation.context.arrival_s, generation.first_token_s, generation.services.clock.now()
        prompt_s, text_s = max(first - began, 1e-6), max(now - first, 1e-6)
        return LlamaTimings(
            counts.cached,
            counts.prompt - counts.cached,
            1e3 * prompt_s,
            (counts.prompt - counts.cached) / prompt_s,
            counts.output,
            1e3 * text_s,
            counts.output / text_s,
        )


def llama_props(services: Services, name: str) -> LlamaProps:
    """Return the properties of the server, with this name for its model. Does not mutate."""
    tokenizer, model = services.model.tokenizer, services.model
    sampling = model.get_default_sampling_params()
    numbers = {theirs: getattr(sampling, ours) for ours, theirs in OPTION_NAMES.items()}

    def text_of(token_id: int | None) -> str:
        return "" if tokenizer is None or token_id is None else tokenizer.token_text(token_id)

    return LlamaProps(
        default_generation_settings=LlamaDefaults(
            n_ctx=model.limits.max_model_len,
            params={name: value for name, value in numbers.items() if type(value) in (int, float)},
        ),
        total_slots=model.limits.max_num_seqs,
        model_alias=name,
        chat_template="" if tokenizer is None else tokenizer.template_source(),
        bos_token=text_of(None if tokenizer is None else tokenizer.bos_token_id),
        eos_token=text_of(None if tokenizer is None else tokenizer.eos_token_id),
        modalities={"vision": model.report.reads_images, "audio": False},
        build_info=f"quire {quire.__version__}",
    )
