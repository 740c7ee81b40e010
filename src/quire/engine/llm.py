"""LLM: a model in this process, with blocking calls."""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any, Unpack

from quire.core.adapters import AdapterFacts
from quire.core.clock import Clock, SystemClock
from quire.core.config import EngineConfig, EngineSettings
from quire.core.executor import NoteLoaded
from quire.core.pooling import LABELS, Pooling
from quire.core.sampling_params import SamplingParams
from quire.core.validate import longest_text
from quire.engine.client import EngineClient
from quire.engine.commands import AnyCommand, OperatorVerbs
from quire.engine.door import FOR_VECTORS, LocalModel, Ticket, make_config, open_engine
from quire.engine.outputs import ClassificationOutput, EmbeddingOutput, RequestOutput
from quire.engine.process.interrupts import InterruptsDeferred
from quire.engine.process.ownership import Turn
from quire.engine.progress import ProgressBar
from quire.engine.records.stats import EngineStats
from quire.engine.text.output_processor import OutputProcessor, PreparedRequest, RequestText
from quire.engine.text.prompts import Message, Prompt, Prompts, chat_options, cut_to, split_conversations, split_prompts
from quire.engine.text.scores import cosine, cut_pairs, first_share, pair_prompts, scored_texts


class LLM(LocalModel, OperatorVerbs):
    """A model in this process. Settings are the fields of `EngineConfig`, as keywords.

    Prompts are texts, lists of token ids, `{"prompt_token_ids": […]}` or conversations. An invalid prompt raises before
    anything is enqueued; a request that fails while it runs gets an output with `finish_reason` "error", and the others
    go on. One thread can use an `LLM` at a time: another thread gets `RequestStateError` at once, and so does a process
    that was forked after it was opened. `note_loaded` is called with the progress of opening: bytes loaded and total
    bytes of the "weights"; on a GPU then recorded and total "graphs".

    >>> from quire import LLM, SamplingParams
    >>> with LLM("guide", kv_memory="4MiB") as llm:
    ...     sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    ...     outputs = llm.generate(["The memory", [15, 2, 8]], sampling)
    >>> [len(output.outputs[0].token_ids) for output in outputs], outputs[0].prompt, outputs[1].prompt
    ([3, 3], 'The memory', None)
    >>> outputs[0].outputs[0].finish_reason
    'length'
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig = "guide",
        *,
        clock: Clock | None = None,
        note_loaded: NoteLoaded | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        self._clock = clock or SystemClock()
        super().__init__(*open_engine(make_config(model, settings), self._clock, note_loaded))
        self._client = EngineClient(self._core)
        self._processor = OutputProcessor(self._client, self._door.tokenizer, self._clock, self._door.condemn)
        self._turn = Turn()
        self._left: list[Generator[RequestText, None, None]] = []  # abandoned, to be closed

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        adapter: str | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Return the outputs of one prompt or several, in their order.

        `sampling_params` is one for all prompts, or one for each. `options` override fields of `SamplingParams`;
        `max_new_tokens` and `do_sample`, as in Hugging Face, are also allowed. `adapter`: the name of an adapter that
        was given as `adapter={name: folder}`; None: the model itself.
        """
        with self._turn:
            return self._run(self._prepare(prompts, sampling_params, options, adapter), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Message] | None = None,
        use_tqdm: bool = True,
        adapter: str | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Return the answers to one conversation or several, in their order.

        A content is a text, or a list of parts: `{"type": "text", "text": …}`, and for a model that reads images
        `{"type": "image", "image": …}` with bytes, a `pathlib.Path`, an image of Pillow, a data URL or base64.
        `options`: `add_generation_prompt`, `chat_template_kwargs`, `continue_final_message` (the answer continues the
        last message, the assistant's), and those of `generate`; so is `adapter`.
        """
        conversations = split_conversations(messages)
        chat, others = chat_options(tools, options)
        with self._turn:
            limits, ticket = self._client.limits, Ticket(adapter=adapter)
            prepared = self._door.prepare_all(
                conversations, limits, sampling_params, chat=chat, options=others, ticket=ticket
            )
            return self._run(prepared, use_tqdm)

    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int = 0,
        pooling: str | None = None,
        truncate: bool = False,
        use_tqdm: bool = True,
        adapter: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Return the vectors of prompts, each of length 1, in their order.

        `dimensions`: keep this many; 0: all. `pooling`: last, mean, or cls for an encoder; None: as set, or as
        the model's folder says. `truncate`: a text that is too long loses its end, instead of being refused.

        >>> with LLM("guide", kv_memory="4MiB", pooling="mean") as llm:
        ...     outputs = llm.embed(["The memory", "A block table"], dimensions=8, use_tqdm=False)
        >>> [len(output.embedding) for output in outputs], abs(sum(x * x for x in outputs[0].embedding) - 1) < 1e-6
        ([8, 8], True)
        """
        with self._turn:
            ticket = Ticket(pooling=self._door.pooling_for(pooling, dimensions), adapter=adapter)
            prepared = self._prepare_texts(split_prompts(prompts), ticket, truncate)
            return [each.embedding() for each in self._finished(prepared, use_tqdm)]

    def classify(
        self, prompts: Prompts, *, truncate: bool = False, use_tqdm: bool = True
    ) -> list[ClassificationOutput]:
        """Return the labels of prompts, in their order; for a model that has labels. `truncate`: as for `embed`.

        >>> with LLM("guide", kv_memory="4MiB", score_tokens="a,the") as llm:
        ...     (output,) = llm.classify("What is", use_tqdm=False)
        >>> sorted(output.shares), abs(sum(output.shares.values()) - 1) < 1e-6
        (['a', 'the'], True)
        """
        with self._turn:
            prepared = self._prepare_texts(split_prompts(prompts), Ticket(pooling=Pooling(LABELS)), truncate)
            outputs = [each.embedding() for each in self._finished(prepared, use_tqdm)]
        names = self.report.labels
        return [
            ClassificationOutput(
                each.request_id,
                each.prompt,
                dict(sorted(zip(names, each.embedding, strict=False), key=lambda pair: -pair[1])),
                each.error,
            )
            for each in outputs
        ]

    def score(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate: bool = False,
        use_tqdm: bool = True,
    ) -> list[float]:
        """Return how well each document answers a query: the share of the first label, or the cosine of vectors.

        A request that failed scores NaN. `instruction`: the task, for a model that was trained with instructions.
        `truncate`: what is too long loses its end, of a pair for a cross-encoder the longer text.

        >>> with LLM("guide", kv_memory="4MiB", pooling="mean") as llm:
        ...     scores = llm.score("blocks of memory", ["blocks of memory", "a river"], use_tqdm=False)
        >>> scores[0] > scores[1], round(scores[0], 6)
        (True, 1.0)
        """
        texts = scored_texts(query, documents)
        with self._turn:
            if self.report.labels:
                ticket, limits = Ticket(pooling=Pooling(LABELS)), self._client.limits
                asked_pairs = [(query, text) for text in texts]
                pairs, chat = pair_prompts(asked_pairs, instruction, self.tokenizer, plain=limits.one_step)
                if truncate:
                    pairs, chat = cut_pairs(pairs, chat, self.tokenizer, longest_text(limits))
                prepared = self._door.prepare_all(pairs, limits, FOR_VECTORS, chat=chat, ticket=ticket)
                finished = self._finished(prepared, use_tqdm)
                return [first_share(each.vector) if each.vector else math.nan for each in finished]
            ticket = Ticket(pooling=self._door.pooling_for(None, 0))
            prepared = [*self._prepare_texts([query], ticket, truncate), *self._prepare_texts(texts, ticket, truncate)]
            asked, *others = (each.vector for each in self._finished(prepared, use_tqdm))
        return [cosine(asked, other) if asked and other else math.nan for other in others]

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        adapter: str | None = None,
        **options: Any,
    ) -> Generator[RequestOutput, None, None]:
        """Return an iterator over snapshots of the outputs: each holds the output so far.

        Close the iterator to end the requests early. Other calls are allowed between two snapshots.
        """
        with self._turn:
            prepared = self._prepare(prompts, sampling_params, options, adapter)
        return self._snapshots(prepared)

    def stats(self) -> EngineStats:
        """Return the engine's counters: steps, preemptions, evictions, cache hits. Does not mutate.

        >>> with LLM("guide", kv_memory="4MiB") as llm:
        ...     outputs = llm.generate([[5] * 40, [5] * 40], max_tokens=1, use_tqdm=False)
        ...     stats = llm.stats()
        >>> stats.queried_tokens_total, stats.hit_tokens_total, stats.preemptions_total, stats.evictions_total
        (80, 32, 0, 0)
        """
        return self._core.stats()

    def send(self, command: AnyCommand) -> None:
        """Carry out a command at once. Mutates."""
        with self._turn:
            self._client.send(command)

    def load_adapter(self, name: str, folder: str | os.PathLike[str]) -> AdapterFacts:
        """Load the adapter in a folder under a name; raises if it does not fit the model or the memory. Mutates."""
        with self._turn:
            return self._door.adapters.load_now(name, os.fspath(folder), self._client.send, self._client.stats)

    def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter and free its memory. Mutates."""
        with self._turn:
            self._door.adapters.unload(name, self._client.send)

    def close(self) -> None:
        """Free the memory. May be called twice; later calls raise an error. Does nothing in a forked process."""
        if not self._turn.home.is_here:
            return
        with self._turn:
            self._client.close()
            self._door.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prepare(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        options: Mapping[str, Any],
        adapter: str | None,
    ) -> list[PreparedRequest]:
        limits, ticket = self._client.limits, Ticket(adapter=adapter)
        return self._door.prepare_all(split_prompts(prompts), limits, sampling, options=options, ticket=ticket)

    def _prepare_texts(self, texts: Sequence[Prompt], ticket: Ticket, truncate: bool) -> list[PreparedRequest]:
        limits = self._client.limits
        if truncate:
            texts = [cut_to(longest_text(limits), text, self.tokenizer) for text in texts]
        return self._door.prepare_all(texts, limits, FOR_VECTORS, ticket=ticket)

    def _snapshots(self, prepared: list[PreparedRequest]) -> Generator[RequestOutput, None, None]:
        requests = self._advance(prepared)
        try:
            while True:
                with self._turn:
                    request = next(requests, None)
                    if request is None:
                        return
                    output = request.output()
                yield output
        finally:
            self._leave(requests)

    def _leave(self, requests: Generator[RequestText, None, None]) -> None:
        """End requests that no caller reads; if a step is running, let it end them.

        Python can close an abandoned iterator in any thread, even in the middle of a step.
        """
        self._left.append(requests)
        if self._turn.take():
            try:
                self._end_left()
            finally:
                self._turn.give()

    def _end_left(self) -> None:
        while self._left:
            self._left.pop().close()

    def _run(self, prepared: list[PreparedRequest], show_progress: bool) -> list[RequestOutput]:
        return [each.output() for each in self._finished(prepared, show_progress)]

    def _finished(self, prepared: list[PreparedRequest], show_progress: bool) -> list[RequestText]:
        """Run requests to their end."""
        bar = ProgressBar(len(prepared) if show_progress else 0, sys.stderr, self._clock)
        done: dict[str, RequestText] = {}
        with closing(bar), closing(self._advance(prepared)) as requests:
            for request in requests:
                bar.note(request)
                if request.finished:
                    done[request.request_id] = request
        return [done[each.request.request_id] for each in prepared]

    def _advance(self, prepared: list[PreparedRequest]) -> Generator[RequestText, None, None]:
        """Run requests to their end, yielding each when it advances; closing the generator aborts the rest."""
        inbox: deque[RequestText] = deque()
        under_way: set[str] = set()
        held: list[AdapterFacts] = []
        try:
            for digest in dict.fromkeys(each.request.scope.adapter for each in prepared):
                facts = self._door.adapters.facts_of(digest) if digest else None
                if facts is not None:
                    self._door.adapters.hold_now(facts, self._client.send, self._client.stats)
                    held.append(facts)
            for each in prepared:
                under_way.add(each.request.request_id)  # first: an interrupt must not leave it running
                self._processor.add(each, inbox.append)
                self._client.send(each.request)
            while under_way:
                self._end_left()
                if not inbox:
                    with InterruptsDeferred():  # the updates of other calls come only once
                        self._processor.process(self._client.receive())
                while inbox:
                    request = inbox.popleft()
                    if request.finished:
                        under_way.discard(request.request_id)
                    yield request
        finally:
            with InterruptsDeferred():
                for request_id in under_way:
                    self._processor.abort(request_id)
                for facts in held:
                    self._door.adapters.release(facts, self._client.send)
