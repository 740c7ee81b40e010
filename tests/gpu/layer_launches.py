"""What the host launches when a model's own layer reads the tokens of a decode, and guesses; the driver counts.

    PYTHONPATH=src:tests python -m tests.gpu.layer_launches FOLDER

Rehearses the model of the folder with its layer, then serves steps, launched and computed. Prints as JSON the forms of
kernels that were compiled by the rehearsal and by the end, and by the number of rows what it launches to read a decode:
kernels of Triton, operations of torch, and among these operations those for which the host waits.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tests.gpu import counting_driver
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"}


class _Operations(TorchDispatchMode):
    """Counts the operations of torch that compute, and those whose result the host needs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.num_waits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        self.num_waits += func.name().partition(".")[0] in WAITS
        return func(*args, **(kwargs or {}))


def engine(folder: Path) -> tuple[Any, Any, Any]:
    """Return a runner of kernels, its layer that guesses, and its KV memory."""
    import torch

    from quire.compute.models import read_model
    from quire.compute.models.draft import with_own_layer
    from quire.compute.models.source import ModelFolder
    from quire.compute.torch import load
    from quire.compute.torch.attention.triton import TritonAttention
    from quire.compute.torch.decoder import Implementations
    from quire.compute.torch.fused_experts import FusedExperts
    from quire.compute.torch.fused_operations import FusedOperations
    from quire.compute.torch.fused_products import FusedProduct
    from quire.compute.torch.rehearsal import largest_steps
    from quire.compute.torch.sampling import TorchSampler
    from quire.compute.torch.settings import TorchSettings, kv_cache_spec

    device = torch.device("cpu")

    def attention(spec: Any, settings: Any) -> Any:
        stored, heads = kv_cache_spec(spec, settings), spec.attention.num_heads
        return TritonAttention(stored, device, num_heads=heads, num_processors=132)

    def implementations(weights: Any, settings: Any, cache: Any) -> Any:
        product = FusedProduct.of(weights.matrices(), weights.dtype, batch_invariant=False)
        operations = FusedOperations(cache.attention)
        return Implementations(cache.attention, operations, product, FusedExperts(batch_invariant=False))

    def rehearsals(decoder: Any, cache: Any, settings: Any) -> Any:
        return largest_steps(cache.spec, settings, context_length=1_000)

    load.create_attention, load.implementations_for = attention, implementations
    load.rehearsals_of, load.create_sampler = rehearsals, lambda size, device: TorchSampler(size)
    settings = TorchSettings("cpu", "bfloat16", "int8", max_num_batched_tokens=600, max_num_seqs=20)
    loaded = load.load_model(with_own_layer(read_model(ModelFolder(folder))), settings)
    parts = loaded.parts(16)
    parts.cache.allocate()
    parts.runner.prepare(parts.cache)
    parts.on_start()
    return parts.runner, parts.layer.layer, parts.cache


def measure(folder: Path) -> tuple[dict[str, int], dict[str, int], dict[int, list[int]]]:
    """Return the forms of kernels after the rehearsal and at the end, and the launches of reading a decode."""
    from quire.compute.torch.rehearsal import filtered_draws

    counting_driver.use()
    runner, layer, cache = engine(folder)
    rehearsed, found = counting_driver.compiled(), dict[int, list[int]]()
    for sequences in ([(3, 3)], [(600, 1)], [(700, 33)], [(900, 1)] * 8, [(900, 1), (990, 1), (600, 500)]):
        inputs = counting_driver.inputs_of(sequences, 1)
        ends, last = inputs.query_starts[1:] - 1, np.arange(len(sequences))
        runner.launch(inputs, filtered_draws(len(sequences)), cache)
        unknown = inputs.token_ids.copy()
        unknown[ends] = -1
        operations, before = _Operations(), counting_driver.num_launches()
        with operations:
            layer.read(replace(inputs, token_ids=unknown), np.arange(len(unknown)))
        if len(unknown) == len(sequences):
            num_kernels = counting_driver.num_launches() - before
            found[len(sequences)] = [num_kernels, operations.count, operations.num_waits]
        layer.logits(last)
        layer.read_on(counting_driver.inputs_of([(length, 1) for length, _ in sequences], 1), last)
    return rehearsed, counting_driver.compiled(), found


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
