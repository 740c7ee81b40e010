"""Two ranks on the GPU that does nothing (`counting_driver`): kernels of shards launched, rows exchanged by gloo.

`python -m tests.gpu.counting_ranks FOLDER SUMS` starts the other rank, rehearses, then serves, and prints as JSON which
kernels were compiled for either, and how many steps were replayed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.gpu.counting_driver import compiled, steps, use

MOST_ROWS = 20


def runner_of(folder: Path, sums: str, number: int, meeting: Path) -> tuple[Any, Any, Any]:
    """A runner of kernels over the shard of a rank, its KV memory, and what records its steps."""
    from quire.compute.models import read_model
    from quire.compute.models.source import ModelFolder
    from quire.compute.torch.attention.triton import TritonAttention
    from quire.compute.torch.decoder import Implementations
    from quire.compute.torch.fused_experts import FusedExperts
    from quire.compute.torch.fused_operations import FusedOperations
    from quire.compute.torch.graphs import StepGraphs
    from quire.compute.torch.parallel import loading
    from quire.compute.torch.parallel.group import RankGroup
    from quire.compute.torch.parallel.ranks import RankRunner
    from quire.compute.torch.parallel.split import Rank
    from quire.compute.torch.products import product
    from quire.compute.torch.rehearsal import largest_steps
    from quire.compute.torch.runner import Graphs
    from quire.compute.torch.sampling import TorchSampler
    from quire.compute.torch.settings import TorchSettings, kv_cache_spec
    from support.recorders import AgainRecorder

    device = torch.device("cpu")

    def attention(spec: Any, settings: Any) -> Any:
        stored, heads = kv_cache_spec(spec, settings), spec.attention.num_heads
        return TritonAttention(stored, device, num_heads=heads, num_processors=132)

    def engines(weights: Any, settings: Any, cache: Any) -> Implementations:
        fused = FusedOperations(cache.attention)
        return Implementations(cache.attention, fused, product, FusedExperts(batch_invariant=False))

    loading.create_attention, loading.implementations_for = attention, engines  # type: ignore[assignment]
    settings = TorchSettings(
        device="cpu", max_num_batched_tokens=600, max_num_seqs=MOST_ROWS, tensor_parallel=2, tensor_parallel_sums=sums
    )
    group = RankGroup(Rank(number, 2), meeting)
    decoder, cache, _ = loading.load_shard(read_model(ModelFolder(folder)), settings, group)
    cache.resize(16, 0)
    cache.allocate()
    recorder = AgainRecorder()
    options = {
        "graphs": Graphs(StepGraphs(decoder, recorder, MOST_ROWS)),
        "rehearsals": largest_steps(cache.spec, settings, context_length=20_000),
    }
    sampler = TorchSampler(decoder.spec.vocab_size)
    return RankRunner(group, decoder, sampler, **options), cache, recorder


def main(folder: str, sums: str, number: int, meeting: Path) -> None:
    """Rehearse and serve, the first rank as it leads, the other one as it follows."""
    from quire.compute.torch.rehearsal import filtered_draws

    use()
    runner, cache, recorder = runner_of(Path(folder), sums, number, meeting)
    runner.prepare(cache)
    rehearsed, num_replayed = compiled(), recorder.num_replayed
    for inputs in steps(len(cache.spec.groups)):
        unknown = np.where(np.isin(np.arange(len(inputs.token_ids)), inputs.query_starts[1:] - 1), -1, 0)
        for each in (inputs, replace(inputs, token_ids=unknown)):
            if number == 0:
                runner.launch(each, filtered_draws(len(each.entries)), cache).wait()
            else:
                runner.follow(each, cache)
    if number == 0:
        print(json.dumps([rehearsed, compiled(), recorder.num_replayed - num_replayed]))


if __name__ == "__main__":
    if len(sys.argv) > 3:
        main(sys.argv[1], sys.argv[2], 1, Path(sys.argv[3]))
        sys.exit()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "meeting"
        command = [sys.executable, "-m", "tests.gpu.counting_ranks", *sys.argv[1:], str(place)]
        with subprocess.Popen(command) as other:
            main(sys.argv[1], sys.argv[2], 0, place)
        assert other.returncode == 0
