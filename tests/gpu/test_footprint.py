"""What a model takes of a device: what is made of the readings, and that a model that was measured runs as any other.

The readings of a CPU are told here, because torch keeps none for it; on a GPU they are its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.torch.backend import TorchBackend
from quire.compute.torch.cuda_memory import CudaMemory
from quire.compute.torch.footprint import Footprint, measure
from quire.compute.torch.load import load_model
from quire.compute.worker.worker import Worker
from quire.core.config import EngineConfig
from support.step_plans import PlanDriver, Work
from support.tiny_checkpoint import write_tiny_qwen3
from support.torch_runs import FLOAT32

PROMPT = [(5 * i * i + 3 * i + 1) % 126 for i in range(40)]


class Ledger:
    """A device of which every byte is written down; implements `DeviceMemory`."""

    def __init__(self, total: int, weights: int) -> None:
        self.total = total
        self.torch = {"weights": weights}  # what torch holds, by what it is for
        self.driver: dict[str, int] = {}
        self.highest = 0

    def take(self, name: str, num_bytes: int) -> None:
        self.torch[name] = num_bytes
        self.highest = max(self.highest, self.held())

    def free(self) -> int:
        self.torch.pop("scratch", None)
        return self.total - self.held() - sum(self.driver.values())

    def held(self) -> int:
        return sum(self.torch.values())

    def peak(self, work: Callable[[], object]) -> int:
        self.highest = self.held()
        work()
        return self.highest


class Recording:
    """Takes memory of a ledger for as long as somebody holds it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        ledger.take("graphs", 30)
        ledger.driver["graphs"] = 12

    def __del__(self) -> None:
        del self._ledger.torch["graphs"], self._ledger.driver["graphs"]


def test_every_byte_is_counted_once_and_graphs_are_let_go_of() -> None:
    ledger = Ledger(total=1000, weights=400)
    ledger.take("scratch", 50)  # of loading, which is over

    def rehearse() -> None:
        ledger.take("scratch", 70)
        ledger.take("scratch", 200)
        ledger.take("scratch", 20)
        ledger.driver["kernels"] = 9

    def record() -> object:
        ledger.take("scratch", 200)
        return Recording(ledger)

    assert measure(ledger, rehearse, record) == Footprint(
        weight_bytes=400, activation_bytes=200, graph_bytes=42, free_bytes=1000 - 400 - 9
    )
    assert ledger.held() == 400


def test_without_graphs_none_are_counted() -> None:
    ledger = Ledger(total=1000, weights=400)
    found = measure(ledger, lambda: ledger.take("scratch", 5), lambda: None)
    assert found == Footprint(400, 5, 0, 600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("footprint"), settings={})


def texts(worker: Worker, num_blocks: int) -> list[list[int]]:
    worker.start()
    driver = PlanDriver.over(worker.cache.spec, range(num_blocks))
    driver.open(0, PROMPT)
    plans = [driver.plan(Work(0, 0, 40, 1)), *(driver.plan(Work(0, 40 + step, 1, 1)) for step in range(5))]
    for plan in plans:
        worker.submit(plan)
    return [worker.collect().tokens.tolist() for _ in plans]


def test_a_model_that_was_measured_computes_as_one_that_was_not(folder: Path, device: str) -> None:
    settings = replace(FLOAT32, device=device, max_num_seqs=4, max_num_batched_tokens=64, batch_invariant=True)
    loaded = load_model(read_model(ModelFolder(folder)), settings)
    memory = CudaMemory(device) if device == "cuda" else Ledger(1000, 400)
    found = loaded.measured(memory)
    if device == "cuda":
        assert found.weight_bytes > 0 and found.activation_bytes > 0  # of the rest tests beside this one take and give
        assert found.free_bytes < torch.cuda.mem_get_info()[1] - found.weight_bytes
    else:
        assert found == Footprint(400, 0, 0, 600)
    worker = Worker(loaded.parts(24, 2))
    assert worker.cache.num_blocks == 24
    assert texts(worker, 24) == texts(Worker(load_model(read_model(ModelFolder(folder)), settings).parts(24)), 24)


def test_weights_are_loaded_once_for_measuring_and_computing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.compute.torch.cuda_memory.CudaMemory", lambda device: Ledger(1000, 400))
    noted: list[tuple[Any, ...]] = []
    config = EngineConfig(model=str(folder), device="cpu", backend="torch", dtype="float32").resolved()
    backend = TorchBackend.of("cpu", config, read_model(ModelFolder(folder)))
    assert backend.footprint(lambda *found: noted.append(found)) == Footprint(400, 0, 0, 600)
    num_noted = len(noted)
    assert num_noted
    first = backend.load(8, 0, lambda *found: noted.append(found))
    assert len(noted) == num_noted
    second = backend.load(9, 0, lambda *found: noted.append(found))  # what was measured is handed out once
    assert len(noted) == 2 * num_noted
    assert (first.cache.num_blocks, second.cache.num_blocks) == (8, 9)
    assert first.cache is not second.cache


def test_a_memory_that_ran_out_while_measuring_is_given_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(read_model(ModelFolder(folder)), FLOAT32)

    def full(*arguments: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("quire.compute.torch.load.TorchRunner.prepare", full)
    with pytest.raises(torch.OutOfMemoryError):
        loaded.measured(Ledger(1000, 400))
    assert not loaded.cache.pairs()
    monkeypatch.undo()
    assert texts(Worker(loaded.parts(8)), 8)
