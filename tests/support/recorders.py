"""What records decodes in tests: on a GPU graphs; elsewhere what is recorded is computed anew, into the same places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from quire.compute.torch.graphs import CudaRecorder, Replay, Result


def recorder_of(device: str) -> AgainRecorder | CountingRecorder:
    """Return a recorder that counts."""
    return CountingRecorder() if device == "cuda" else AgainRecorder()


class AgainRecorder:
    """Computes recorded work anew; implements `Recorder`."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, work: Callable[[], Result]) -> tuple[Result, Replay]:
        self.num_recorded += 1
        kept = work()

        def replay() -> None:
            self.num_replayed += 1
            for old, new in zip(tensors_in(kept), tensors_in(work()), strict=True):
                old.copy_(new)

        return kept, replay


class CountingRecorder(CudaRecorder):
    """Records graphs and counts; implements `Recorder`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, work: Callable[[], Result]) -> tuple[Result, Replay]:
        self.num_recorded += 1
        result, replay = super().record(work)

        def counted() -> None:
            self.num_replayed += 1
            replay()

        return result, counted


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested dataclasses and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
