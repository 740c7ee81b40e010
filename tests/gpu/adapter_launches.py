"""What the host launches for a decode whose rows have adapters, kernel by kernel and recorded; the driver counts.

    PYTHONPATH=src:tests python -m tests.gpu.adapter_launches FOLDER

FOLDER has a model and the folders of adapters `a0`, `a1`, …, which are loaded after the recording. Prints as JSON, by
kind of step, the kernels of Triton and the operations of torch, each of which is a launch or more on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.gpu import counting_driver
from torch.utils._python_dispatch import TorchDispatchMode

NUM_ROWS = 8


class _Operations(TorchDispatchMode):
    """Counts the operations of torch that compute: those that only look at memory in another way launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


class _NoReplay:
    """Records what is computed, and does not do it again: a replay is one call of the driver."""

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        return work(), lambda: None


def measure(folder: Path) -> tuple[dict[str, list[int]], int]:
    """Return the launches of each kind of step, kernels of Triton and operations of torch; how many were compiled."""
    from quire.compute.adapters.folder import read_adapter
    from quire.compute.models import read_model
    from quire.compute.models.source import ModelFolder
    from quire.compute.torch.rehearsal import filtered_draws

    counting_driver.use()
    adapters = [read_adapter(each, read_model(ModelFolder(folder)).spec, 16) for each in sorted(folder.glob("a*"))]
    runner, cache = counting_driver.engine(folder, num_slots=len(adapters), recorder=_NoReplay())
    runner.prepare(cache)
    for adapter in adapters:
        runner.load_adapter(adapter)
    rehearsed = counting_driver.compiled()
    recorded, plain = (
        (runner._graphs, runner._draw_graphs),
        counting_driver.inputs_of([(600, 1)] * NUM_ROWS, len(cache.spec.groups)),
    )
    some = (adapters[0].digest, *[""] * (NUM_ROWS - 1))
    every = tuple(adapters[row % len(adapters)].digest for row in range(NUM_ROWS))
    found = {}
    for how, (runner._graphs, runner._draw_graphs) in (("launched", (None, None)), ("recorded", recorded)):
        for kind, digests in (("no adapter", ()), ("one adapter", some), ("all adapters", every)):
            operations, before = _Operations(), counting_driver.num_launches()
            with operations:
                runner.launch(replace(plain, adapters=digests), filtered_draws(NUM_ROWS), cache)
            found[f"{how}, {kind}"] = [counting_driver.num_launches() - before, operations.count]
    return found, sum(counting_driver.compiled().values()) - sum(rehearsed.values())


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
