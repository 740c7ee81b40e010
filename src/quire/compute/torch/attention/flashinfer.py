"""FlashInferAttention: paged attention by FlashInfer's kernels, if its package is installed and requested.

    a step        plan          chooses the wrappers of the step: those of the step before last
    its layers    run           decodes ─► decode wrapper ──┐   planned for the first layer of a group
                                the rest ─► prefill wrapper ┴►  and rule, and reused for its others

A wrapper plans in its own page-locked memory and copies that to the device, unknown to torch. It must not plan again
before the copy is done, and steps are planned while earlier ones run. So there are two of each wrapper, which steps use
in turn, and an event marks the end of a turn's copies: with two steps in flight, none has to wait for it.

All wrappers share one scratch memory, because kernels follow one another on one stream. FlashInfer splits contexts
according to the whole step, so a row's bits depend on the batch: `settings.kv_cache_spec` refuses batch invariance, and
everything else that FlashInfer does not support. This class uses its fa2 kernels: they run from sm_80 on and support
windows and soft caps. Decodes use them too, because the kernels without matrix units support few head groups. They
multiply the oldest block's slots before the window by 0: these are finite, because blocks are filled from the front.
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
    """The purpose of a wrapper's plan."""

    decodes: bool
    group: int
    rule: AttentionRule
    dtype: torch.dtype


@dataclass(slots=True)
class Turn:
    """The wrappers of every other step, and the event that marks the end of their last copies to a GPU."""

    wrappers: dict[Purpose, Any] = field(default_factory=dict)
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step, the wrappers that it may use, and those already planned for it."""

    batch: StepBatch
    turn: Turn
    ready: set[Purpose] = field(default_factory=set)


class FlashInferAttention:
    """FlashInfer's kernels (`load_package`) over a `KVPool`; implements `AttentionBackend`. Keeps its wrappers."""

    def __init__(self, package: Any, spec: KVCacheSpec, device: torch.device, *, num_heads: int) -> None:
        self._package = package
        self._spec = spec
        self._device = device
        self._num_heads = num_heads
        self._plain = PlainAttention(device)
        self._scratch = torch.zeros(FLASHINFER_SCRATCH_BYTES, dtype=torch.uint8, device=device)
        self._turns = itertools.cycle((Turn(), Turn()))

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int) -> KVPool:
        """Return this many blocks on the device, with undefined content."""
        return KVPool.allocate(spec, num_blocks, self._device)

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, except for slots of -1. Mutates."""
        self._plain.write_kv(pair, slots, keys, values)

    def plan(self, batch: StepBatch) -> PlannedStep:
        """Return the step and its wrappers; valid until the next step but one is planned. Mutates the turn."""
        turn = next(self._turns)
        if turn.copied is not None:
            turn.copied.synchronize()
        return PlannedStep(batch, turn)

    def reserve(self, batch: StepBatch, dtype: torch.dtype) -> None:
        """Return None: wrappers plan in their own memory."""

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
        """Return the wrapper of a purpose, and plan it for the step if necessary. Mutates its turn."""
        turn, wrappers = planned.turn, planned.turn.wrappers
        if purpose not in wrappers:
            wrappers[purpose] = self._new_wrapper(purpose)
        if purpose not in planned.ready:
            try:
                self._plan_wrapper(wrappers[purpose], planned.batch, purpose)
            except torch.OutOfMemoryError:
                raise
            except (OSError, RuntimeError) as error:  # usually at the start: nvcc is missing, or fails
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
        """Plan a wrapper for the pages of a step. Mutates it."""
        step, rule, spec = batch.shape, purpose.rule, self._spec
        sequences = slice(step.num_decodes) if purpose.decodes else slice(step.num_decodes, None)
        pages = Pages.of(step, sequences, purpose.group, rule.window, spec.block_size)
        # FlashInfer takes the short arrays on the host and copies them itself; it takes the ids on the device.
        host = (pages.query_starts, pages.indptr, pages.last_lengths)
        starts, indptr, last_lengths = (torch.from_numpy(each.astype(np.int32)) for each in host)
        [indices] = together([pages.indices], self._device)
        of_group = spec.heads_of(spec.groups[purpose.group])
        heads = (self._num_heads, of_group.num_kv_heads, of_group.head_dim)
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
    """Return the package; raises a one-line `ExecutionError` if it is missing, unknown, or cannot be imported."""
    remedy = f"attention_backend flashinfer needs {PACKAGE} {' or '.join(KNOWN)}: pip install 'quire[flashinfer]'"
    try:
        release = version(PACKAGE)
    except PackageNotFoundError as error:
        raise ExecutionError(f"{remedy} (it is not installed)") from error
    if not release.startswith(tuple(f"{known}." for known in KNOWN)):
        raise ExecutionError(f"{remedy} (version {release} is installed)")
    try:
        return importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:
        raise ExecutionError(f"{remedy} (importing {release} fails: {_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
