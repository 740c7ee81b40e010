"""A GPU that does nothing: kernels are compiled and launched as on an H100, up to the driver, which counts.

    kernel[grid](…) ─► Triton's own specialising, compiling and launching ─► libcuda.so.1, made here ─► nothing

Neither the interpreter nor a compilation by itself takes that way. Tensors are of the CPU, and stay what they were.
`python -m tests.gpu.counting_driver FOLDER` rehearses an engine on it, then serves, and prints as JSON which kernels
were compiled for either. Its own process, because kernels are not interpreted in it.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from multiprocessing import forkserver, get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

LIBRARY = """
#include "cuda.h"
#undef cuPointerGetAttribute
#undef cuCtxGetCurrent
int num_launches;
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) {
    num_launches++;
    return c->gridDimX > 0 && c->gridDimY <= 65535 && c->gridDimZ <= 65535 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuPointerGetAttribute(void *d, CUpointer_attribute a, CUdeviceptr p) { *(CUdeviceptr *)d = p; return 0; }
CUresult cuGetErrorString(CUresult r, const char **s) { *s = "refused"; return 0; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = 0; return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return 0; }
"""
SHARED_BYTES = 232_448
"""What a program of an H100 may have."""


def make_library(folder: Path) -> None:
    """Compile the driver's library into a folder; the process that loads it has the folder in LD_LIBRARY_PATH."""
    import triton

    source, headers = folder / "driver.c", Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    source.write_text(LIBRARY)
    library = folder / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", f"-I{headers}", str(source), "-o", str(library)], check=True)
    (folder / "libcuda.so").symlink_to(library)


def use() -> None:
    """Make Triton launch on it. Mutates this process for good."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.compiler import compiler
    from triton.runtime import driver

    compiler.max_shared_mem = lambda device: SHARED_BYTES
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=CudaLauncher,
        utils=SimpleNamespace(load_binary=lambda *binary: (1, 1, 0, 0, 1024)),
    )
    driver.set_active(active)


def compiled() -> dict[str, int]:
    """How many forms of each kernel this process has made."""
    from tests.gpu.compile_gate import kernel_modules, variants_of

    variants = [variant for module in kernel_modules() for variant in variants_of(module).values()]
    kernels = {variant.kernel.__name__: variant.kernel for variant in variants}
    return {name: len(kernel.device_caches[0][0]) for name, kernel in kernels.items() if 0 in kernel.device_caches}


def num_launches() -> int:
    """How many kernels this process has launched."""
    return ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "num_launches").value


def engine(
    folder: Path,
    max_num_seqs: int = 20,
    kv_dtype: str = "auto",
    *,
    num_slots: int = 0,
    recorder: Any = None,
    images: bool = False,
) -> tuple[Any, Any]:
    """A runner of kernels, and its KV memory; with so many slots for adapters. `images`: rehearse steps with images."""
    from quire.compute.adapters.places import ADAPTED
    from quire.compute.adapters.room import AdapterRoom
    from quire.compute.models import read_model
    from quire.compute.models.source import ModelFolder
    from quire.compute.torch.adapters import AdapterSlots
    from quire.compute.torch.attention.triton import TritonAttention
    from quire.compute.torch.cache import TorchCache
    from quire.compute.torch.decoder import Implementations, TorchDecoder
    from quire.compute.torch.draw_graphs import DrawGraphs
    from quire.compute.torch.fused_experts import FusedExperts
    from quire.compute.torch.fused_operations import FusedOperations
    from quire.compute.torch.fused_products import FusedProduct
    from quire.compute.torch.graphs import StepGraphs
    from quire.compute.torch.rehearsal import largest_steps, with_images
    from quire.compute.torch.runner import Graphs, TorchRunner
    from quire.compute.torch.sampling import TorchSampler
    from quire.compute.torch.settings import TorchSettings, kv_cache_spec
    from quire.compute.torch.weights import DTYPES, TorchWeights
    from quire.compute.weights.checkpoint import Checkpoint
    from quire.compute.weights.decoder_weights import WeightReader
    from support.recorders import AgainRecorder

    spec, device = read_model(ModelFolder(folder)).spec, torch.device("cpu")
    codes = "int8" if kv_dtype == "int4" else "auto"
    settings = TorchSettings("cpu", "bfloat16", codes, kv_dtype, max_num_batched_tokens=600, max_num_seqs=max_num_seqs)
    kv_spec = kv_cache_spec(spec, settings)
    attention = TritonAttention(kv_spec, device, num_heads=spec.attention.num_heads, num_processors=132)
    cache = TorchCache(kv_spec, attention, device, num_blocks=16)
    cache.allocate()
    reader = WeightReader(spec, Checkpoint.open(folder), settings.dtype, settings.weights, None)
    weights = TorchWeights.load(spec, reader, DTYPES[settings.dtype], device)
    product = FusedProduct.of(weights.matrices(), weights.dtype, batch_invariant=False)
    experts = FusedExperts(batch_invariant=False)
    decoder = TorchDecoder(spec, weights, Implementations(attention, FusedOperations(attention), product, experts))
    rehearsals = largest_steps(kv_spec, settings, context_length=20_480)
    rehearsals = with_images(rehearsals, spec) if images else rehearsals
    graphs = StepGraphs(decoder, recorder or AgainRecorder(), settings.max_num_seqs)
    draw_graphs = DrawGraphs(decoder, graphs.recorder, settings.max_num_seqs)
    room = AdapterRoom.of(spec, 16, ADAPTED, 2, count=num_slots)
    slots = AdapterSlots(spec, room, decoder.dtype, device) if num_slots else None
    sampler = TorchSampler(spec.vocab_size)
    recorded = Graphs(graphs, draw_graphs)
    return TorchRunner(decoder, sampler, graphs=recorded, rehearsals=rehearsals, slots=slots), cache


def steps(num_groups: int) -> Iterator[Any]:
    """Steps as they come: decodes at the start and far on, one or many, prompts alone and beside them, chunks."""
    for sequences in (
        [(1, 1)],
        [(600, 1)],
        [(1700, 1), (17, 1), (16, 1)],
        [(5000, 1)] * 6,
        [(9001, 1)] + [(40, 1)] * 16,
        [(3, 3)],
        [(700, 33)],
        [(900, 1), (2500, 1), (600, 500), (64, 64)],
    ):
        yield inputs_of(sequences, num_groups)


def inputs_of(sequences: list[tuple[int, int]], num_groups: int) -> Any:
    """A step of sequences, each of so many tokens, the last of which are computed; all in one block, stored nowhere."""
    from quire.compute.worker.model_runner import StepInputs

    lengths, counts = (np.array(column) for column in zip(*sequences, strict=True))
    starts, total = np.concatenate(([0], np.cumsum(counts))), int(counts.sum())
    return StepInputs(
        entries=tuple(range(len(counts))),
        query_starts=starts,
        token_ids=np.zeros(total, np.int64),
        positions=np.concatenate([np.arange(length - count, length) for length, count in sequences]),
        slots=(np.full(total, -1, np.int64),) * num_groups,
        block_tables=(np.zeros((len(counts), int(lengths.max()) // 16 + 1), np.int64),) * num_groups,
        logit_starts=np.arange(len(counts) + 1),
        logit_indices=starts[1:] - 1,
        rows=np.arange(len(counts)),
    )


def ends_of(inputs: Any) -> Any:
    """The position after the last one of each token's sequence."""
    counts = np.diff(inputs.query_starts)
    return np.repeat(inputs.positions[inputs.query_starts[1:] - 1] + 1, counts)


def launch_many_tasks(attention: Any, pair: Any) -> None:
    """Launch attention with more tasks than the second dimension of a launch holds, and as many merges."""
    from quire.compute.torch.attention.base import AttentionRule
    from quire.compute.torch.attention.triton import Launch, PlannedStep
    from quire.compute.torch.kernels.tile_shape import Use

    many, batch = (
        70_000,
        SimpleNamespace(block_tables=[torch.zeros(1, dtype=torch.int32)], positions=torch.zeros(1, dtype=torch.int32)),
    )
    tasks, merges, entries = (torch.zeros(shape, dtype=torch.int32) for shape in ((many, 5), (many, 3), many))
    launch = Launch.of(attention.shapes[0][Use.DECODE], (tasks, entries, entries, merges), num_parts=1, most_parts=1)
    queries = torch.zeros((1, pair.keys.shape[1] * attention.shapes[0][Use.DECODE].group, pair.keys.shape[3]))
    attention.run(queries.to(torch.bfloat16), pair, PlannedStep(batch, ((launch,),)), AttentionRule(1.0))


def main(folder: Path, kv_dtype: str) -> None:
    """Rehearse and serve; print what was compiled for the one, and for both."""
    from quire.compute.torch.rehearsal import rehearsed_draws

    use()
    runner, cache = engine(folder, kv_dtype=kv_dtype, images=True)
    runner.prepare(cache)
    rehearsed = compiled()
    cache.rehearse()
    for inputs in steps(len(cache.spec.groups)):
        for draws in rehearsed_draws(len(inputs.entries)):
            runner.launch(inputs, draws, cache)
        ends = np.maximum(inputs.positions + 1, 20)  # an image, of which a step has some of the tokens or none
        runner.run(replace(inputs, ends_seen=np.minimum(ends, ends_of(inputs))), cache)
    print(json.dumps([rehearsed, compiled()]))
    launch_many_tasks(cache.attention, next(pair for pair in cache.pairs().values() if pair.group == 0))


def run_alone(module: str, *arguments: str) -> Any:
    """Run a module in a process of its own, with the driver; return the JSON that it prints."""
    with ProcessPoolExecutor(1, _forks()) as pool:
        return json.loads(pool.submit(_printed_by, module, arguments).result())


@cache
def _forks() -> BaseContext:
    """Return what forks processes from one that has the driver, and torch imported once for all of them."""
    scratch = tempfile.TemporaryDirectory(prefix="quire-driver-")
    atexit.register(scratch.cleanup)
    make_library(Path(scratch.name))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("LD_LIBRARY_PATH", scratch.name)
        patch.setenv("TRITON_LIBCUDA_PATH", scratch.name)
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))  # of processes that these start
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "triton"])
        forkserver.ensure_running()
    return context


def _printed_by(module: str, arguments: tuple[str, ...]) -> str:
    sys.argv = [module, *arguments]
    with redirect_stdout(io.StringIO()) as printed:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            assert not ended.code
    return printed.getvalue()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
