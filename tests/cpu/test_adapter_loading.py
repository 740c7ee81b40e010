"""AdapterLoader: a load that hangs holds up no step, and leaves nothing behind once it is not wanted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.compute.adapters.folder import Adapter, read_adapter
from quire.compute.adapters.loading import LOADS_AT_ONCE, AdapterLoader
from quire.core.adapters import LOADING, READY
from support.adapted_model import AdaptedModel
from support.adapters import adapter_tensors, write_adapter
from support.spec_models import SPECS, write_spec_model

LONG_S = 300


class SlowDisk:
    """Reads adapters of a model, each once its gate is open."""

    def __init__(self, tmp_path: Path) -> None:
        self.spec = SPECS["plain"]
        write_spec_model(tmp_path, self.spec)
        self.model = AdaptedModel(tmp_path, self.spec)
        self.folder = write_adapter(tmp_path / "tune", adapter_tensors(self.spec))
        self.digest = read_adapter(self.folder, self.spec, 32).digest
        self.gate, self.asked = threading.Event(), threading.Semaphore(0)

    def read(self, folder: str, digest: str) -> Adapter:
        self.asked.release()
        assert self.gate.wait(LONG_S)
        return read_adapter(Path(folder), self.spec, 32, digest)

    def loader(self) -> AdapterLoader:
        assert self.model.parts.adapters is not None
        return AdapterLoader(self.model.parts.adapters, self.read)

    def has(self) -> bool:
        assert self.model.parts.adapters is not None
        return self.model.parts.adapters.has_adapter(self.digest)


def test_dropping_an_adapter_whose_load_hangs_does_not_wait(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    loader = disk.loader()
    loader.load(disk.digest, str(disk.folder))
    assert disk.asked.acquire(timeout=LONG_S) and loader.states() == {disk.digest: LOADING}
    ended = threading.Event()
    dropping = threading.Thread(target=_then(lambda: loader.drop(disk.digest), ended), daemon=True)
    dropping.start()
    assert ended.wait(LONG_S), "the gate is still closed"
    assert loader.states() == {} and not disk.has()
    disk.gate.set()
    end_of_loads()
    assert not disk.has(), "what was dropped before it came is not kept"


def test_an_adapter_that_is_wanted_again_is_there_after_the_load_that_was_dropped(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    loader = disk.loader()
    loader.load(disk.digest, str(disk.folder))
    assert disk.asked.acquire(timeout=LONG_S)
    loader.drop(disk.digest)
    loader.load(disk.digest, str(disk.folder))
    assert loader.states() == {disk.digest: LOADING}
    disk.gate.set()
    assert loader.has_adapter(disk.digest) and loader.states() == {disk.digest: READY}
    assert disk.asked.acquire(timeout=LONG_S), "the second load has read it"
    loader.load(disk.digest, str(disk.folder))
    end_of_loads()
    assert not disk.asked.acquire(blocking=False), "it is there: nothing is read again"
    loader.drop(disk.digest)
    assert not disk.has() and loader.states() == {}


def test_a_load_that_hangs_holds_one_thread_however_often_it_is_repeated(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    loader = disk.loader()
    loader.load(disk.digest, str(disk.folder))
    assert disk.asked.acquire(timeout=LONG_S)
    for _ in range(5):
        loader.drop(disk.digest)
        loader.load(disk.digest, str(disk.folder))
    assert [thread.name for thread in threading.enumerate()].count("quire-adapters") == 1
    disk.gate.set()
    assert loader.has_adapter(disk.digest) and loader.states() == {disk.digest: READY}
    end_of_loads()
    assert disk.asked.acquire(blocking=False) and not disk.asked.acquire(blocking=False), "only the last is read too"


def test_loads_that_hang_do_not_hold_up_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, gate = SlowDisk(tmp_path), threading.Event()

    def read(folder: str, digest: str) -> Adapter:
        if digest != disk.digest:
            assert gate.wait(LONG_S)
        return read_adapter(Path(folder), disk.spec, 32, disk.digest)

    loader = AdapterLoader(disk.model.parts.adapters, read)  # type: ignore[arg-type]
    for index in range(LOADS_AT_ONCE - 1):
        loader.load(f"hung-{index}", str(disk.folder))
    loader.load(disk.digest, str(disk.folder))
    assert loader.has_adapter(disk.digest)
    monkeypatch.setattr("quire.compute.adapters.loading.LOAD_S", 0.0)
    assert not loader.has_adapter("hung-0"), "a step waits only for so long"
    monkeypatch.setattr("quire.compute.adapters.loading.CLOSE_S", 0.0)
    loader.close()
    gate.set()
    end_of_loads()


def end_of_loads() -> None:
    for thread in threading.enumerate():
        if thread.name == "quire-adapters":
            thread.join(LONG_S)
            assert not thread.is_alive()


def _then(work: Callable[[], None], ended: threading.Event) -> Callable[[], None]:
    def both() -> None:
        work()
        ended.set()

    return both
