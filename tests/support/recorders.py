"""What records decodes in tests: on a GPU graphs; elsewhere what is recorded is computed anew, into the same places."""

from __future__ import annotations

from collections.abc import Callable

from quire.compute.torch.graphs import CudaRecorder, Replay, Tensors


def recorder_of(device: str) -> AgainRecorder | CountingRecorder:
    """Return a recorder that counts."""
    return CountingRecorder() if device == "cuda" else AgainRecorder()


class AgainRecorder:
    """Computes recorded work anew; implements `Recorder`."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, work: Callable[[], Tensors]) -> tuple[Tensors, Replay]:
        self.num_recorded += 1
        kept = work()

        def replay() -> None:
            self.num_replayed += 1
            for place, result in zip(kept, work(), strict=True):
                place.copy_(result)

        return kept, replay


class CountingRecorder(CudaRecorder):
    """Records graphs and counts; implements `Recorder`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_recorded = 0
        self.num_replayed = 0

    def record(self, work: Callable[[], Tensors]) -> tuple[Tensors, Replay]:
        self.num_recorded += 1
        result, replay = super().record(work)

        def counted() -> None:
            self.num_replayed += 1
            replay()

        return result, counted
