"""FlashInferAttention: paged attention by FlashInfer's kernels, if its package is installed and requested.

    a step        plan          which wrappers this step may use: those of the step before last
    its layers    run           decodes ─► decode wrapper ──┐   each planned when the first layer of its
                                the rest ─► prefill wrapper ┴►  group and rule runs; for all others it is

A wrapper plans into page-locked memory of its own and copies that to the device, without telling torch. It must not
plan again before the copy is over, and steps are planned while earlier ones are computed. So there are two of each, for
steps in turn, and an event says when the copies of a turn are over: with two steps under way, nobody waits for it.

All wrappers share one scratch: kernels follow one another on one stream. FlashInfer chooses how contexts are split by
what else is in the step: a row's bits depend on its company, and batch invariance is refused where settings are checked
(`settings.kv_cache_spec`), as is all else that it cannot do. Of its kernels we ask for those called fa2: they run from
sm_80 on and know windows and soft caps; decodes take them too, because those without matrix units know few head groups.
They multiply by 0 the slots of the oldest block before a window: finite numbers, as blocks are filled from the front.
"""

from __future__ import annotations

import importlib
import itertools
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import numpy as np
import torch

from quire.compute.torch.attention.base import AttentionRule, KVPair, KVPool, StepBatch
from quire.compute.torch.attention.pages import Pages
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.settings import FLASHINFER_SCRATCH_BYTES
from quire.compute.torch.upload import together
from quire.core.errors import ExecutionError
from quire.core.kv_spec import KVCacheSpec

PACKAGE: Final = "flashinfer-python"
KNOWN: Final = ("0.6", "0.7")
LAYOUT: Final = "HND"
KERNELS: Final = "fa2"


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a wrapper is planned for."""

    decodes: bool
    group: int
    rule: AttentionRule
    dtype: torch.dtype


@dataclass(slots=True)
class Turn:
    """The wrappers of every other step, and what says that their last copies to a GPU are over."""

    wrappers: dict[Purpose, Any] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step, the wrappers that it may use, and those of them that are planned for it."""

    batch: StepBatch
    turn: Turn
    ready: set[Purpose] = field(default_factory=set)


class FlashInferAttention:
    """The package that `load_package` returns, over a `KVPool`; implements `AttentionBackend`. Keeps its wrappers."""

    def __init__(self, package: Any, spec: KVCacheSpec, device: torch.device, *, num_heads: int) -> None:
        self._package = package
        self._spec = spec
        self._device = device
        self._num_heads = num_heads
        self._plain = PlainAttention(device)
        self._scratch = torch.zeros(FLASHINFER_SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self._turns = itertools.cycle((Turn(), Turn()))

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int) -> KVPool:
        """Return this many blocks on the device, their content undefined."""
        return KVPool.allocate(spec, num_blocks, self._device)

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, where the slot is not -1. Mutates."""
        self._plain.write_kv(pair, slots, keys, values)

    def plan(self, batch: StepBatch) -> PlannedStep:
        """Return the step and its wrappers; good until the next step but one is planned. Mutates whose turn it is."""
        turn = next(self._turns)
        if turn.copied is not None:
            turn.copied.synchronize()
        return PlannedStep(batch, turn)

    def reserve(self, batch: StepBatch, dtype: torch.dtype) -> None:
        """Return None: wrappers plan into memory of their own."""

    def run(self, queries: torch.Tensor, pair: KVPair, planned: PlannedStep, rule: AttentionRule) -> torch.Tensor:
        """Return the attention of each query, `[num_tokens, num_heads, head_dim]`, in their dtype."""
        queries = queries.contiguous()
        outputs = torch.empty_like(queries)
        num_decodes = planned.batch.shape.num_decodes  # as many tokens as sequences
        for decodes, tokens in ((True, slice(num_decodes)), (False, slice(num_decodes, len(queries)))):
            if len(queries[tokens]):
                wrapper = self._wrapper(planned, Purpose(decodes, pair.group, rule, queries.dtype))
                wrapper.run(queries[tokens], (pair.keys, pair.values), out=outputs[tokens])
        return outputs

    def _wrapper(self, planned: PlannedStep, purpose: Purpose) -> Any:
        """Return a wrapper that is planned for the step: by this call, where none was before. Mutates its turn."""
        turn, wrappers = planned.turn, planned.turn.wrappers
        if purpose not in wrappers:
            wrappers[purpose] = self._new_wrapper(purpose)
        if purpose not in planned.ready:
            try:
                self._plan_wrapper(wrappers[purpose], planned.batch, purpose)
            except torch.OutOfMemoryError:
                raise
            except (OSError, RuntimeError) as error:  # at the start, mostly: there is no nvcc, or it fails
                raise ExecutionError(f"FlashInfer cannot attend: {_first_line(error)}") from error
            if self._device.type == "cuda":
                turn.copied = torch.cuda.current_stream(self._device).record_event()
            planned.ready.add(purpose)
        return wrappers[purpose]

    def _new_wrapper(self, purpose: Purpose) -> Any:
        if not purpose.decodes:
            return self._package.BatchPrefillWithPagedKVCacheWrapper(self._scratch, LAYOUT, backend=KERNELS)
        kind = self._package.BatchDecodeWithPagedKVCacheWrapper
        return kind(self._scratch, LAYOUT, use_tensor_cores=True, backend=KERNELS)

    def _plan_wrapper(self, wrapper: Any, batch: StepBatch, purpose: Purpose) -> None:
        """Give a wrapper the pages of a step. Mutates it."""
        step, rule, spec = batch.shape, purpose.rule, self._spec
        sequences = slice(step.num_decodes) if purpose.decodes else slice(step.num_decodes, None)
        pages = Pages.of(step, sequences, purpose.group, rule.window, spec.block_size)
        # What is short it wants on the host too, and copies itself; ids are many, and read on the device only.
        host = (pages.query_starts, pages.indptr, pages.last_lengths)
        starts, indptr, last_lengths = (torch.from_numpy(each.astype(np.int32)) for each in host)
        [indices] = together([pages.indices], self._device)
        heads = (self._num_heads, spec.num_kv_heads, spec.head_dim)
        plan = wrapper.plan if purpose.decodes else partial(wrapper.plan, starts, causal=True)
        plan(
            indptr,
            indices,
            last_lengths,
            *heads,
            spec.block_size,
            window_left=-1 if rule.window is None else rule.window - 1,
            logits_soft_cap=rule.soft_cap,
            sm_scale=rule.scale,
            q_data_type=purpose.dtype,
            kv_data_type=purpose.dtype,
        )


def load_package() -> Any:
    """Return the package; raises `ExecutionError`, in a line, where it is not there, unknown, or cannot be imported."""
    remedy = f"attention_backend flashinfer needs {PACKAGE} {' or '.join(KNOWN)}: pip install 'quire[flashinfer]'"
    try:
        found = version(PACKAGE)
    except PackageNotFoundError as error:
        raise ExecutionError(f"{remedy} (it is not installed)") from error
    if not found.startswith(tuple(f"{known}." for known in KNOWN)):
        raise ExecutionError(f"{remedy} (installed is {found})")
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise ExecutionError(f"{remedy} ({found} is installed, and not imported: {_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
