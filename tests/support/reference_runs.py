"""Runs the reference decoder through its worker, and keeps the logits of every position."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.compute.backend import WorkerParts
from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder
from quire.compute.reference.decoder import ReferenceDecoder
from quire.compute.sampling.reference import ReferenceSampler
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import DecoderWeights
from quire.compute.weights.stacked import unstacked
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.model_runner import StepInputs, StepOutputs
from quire.compute.worker.worker import Worker
from quire.core.step import NO_BLOCK, BlockCopy, BlockMove, StepResult
from support.step_plans import PlanDriver, Work

Logits = NDArray[np.float32]


class AllLogits:
    """A model runner that computes the logits of every token, and passes on those wanted."""

    def __init__(self, decoder: ReferenceDecoder) -> None:
        self.vocab_size = decoder.vocab_size
        self.last: list[Logits] = []
        self._decoder = decoder

    def run(self, inputs: StepInputs, cache: CacheEngine) -> StepOutputs:
        every = np.arange(len(inputs.token_ids))
        outputs = self._decoder.run(replace(inputs, logit_indices=every), cache)
        self.last = [outputs.logits[inputs.tokens_of(s)] for s in range(len(inputs.entries))]
        wanted = inputs.logit_indices
        return replace(outputs, logits=outputs.logits[wanted], finite_logits=outputs.finite_logits[wanted])


class ReferenceRun:
    """A worker over a model folder, driven by hand; KV memory starts poisoned."""

    def __init__(
        self,
        folder: Path,
        *,
        block_size: int = 16,
        blocks: Iterable[int] | None = None,
        num_blocks: int = 256,
        num_host_blocks: int = 4,
        spec: DecoderSpec | None = None,
        weights: str = "auto",
        kv_dtype: str = "float32",
    ) -> None:
        spec = spec or read_model(ModelFolder(folder)).spec
        loaded = DecoderWeights.load(spec, unstacked(Checkpoint.open(folder)), weights=weights)
        kv_spec = spec.kv_cache_spec(block_size)
        cache = CacheEngine(kv_spec, num_blocks=num_blocks, num_host_blocks=num_host_blocks, poison=True)
        self.runner = AllLogits(ReferenceDecoder(spec, loaded, kv_dtype=kv_dtype))
        self.worker = Worker(WorkerParts(self.runner, cache, ReferenceSampler()))
        self.worker.start()
        self.driver = PlanDriver.over(kv_spec, range(num_blocks) if blocks is None else blocks)
        self.logits: dict[tuple[int, int], Logits] = {}  # (row, position) → [vocab_size]

    def step(
        self,
        *works: Work,
        moves_out: Sequence[BlockMove] = (),
        copies: Sequence[BlockCopy] = (),
        moves_in: Sequence[BlockMove] = (),
    ) -> StepResult:
        """Run one step and keep its logits."""
        plan = self.driver.plan(*works, moves_out=moves_out, copies=copies, moves_in=moves_in)
        self.worker.submit(plan)
        result = self.worker.collect()
        computed = [work for work in works if work.row not in result.failures]
        for work, logits in zip(computed, self.runner.last, strict=False):
            self.logits |= {(work.row, work.start + i): row for i, row in enumerate(logits)}
        return result

    def prefill(self, row: int, tokens: Sequence[int], chunks: Iterable[int] = ()) -> int:
        """Open a row and compute its tokens, cut into the chunks given; return the next token."""
        self.driver.open(row, tokens)
        start = 0
        for count in chunks:
            self.step(Work(row, start, count))
            start += count
        return self.step(Work(row, start, len(tokens) - start, 1)).tokens[0]

    def together(self, tokens: Sequence[int], rows: Sequence[Sequence[int]]) -> list[int]:
        """Compute rows in the same steps, each by its chunks, and begun a step after the one before it.

        Returns the number of rows in each step.
        """
        for row, chunks in enumerate(rows):
            self.driver.open(row, tokens[: sum(chunks)])
        numbers: list[int] = []
        while works := [
            Work(row, sum(chunks[: len(numbers) - row]), chunks[len(numbers) - row])
            for row, chunks in enumerate(rows)
            if 0 <= len(numbers) - row < len(chunks)
        ]:
            self.step(*works)
            numbers.append(len(works))
        return numbers

    def decode(self, row: int, start: int, count: int) -> list[int]:
        """Compute `count` tokens one after another, the first at position `start`."""
        return [self.step(Work(row, start + i, 1, 1)).tokens[0] for i in range(count)]

    def prefill_behind_windows(self, row: int, tokens: list[int], chunks: Sequence[int]) -> None:
        """Compute tokens in chunks; blocks that have left a window leave the table first."""
        self.driver.open(row, tokens)
        start = 0
        for count in chunks:
            for group, each in enumerate(self.driver.spec.groups):
                for index in range(each.first_needed(start) // self.driver.spec.block_size):
                    self.driver.set_block(row, group, index, NO_BLOCK)
            self.step(Work(row, start, count))
            start += count

    def bits(self, row: int, length: int) -> bytes:
        """Return the logits of a row's first positions, as bytes."""
        return b"".join(self.logits[row, position].tobytes() for position in range(length))
