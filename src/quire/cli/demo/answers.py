"""Chapter 5: the same memory under a real model, which answers several questions at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from quire.cli.demo.block_map import chip
from quire.cli.demo.engine import WatchedExecutor
from quire.cli.demo.panels import draw_memory
from quire.cli.demo.scene import Picture, Scene
from quire.cli.demo.snapshot import MemorySnapshot, describe_changes, read_snapshot
from quire.cli.text import FAINT, Line, line, paragraph, span
from quire.compute.backend import WorkerParts
from quire.compute.models.hub import GUIDE
from quire.compute.worker.worker import Worker
from quire.core.clock import Clock, SystemClock
from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.factory import plan_engine
from quire.engine.text.tokenizer import Tokenizer

SYSTEM_PROMPT = (
    "You are the guide of quire, an engine that serves language models from paged memory. Answer in a few sentences."
)
QUESTIONS = (
    ("A", "What is a block table?"),
    ("B", "What is copy-on-write?"),
    ("C", "What is prefix caching?"),
    ("D", "What is a scheduler?"),
)
NUM_BLOCKS = 32
MAX_TOKENS = 56
DISK_BYTES = 4 << 20
STEPS_PER_PICTURE = 8
STEPS_TOGETHER = 12


def answers() -> Iterator[Scene]:
    """One question, then three more with the same system prompt, then the end of all four."""
    engine = AnsweringEngine(SystemClock())
    try:
        first, *others = QUESTIONS
        request = engine.ask(*first)
        yield Scene(
            "A asks the guide, a model of 2.8 million parameters that comes with quire",
            f"Its prompt has {request.num_prompt_tokens} tokens: a system prompt and the question.",
            engine.steps(1),
        )
        requests = [engine.ask(*question) for question in others]
        pictures = engine.steps(STEPS_TOGETHER)
        hits = ", ".join(f"{request.num_cached_tokens} of {request.num_prompt_tokens}" for request in requests)
        yield Scene(
            "B, C and D ask as well, and all four are answered at once",
            f"A's blocks already hold {hits} tokens of their prompts: the system prompt is stored once, and computed "
            "once. Then each step computes one token for each request.",
            pictures,
        )
        yield Scene(
            "All four have their answers",
            "Each answer is the same, to the token, as if it had run alone. The full blocks stay cached for the next "
            "request.",
            engine.steps(),
        )
    finally:
        engine.close()


class AnsweringEngine:
    """An engine with the guide, and the questions asked so far."""

    def __init__(self, clock: Clock, disk_cache: str | None = None) -> None:
        config = EngineConfig(
            model=GUIDE,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            max_model_len=256,
            disk_cache=disk_cache,
            disk_cache_size=DISK_BYTES,
        )
        bytes_per_block = plan_engine(config).report.plan.bytes_per_block
        blueprint = plan_engine(replace(config, kv_memory=NUM_BLOCKS * bytes_per_block))
        self._executors: list[WatchedExecutor] = []
        self._engine = blueprint.build(clock, make_executor=self._watched)
        self._clock = clock
        self._tokenizer = Tokenizer.open(blueprint.tokenizer_files, vocab_size=blueprint.vocab_size)
        self._asked: list[tuple[Request, str]] = []
        self._memory = self._engine.scheduler.memory
        self._snapshot = read_snapshot(self._memory)

    def _watched(self, parts: WorkerParts) -> WatchedExecutor:
        self._executors.append(WatchedExecutor(Worker(parts)))
        return self._executors[-1]

    def ask(self, name: str, question: str) -> Request:
        """Ask the guide. Mutates."""
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        request = Request(name, self._tokenizer.encode_chat(messages), sampling)
        self._engine.add_request(request)
        self._asked.append((request, question))
        return request

    def steps(self, count: int | None = None) -> list[Picture]:
        """Run `count` steps, or all; return pictures of some steps and of the last. Mutates."""
        pictures: list[Picture] = []
        start_s, num_before, num_steps = self._clock.now(), self._num_tokens(), 0
        while num_steps != count and self._engine.step() is not None:
            self._engine.scheduler.check()
            num_steps += 1
            if num_steps % STEPS_PER_PICTURE == 1:
                pictures.append(self._picture(f"step {num_steps}"))
        rate = (self._num_tokens() - num_before) / max(self._clock.now() - start_s, 1e-9)
        text = f"{rate:>5,.0f} tokens a second on this machine" if count is None else f"step {num_steps}"
        return [*pictures, self._picture(text)]

    def close(self) -> None:
        """Close the engine. Mutates."""
        self._engine.close()

    def _num_tokens(self) -> int:
        return sum(request.num_output_tokens for request, _ in self._asked)

    def _picture(self, text: str) -> Picture:
        arrived = self._executors[-1].take_arrived()
        before, self._snapshot = self._snapshot, read_snapshot(self._memory, (), self._snapshot, arrived)
        turns = [
            (request.request_id, question, self._tokenizer.decode(request.output_token_ids).strip())
            for request, question in self._asked
        ]
        return partial(_draw, turns, self._snapshot, describe_changes(before, self._snapshot), text)


def _draw(
    turns: list[tuple[str, str, str]], snapshot: MemorySnapshot, changes: dict[int, str], text: str, columns: int
) -> list[Line]:
    lines: list[Line] = []
    for name, question, answer in turns:
        lines.append(line(chip(name), " ", span(question, FAINT)))
        lines += [line("    ", *shown) for shown in paragraph(answer, columns - 4)]
    return [*lines, (), line(span(text, FAINT)), *draw_memory(snapshot, changes, columns)]
