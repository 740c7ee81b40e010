"""A decoder of the compiled core with adapters, asked for every logit of a step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.compute.adapters.folder import Adapter
from quire.compute.backend import WorkerParts
from quire.compute.models.base import DecoderSpec
from quire.compute.native import NativeSettings, kv_cache_spec
from quire.compute.native.load import make_parts
from quire.compute.reference.adapters import AdaptedDecoder
from quire.compute.reference.decoder import ReferenceDecoder
from quire.compute.sampling.reference import ReferenceSampler
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import DecoderWeights
from quire.compute.weights.stacked import unstacked
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.model_runner import StepInputs
from support.native_runs import FLOAT32

BLOCK = 16
MOST_BLOCKS, MOST_PROMPTS = 16, 4
SETTINGS = replace(FLOAT32, adapter_rank=32, num_threads=2)


class AdaptedModel:
    """A decoder with memory, of which steps ask for every logit."""

    def __init__(self, folder: Path, spec: DecoderSpec, settings: NativeSettings = SETTINGS) -> None:
        kv_spec = kv_cache_spec(spec, BLOCK, settings.stored_kv_dtype)
        self.cache = CacheEngine(kv_spec, num_blocks=MOST_BLOCKS * MOST_PROMPTS * len(kv_spec.groups), poison=True)
        self.cache.allocate()
        self.parts = make_parts(spec, unstacked(Checkpoint.open(folder)), settings, self.cache)
        self.num_groups, self.vocab_size = len(kv_spec.groups), spec.vocab_size

    @classmethod
    def of_reference(cls, folder: Path, spec: DecoderSpec, weights: str = "auto") -> AdaptedModel:
        """Return the same over the reference decoder."""
        made = cls.__new__(cls)
        kv_spec = spec.kv_cache_spec(BLOCK)
        made.cache = CacheEngine(kv_spec, num_blocks=MOST_BLOCKS * MOST_PROMPTS * len(kv_spec.groups), poison=True)
        made.cache.allocate()
        loaded = DecoderWeights.load(spec, unstacked(Checkpoint.open(folder)), weights=weights)
        runner = AdaptedDecoder(ReferenceDecoder(spec, loaded))
        made.parts = WorkerParts(runner, made.cache, ReferenceSampler(), adapters=runner)
        made.num_groups, made.vocab_size = len(kv_spec.groups), spec.vocab_size
        return made

    def load(self, *adapters: Adapter) -> None:
        assert self.parts.adapters is not None
        for adapter in adapters:
            self.parts.adapters.load_adapter(adapter)

    def logits(
        self, prompts: list[list[int]], adapters: list[str], starts: list[int] | None = None
    ) -> list[NDArray[np.float32]]:
        """Return the logits of every token that a step computes; prompt i lies in the blocks of place i of a group."""
        assert len(prompts) <= MOST_PROMPTS and max(map(len, prompts)) <= MOST_BLOCKS * BLOCK
        starts = starts or [0] * len(prompts)
        counts = [len(prompt) - start for prompt, start in zip(prompts, starts, strict=True)]
        ends = np.cumsum([0, *counts])
        positions = np.concatenate([np.arange(start, start + n) for start, n in zip(starts, counts, strict=True)])
        first_blocks = np.repeat(np.arange(len(prompts)) * MOST_BLOCKS, counts)
        slots = (first_blocks + positions // BLOCK) * BLOCK + positions % BLOCK
        table = np.arange(len(prompts) * MOST_BLOCKS).reshape(len(prompts), MOST_BLOCKS)
        every = np.arange(ends[-1])
        inputs = StepInputs(
            entries=tuple(range(len(prompts))),
            query_starts=ends,
            token_ids=np.array([t for p, s in zip(prompts, starts, strict=True) for t in p[s:]], np.int64),
            positions=positions,
            slots=tuple(slots + group * MOST_BLOCKS * MOST_PROMPTS * BLOCK for group in range(self.num_groups)),
            block_tables=tuple(table + group * MOST_BLOCKS * MOST_PROMPTS for group in range(self.num_groups)),
            logit_starts=ends,
            logit_indices=every,
            rows=np.arange(len(prompts)),
            adapters=tuple(adapters) if any(adapters) else (),
        )
        found = self.parts.runner.run(inputs, self.cache).logits[:, : self.vocab_size].copy()
        return [found[start:end] for start, end in pairwise(ends)]
