"""A decoder in which everything is a kernel, as on a GPU: attention, operations, sampler; and decodes replayed."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.compute.backend import WorkerParts
from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder
from quire.compute.torch.attention.triton import TritonAttention
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import Implementations, TorchDecoder
from quire.compute.torch.draw_graphs import DrawGraphs
from quire.compute.torch.fused_experts import FusedExperts
from quire.compute.torch.fused_operations import FusedOperations
from quire.compute.torch.graphs import StepGraphs
from quire.compute.torch.load import with_key_centres
from quire.compute.torch.products import product
from quire.compute.torch.runner import Graphs, TorchRunner
from quire.compute.torch.sampling import TorchSampler
from quire.compute.torch.settings import kv_cache_spec
from quire.compute.torch.weights import TorchWeights
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.worker.worker import Worker
from support.recorders import recorder_of
from support.reference_runs import ReferenceRun
from support.spec_models import SPECS, write_spec_model
from support.step_plans import GREEDY, PlanDriver, Work
from support.tiny_checkpoint import write_tiny_qwen3
from support.torch_runs import FLOAT32, EveryLogit, TorchRun, poisoned

pytestmark = pytest.mark.usefixtures("small_rooms")

TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(40)]
MODELS = ["qwen3", "caps", "learned", "experts", "sinks"]


class KernelRun(TorchRun):
    """A worker whose decoder is made of kernels, driven by hand."""

    def __init__(self, folder: Path, spec: DecoderSpec, device: str, kv_dtype: str = "float32") -> None:
        where = torch.device(device)
        kv_spec = kv_cache_spec(spec, replace(FLOAT32, kv_dtype=kv_dtype))
        attention = TritonAttention(kv_spec, where, num_heads=spec.attention.num_heads)
        cache = TorchCache(kv_spec, attention, where, num_blocks=64, poison=True)
        reader = WeightReader(spec, Checkpoint.open(folder), "float32")
        weights = TorchWeights.load(spec, reader, torch.float32, where)
        experts = FusedExperts(batch_invariant=False)
        engines = Implementations(attention, FusedOperations(attention), product, experts)
        if kv_dtype == "int4":
            weights = with_key_centres(spec, weights, engines)
        decoder = TorchDecoder(spec, weights, engines)
        sampler = TorchSampler(spec.vocab_size)
        runner = TorchRunner(decoder, sampler)
        self.decoder = decoder
        self.runner = EveryLogit(runner)  # type: ignore[assignment]
        self.worker = Worker(WorkerParts(self.runner, cache, sampler))
        self.worker.start()
        self.driver = PlanDriver.over(kv_spec, range(64))
        self.logits = {}

    def launching(self, runner: TorchRunner, sampler: TorchSampler) -> None:
        """Launch steps from now on."""
        self.worker = Worker(WorkerParts(runner, self.worker.cache, sampler, launcher=runner))
        self.worker.start()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_qwen3(folder / "qwen3", settings={"num_hidden_layers": 2})
    for name in MODELS[1:]:
        (folder / name).mkdir()
        write_spec_model(folder / name, SPECS[name])
    return folder


def spec_of(folders: Path, model: str) -> DecoderSpec:
    return SPECS[model] if model in SPECS else read_model(ModelFolder(folders / model)).spec


@pytest.mark.parametrize("model", MODELS)
def test_logits_are_those_of_the_reference(model: str, folders: Path, device: str) -> None:
    spec = spec_of(folders, model)
    reference = ReferenceRun(folders / model, spec=spec)
    run = KernelRun(folders / model, spec, device)
    for each in (reference, run):
        each.prefill(0, TOKENS[:30], chunks=[18])
        each.driver.open(1, TOKENS[:9])
        each.step(Work(0, 30, 1), Work(1, 0, 9, 1))
    places = [(0, position) for position in range(31)] + [(1, position) for position in range(9)]
    theirs = np.stack([reference.logits[place] for place in places])
    ours = np.stack([run.logits[place] for place in places])
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("kv_dtype", ["k8v4", "int4"])
def test_4_bits_are_those_of_the_reference(kv_dtype: str, folders: Path, device: str) -> None:
    spec = spec_of(folders, "qwen3")
    exact, reference = ReferenceRun(folders / "qwen3"), ReferenceRun(folders / "qwen3", kv_dtype=kv_dtype)
    run = KernelRun(folders / "qwen3", spec, device, kv_dtype)
    for each in (exact, reference, run):
        each.prefill(0, TOKENS[:30], chunks=[18])
    best, right, ours = (np.stack([each.logits[0, i] for i in range(30)]) for each in (exact, reference, run))
    # A last bit that differs may tip the rounding of a number over; most of the logits agree as floats do.
    assert np.median(np.abs(ours - right)) <= 1e-4 * np.std(right)
    assert np.std(ours - right) <= 0.2 * np.std(right - best)


@pytest.mark.parametrize("kv_dtype", [pytest.param("int8", marks=pytest.mark.long), "int4"])
@pytest.mark.filterwarnings("ignore:invalid value")  # of numpy, in the interpreter
def test_replayed_decodes_are_those_computed(kv_dtype: str, tmp_path: Path, device: str) -> None:
    spec = replace(SPECS["experts"], layers=SPECS["experts"].layers[:1])
    write_spec_model(tmp_path, spec)
    texts = []
    for records in (False, True):
        run = KernelRun(tmp_path, spec, device, kv_dtype)
        sampler = TorchSampler(spec.vocab_size)
        graphs = Graphs()
        if records:
            steps = StepGraphs(run.decoder, recorder_of(device), 4)
            graphs = Graphs(steps, DrawGraphs(run.decoder, steps.recorder, 4))
        run.launching(TorchRunner(run.decoder, sampler, graphs=graphs), sampler)
        for row in range(3):
            run.driver.open(row, TOKENS[row : 6 + row], GREEDY)
        # A row that fills the recording up holds whatever its memory held: that may be what is no number.
        with poisoned() if device == "cpu" else nullcontext():
            run.worker.submit(run.driver.plan(*(Work(row, 0, 6, 1) for row in range(3))))
            for step in range(2):
                run.worker.submit(run.driver.plan(*(Work(row, 6 + step, 1, 1) for row in range(3))))
            texts.append([run.worker.collect().tokens.tolist() for _ in range(3)])
    assert texts[0] == texts[1]
