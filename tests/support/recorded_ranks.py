"""Ranks as on GPUs, without one: Triton's attention, interpreted, and steps that are recorded and replayed.

As a module, the process of a follower that does so too.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    import tests.gpu.conftest  # noqa: F401  # it has kernels interpreted, so it comes before they do

import torch

from quire.compute.models.base import DecoderSpec
from quire.compute.torch import load
from quire.compute.torch.attention.triton import TritonAttention
from quire.compute.torch.graphs import StepGraphs
from quire.compute.torch.load import LoadedModel
from quire.compute.torch.parallel import follower, loading
from quire.compute.torch.settings import TorchSettings, kv_cache_spec
from support.recorders import AgainRecorder

MOST_ROWS = 4


def _attention(spec: DecoderSpec, settings: TorchSettings) -> TritonAttention:
    stored, heads = kv_cache_spec(spec, settings), spec.attention.num_heads
    return TritonAttention(stored, torch.device("cpu"), num_heads=heads, num_processors=4, batch_invariant=True)


def _graphs(model: LoadedModel, note_loaded: object) -> StepGraphs:
    return StepGraphs(model.decoder, AgainRecorder(), MOST_ROWS)


def compute_as_on_gpus(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have models of this process compute so."""
    for module in (load, loading):
        replace(module, "create_attention", _attention)
    replace(LoadedModel, "new_graphs", _graphs)


if __name__ == "__main__":
    compute_as_on_gpus()
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        follower.follow(connection, follower.load_follower, follower.leave)
