"""Whole models with the fused operations and the sampler of the device: the numbers and tokens of the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.layer_launches import WAITS
from torch.utils._python_dispatch import TorchDispatchMode

from quire import SamplingParams
from quire.compute.backend import WorkerParts
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import NormScope
from quire.compute.sampling.reference import ReferenceSampler
from quire.compute.torch.attention.base import AttentionBackend
from quire.compute.torch.decoder import Implementations, TorchDecoder
from quire.compute.torch.experts import ExpertOperations, PlainExperts
from quire.compute.torch.fused_experts import FusedExperts
from quire.compute.torch.fused_operations import FusedOperations
from quire.compute.torch.host_sampler import HostSampler
from quire.compute.torch.operations import Operations, PlainOperations
from quire.compute.torch.products import product
from quire.compute.torch.runner import DeviceSampler, TorchRunner
from quire.compute.torch.sampling import TorchSampler
from quire.compute.torch.settings import TorchSettings
from quire.compute.torch.weights import DTYPES, TorchWeights
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.worker.worker import Worker
from support.spec_models import ON_TORCH, SPECS, write_spec_model
from support.step_plans import Work
from support.torch_runs import FLOAT32, EveryLogit, TorchRun


class Noted(TorchDispatchMode):
    """Notes the names of torch's operations."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


OperationsOver = Callable[[AttentionBackend[Any]], Operations]
PLAIN = PlainOperations, PlainExperts(product)
FUSED = FusedOperations, FusedExperts(batch_invariant=False)
GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ([5, 9, 60, 2, 33, 7, 7, 12, 1], [44, 3, 8])


class ChosenRun(TorchRun):
    """The same run, with operations and a sampler of one's own choice, whatever the device."""

    def __init__(
        self,
        folder: Path,
        spec: DecoderSpec,
        settings: TorchSettings,
        chosen: tuple[OperationsOver, ExpertOperations[Any]],
        sampler: DeviceSampler,
    ) -> None:
        super().__init__(folder, spec=spec, settings=settings)
        cache = self.worker.cache
        reader = WeightReader(spec, Checkpoint.open(folder), "float32")
        weights = TorchWeights.load(spec, reader, DTYPES[settings.dtype], cache.device)
        operations, experts = chosen
        engines = Implementations(cache.attention, operations(cache.attention), product, experts)
        self.launcher = TorchRunner(TorchDecoder(spec, weights, engines), sampler)
        self.runner = EveryLogit(self.launcher)
        self.worker = Worker(WorkerParts(self.runner, cache, sampler))
        self.worker.start()


def runs(folder: Path, spec: DecoderSpec, settings: TorchSettings) -> tuple[ChosenRun, ChosenRun]:
    """Return a plain run and a fused one."""
    plain = ChosenRun(folder, spec, settings, PLAIN, HostSampler(ReferenceSampler()))
    return plain, ChosenRun(folder, spec, settings, FUSED, TorchSampler(spec.vocab_size))


def logits_and_tokens(run: TorchRun, sampling: SamplingParams) -> tuple[np.ndarray, list[int]]:
    """Return all logits of two prompts, computed together, and what three steps draw behind each of them."""
    tokens: list[int] = []
    for row, prompt in enumerate(PROMPTS):
        run.driver.open(row, prompt, sampling)
    works = [Work(row, 0, len(prompt), samples=1) for row, prompt in enumerate(PROMPTS)]
    for _ in range(3):
        result = run.step(*works)
        assert not result.failures
        tokens += result.tokens
        works = [Work(work.row, work.start + work.count, 1, samples=1) for work in works]
    return np.stack([run.logits[key] for key in sorted(run.logits)]), tokens


@pytest.mark.parametrize("model", ON_TORCH)
def test_every_kind_of_model_computes_the_same(model: str, device: str, tmp_path: Path) -> None:
    write_spec_model(tmp_path, SPECS[model])
    plain, fused = runs(tmp_path, SPECS[model], replace(FLOAT32, device=device))
    expected, tokens = logits_and_tokens(plain, GREEDY)
    found, own = logits_and_tokens(fused, GREEDY)
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())
    assert own == tokens


def test_norms_of_all_heads_in_layers_that_differ_are_those_computed_plainly(device: str, tmp_path: Path) -> None:
    mixed = SPECS["mixed-layers"]
    for number, value_norm in enumerate((True, False)):
        attention = replace(mixed.attention, qk_norm_scope=NormScope.ALL_HEADS, value_norm=value_norm)
        spec = replace(mixed, attention=attention)
        (tmp_path / f"{number}").mkdir()
        write_spec_model(tmp_path / f"{number}", spec)
        plain, fused = runs(tmp_path / f"{number}", spec, replace(FLOAT32, device=device))
        expected, _ = logits_and_tokens(plain, GREEDY)
        found, _ = logits_and_tokens(fused, GREEDY)
        assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


def test_heads_with_norms_of_their_own_are_written_without_waiting_for_the_device(device: str, tmp_path: Path) -> None:
    """So steps with them can be recorded. Attention itself is the plain one here, in which the host may wait."""
    write_spec_model(tmp_path, SPECS["parallel"])
    names: list[str] = []

    class Watched(FusedOperations):
        def rotate_and_write(self, *arguments: Any) -> torch.Tensor:
            with Noted(names):
                return super().rotate_and_write(*arguments)

    settings = replace(FLOAT32, device=device)
    chosen = Watched, FusedExperts(batch_invariant=False)
    run = ChosenRun(tmp_path, SPECS["parallel"], settings, chosen, TorchSampler(SPECS["parallel"].vocab_size))
    logits_and_tokens(run, GREEDY)
    assert names and not WAITS & set(names)


@pytest.mark.parametrize("model", ["plain", "mixed-layers"])
@pytest.mark.parametrize("kv_dtype", ["float16", "int8", "fp8", "k8v4", "int4"])
def test_every_kind_of_memory_is_written_as_plainly(kv_dtype: str, model: str, device: str, tmp_path: Path) -> None:
    write_spec_model(tmp_path, SPECS[model])
    settings = replace(FLOAT32, device=device, dtype="float16", kv_dtype=kv_dtype)
    plain, fused = runs(tmp_path, SPECS[model], settings)
    expected, _ = logits_and_tokens(plain, GREEDY)
    found, _ = logits_and_tokens(fused, GREEDY)
    assert np.abs(found - expected).max() <= 2e-2 * max(1.0, np.abs(expected).max())


def test_the_sampler_of_the_device_draws_what_that_of_the_host_draws(device: str, tmp_path: Path) -> None:
    spec, settings = SPECS["plain"], replace(FLOAT32, device=device)
    write_spec_model(tmp_path, spec)
    sampling = SamplingParams(
        temperature=1.5, top_p=0.95, top_k=40, seed=7, repetition_penalty=1.3, frequency_penalty=0.2, logprobs=2
    )
    samplers = TorchSampler(spec.vocab_size), HostSampler(ReferenceSampler())
    own, host = (ChosenRun(tmp_path, spec, settings, FUSED, sampler) for sampler in samplers)
    logits, tokens = logits_and_tokens(own, sampling)
    same, expected = logits_and_tokens(host, sampling)
    assert np.array_equal(logits, same)
    assert tokens == expected
    assert len(set(tokens)) > 1


def test_steps_under_way_draw_what_steps_draw_one_by_one(device: str, tmp_path: Path) -> None:
    write_spec_model(tmp_path, SPECS["plain"])
    plain, fused = runs(tmp_path, SPECS["plain"], replace(FLOAT32, device=device))
    sampling = SamplingParams(temperature=2.0, top_k=30, min_p=0.01, seed=11)
    _, expected = logits_and_tokens(plain, sampling)
    worker = Worker(WorkerParts(fused.launcher, fused.worker.cache, TorchSampler(64), launcher=fused.launcher))
    worker.start()
    for row, prompt in enumerate(PROMPTS):
        fused.driver.open(row, prompt, sampling)
    worker.submit(fused.driver.plan(*(Work(row, 0, len(prompt), samples=1) for row, prompt in enumerate(PROMPTS))))
    for ahead in range(2):
        decodes = (Work(row, len(prompt) + ahead, 1, samples=1) for row, prompt in enumerate(PROMPTS))
        worker.submit(fused.driver.plan(*decodes))
    assert [token for _ in range(3) for token in worker.collect().tokens] == expected
