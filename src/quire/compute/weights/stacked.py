"""Stacked experts: gives each matrix in a checkpoint whose tensors have all experts its own name, as in other families.

gpt-oss:

    experts.gate_up_proj         [experts, in, 2 × out]    experts.3.gate_proj.weight, .up_proj.weight  [out, in]
    experts.gate_up_proj_bias    [experts, 2 × out]        experts.3.gate_proj.bias, .up_proj.bias      [out]
    experts.down_proj            [experts, in, out]    ──► experts.3.down_proj.weight                   [out, in]
    experts.down_proj_blocks     [experts, out, …]         experts.3.down_proj.blocks                   [out, …]
    self_attn.sinks              [heads]                   self_attn.sinks.weight                       [heads]

Outputs of gate and up alternate. Floats are stored as [in, out]; the blocks and scales of MXFP4, as [out, in].

Without biases, gate_up_proj has the gate before up. Both stacks of a layer are [out, in], as transformers has them, or
[in, out], as in published Qwen3-VL-MoE. Whatever the sizes are, their shapes fit only one of the two: the outputs of
gate_up_proj are twice the inputs of down_proj.

Granite-MoE has the gate before up too, and stores floats as [out, in]:

    block_sparse_moe.input_linear.weight     [experts, 2 × out, in]   block_sparse_moe.experts.3.gate_proj.weight, …
    block_sparse_moe.output_linear.weight    [experts, out, in]   ──► block_sparse_moe.experts.3.down_proj.weight

OLMo Hybrid has the filters of queries, keys and values apart, and other names for norms:

    linear_attn.q_conv1d.weight, .k_conv1d.weight, .v_conv1d.weight   ──► linear_attn.conv1d.weight
    attention_layer_norm.weight, feedforward_layer_norm.weight        ──► input_layernorm, post_attention_layernorm
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from quire.compute.arrays import ByteArray, FloatArray, HalfArray
from quire.compute.models.sublayers import MAX_EXPERTS
from quire.compute.weights.checkpoint import FLOAT_DTYPES, Array, Checkpoint
from quire.compute.weights.safetensors import TensorEntry
from quire.compute.weights.weight_file import EVERYTHING
from quire.core.errors import CheckpointError

MAX_TENSORS: Final = 12 * MAX_EXPERTS
STACK: Final = ".experts."
BARE: Final = (
    *(".self_attn.sinks", ".mlp.gate.e_score_correction_bias"),
    *(".linear_attn.A_log", ".linear_attn.dt_bias", ".mamba.A_log", ".mamba.dt_bias", ".mamba.D"),
    *(".mixer.A_log", ".mixer.dt_bias", ".mixer.D", ".mixer.gate.e_score_correction_bias"),
    *(".mlp.moe_statics.e_score_correction_bias", ".layer_scalar", ".altup.correct_output_scale"),
    *(".router.scale", ".router.per_expert_scale", ".feed_forward.expert_bias", ".mlp.expert_bias"),
    *(".block_sparse_moe.e_score_correction_bias", ".mlp.e_score_correction_bias"),
)
"""Weight tensors whose names lack `.weight`; they may be one row, `[1, size]`."""
MATRICES: Final = MappingProxyType({"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)})
"""The name of a stacked tensor → the matrices that it contains."""

FILTERS: Final = tuple(f".linear_attn.{part}_conv1d.weight" for part in "qkv")
WHOLE_FILTER: Final = ".linear_attn.conv1d.weight"
"""The filters of queries, keys and values → their name as one, with the rows of each in this order."""

RENAMED: Final = MappingProxyType(
    {
        ".attention_layer_norm.weight": ".input_layernorm.weight",
        ".feedforward_layer_norm.weight": ".post_attention_layernorm.weight",
    }
)
SPARSE: Final = ".block_sparse_moe."
LINEAR: Final = MappingProxyType(
    {"input_linear.weight": MATRICES["gate_up_proj"], "output_linear.weight": MATRICES["down_proj"]}
)
"""A stacked tensor of Granite-MoE → the matrices that it contains, one after another."""

KINDS: Final = MappingProxyType(
    {"": ("weight", 3), "_bias": ("bias", 2), "_blocks": ("blocks", 4), "_scales": ("scales", 3)}
)
"""The suffix of a tensor's name → the part of the matrix, and the number of dimensions."""
PACKED: Final = ("U8",)
DTYPES: Final = MappingProxyType(
    {"": (), "weight": FLOAT_DTYPES, "bias": FLOAT_DTYPES, "blocks": PACKED, "scales": PACKED}
)


@dataclass(frozen=True, slots=True)
class ExpertEntry(TensorEntry):
    """A part of one expert's matrix, within the tensor `stack` of all experts. `transposed`: the file has [in, out]."""

    stack: str
    expert: int
    outputs: slice
    transposed: bool

    @property
    def place(self) -> slice:
        """The expert's place in the stack."""
        return slice(self.expert, self.expert + 1)

    def rows_in(self, stored: Array, rows: slice) -> Array:
        """Return rows of the part, read-only, from the numbers at its place in the stack."""
        outputs = stored[0][..., self.outputs].T if self.transposed else stored[0][self.outputs]
        found = np.ascontiguousarray(outputs[rows])
        found.flags.writeable = False
        return found


@dataclass(frozen=True, slots=True)
class JoinedEntry(TensorEntry):
    """A tensor that the file has in several, whose rows follow each other; always read as float32."""

    parts: tuple[str, ...]


def unstacked(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with a name for each expert's matrices; the same checkpoint if it already has these names."""
    entries = checkpoint.entries
    ends = (*BARE, *RENAMED)
    differs = any(name.endswith(ends) or _parts_of(entry, entries) for name, entry in entries.items())
    return StackedCheckpoint(checkpoint) if differs else checkpoint


class StackedCheckpoint(Checkpoint):
    """A view of a checkpoint in which each expert has its own tensors."""

    def __init__(self, whole: Checkpoint) -> None:
        self._whole = whole
        entries: dict[str, TensorEntry] = {}
        for entry in whole.entries.values():
            for name, each in self._named(entry, len(entries)):
                if name in entries:
                    raise CheckpointError(
                        f"{whole.name}: tensor {name!r}", "given twice", "alone or in a stack, not both"
                    )
                entries[name] = each
        self._stored = {name: entry.name for name, entry in entries.items() if not isinstance(entry, ExpertEntry)}
        _join_filters(entries)
        self._has_stacks = any(isinstance(entry, ExpertEntry) for entry in entries.values())
        super().__init__(whole.folder, entries)

    def _named(self, entry: TensorEntry, num_before: int) -> Iterator[tuple[str, TensorEntry]]:
        """Yield the names and entries for a tensor of the file, one for each matrix in it."""
        parts = _parts_of(entry, self._whole.entries)
        if parts and num_before + entry.shape[0] * len(parts) > MAX_TENSORS:
            where = f"{self._whole.name}: tensors, each expert as its own"
            raise CheckpointError(
                where, f"{num_before + entry.shape[0] * len(parts)} and more", f"at most {MAX_TENSORS}"
            )
        if parts:
            yield from ((each.name, each) for each in _experts_of(entry, parts))
        elif entry.name.endswith(BARE):
            shape = entry.shape[1:] if len(entry.shape) == 2 and entry.shape[0] == 1 else entry.shape
            yield f"{entry.name}.weight", replace(entry, shape=shape)
        else:
            end = next((end for end in RENAMED if entry.name.endswith(end)), "")
            yield entry.name.removesuffix(end) + RENAMED.get(end, ""), entry

    def stored_name(self, name: str) -> str:
        """Return the name of the file's tensor that contains, or should contain, a tensor."""
        entry = self.entries.get(name)
        if isinstance(entry, ExpertEntry):
            return entry.stack
        missing = re.fullmatch(r"(.*\.block_sparse_moe\.)experts\.\d+\.(gate|up|down)_proj\.weight", name)
        if missing is not None and entry is None and self._has_stacks:
            return f"{missing[1]}{'output' if missing[2] == 'down' else 'input'}_linear.weight"
        missing = re.fullmatch(r"(.*\.experts\.)\d+\.(gate|up|down)_proj\.(weight|bias)", name)
        if missing is not None and entry is None and self._has_stacks:
            prefix, part, kind = missing.groups()
            return f"{prefix}{'down' if part == 'down' else 'gate_up'}_proj{'_bias' * (kind == 'bias')}"
        bare = name.removesuffix(".weight")
        return bare if bare.endswith(BARE) else self._stored.get(name, name)

    def tensor(self, name: str, rows: slice = EVERYTHING) -> FloatArray:
        """Return rows of a tensor as float32, read-only."""
        entry = self.entries[name]
        if isinstance(entry, JoinedEntry):
            return np.concatenate([self._whole.tensor(part) for part in entry.parts])[rows]
        if entry.name.endswith(BARE):
            return self._whole.tensor(entry.name).reshape(entry.shape)[rows]
        if not isinstance(entry, ExpertEntry):
            return self._whole.tensor(self.stored_name(name), rows)
        return entry.rows_in(self._whole.tensor(entry.stack, entry.place), rows)

    def bfloat16_bits(self, name: str, rows: slice = EVERYTHING) -> HalfArray:
        """Return rows of a tensor as bfloat16, read-only."""
        entry = self.entries[name]
        if not isinstance(entry, ExpertEntry):
            return self._whole.bfloat16_bits(self.stored_name(name), rows)
        return entry.rows_in(self._whole.bfloat16_bits(entry.stack, entry.place), rows)

    def stored(self, name: str) -> ByteArray:
        """Return the bytes of a tensor, read-only; an expert's bytes have its shape."""
        entry = self.entries[name]
        if not isinstance(entry, ExpertEntry):
            return self._whole.stored(self.stored_name(name))
        shape = self._whole.entries[entry.stack].shape
        outputs: ByteArray = self._whole.stored(entry.stack).reshape(shape)[entry.expert, entry.outputs]
        return outputs

    def release(self) -> None:
        """Free the memory of the mapped files; views stay valid, and are read again when used."""
        self._whole.release()


def _join_filters(entries: dict[str, TensorEntry]) -> None:
    """Replace the filters of queries, keys and values of each layer by one. Mutates."""
    for stem in [name.removesuffix(FILTERS[0]) for name in entries if name.endswith(FILTERS[0])]:
        names, whole = tuple(stem + end for end in FILTERS), stem + WHOLE_FILTER
        if whole in entries or not all(name in entries and len(entries[name].shape) == 3 for name in names):
            continue  # checking the tensors against the spec reports the error
        first, *others = (entries.pop(name) for name in names)
        shape = (first.shape[0] + sum(each.shape[0] for each in others), *first.shape[1:])
        entries[whole] = JoinedEntry(first.file, whole, first.dtype, shape, first.start, first.stop, names)


def _parts_of(entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> Mapping[str, tuple[slice, bool]]:
    """Return each expert's matrices in a stacked tensor, by name: their outputs, and whether they are [in, out].

    `entries`: all tensors of the file.
    """
    if len(entry.shape) == 3 and (matrices := LINEAR.get(entry.name.partition(SPARSE)[2])):
        return _one_after_another(matrices, entry.shape[1], transposed=False)
    prefix, stack, name = entry.name.partition(STACK)
    for tensor, matrices in MATRICES.items():
        kind, dimensions = KINDS.get(name.removeprefix(tensor), ("", 0)) if name.startswith(tensor) else ("", 0)
        if not stack or len(entry.shape) != dimensions or entry.dtype not in DTYPES[kind]:
            continue
        if kind == "weight" and not any(f"{prefix}{STACK}{each}_bias" in entries for each in MATRICES):
            transposed = _has_inputs_first(prefix + STACK, entries)
            return _one_after_another(matrices, entry.shape[2 if transposed else 1], transposed=transposed)
        step = len(matrices)
        return {f"{each}.{kind}": (slice(place, None, step), kind == "weight") for place, each in enumerate(matrices)}
    return {}


def _one_after_another(
    matrices: tuple[str, ...], num_outputs: int, *, transposed: bool
) -> Mapping[str, tuple[slice, bool]]:
    """Return the outputs of matrices that share them equally, in this order."""
    size = num_outputs // len(matrices)
    ends = [*(size * place for place in range(1, len(matrices))), None]
    return {f"{each}.weight": (slice(size * place, ends[place]), transposed) for place, each in enumerate(matrices)}


def _has_inputs_first(stem: str, entries: Mapping[str, TensorEntry]) -> bool:
    """Return whether the stacks of a layer without biases are [in, out]; only one of the two can fit."""
    both, down = (entries.get(stem + tensor) for tensor in MATRICES)
    if both is None or down is None or not len(both.shape) == len(down.shape) == 3:
        return False  # checking the tensors against the spec reports the error
    return both.shape[1:] == (down.shape[2], 2 * down.shape[1])


def _experts_of(entry: TensorEntry, parts: Mapping[str, tuple[slice, bool]]) -> Iterator[ExpertEntry]:
    """Yield the parts of each expert's matrices in a stacked tensor."""
    prefix = entry.name.partition(STACK)[0] + STACK
    if SPARSE in entry.name:
        prefix = f"{entry.name.partition(SPARSE)[0]}{SPARSE}experts."
    for expert in range(entry.shape[0]):
        for part, (outputs, transposed) in parts.items():
            shape = entry.shape[1:]
            if transposed:
                shape = (len(range(shape[1])[outputs]), shape[0])
            else:
                shape = (len(range(shape[0])[outputs]), *shape[1:])
            name = f"{prefix}{expert}.{part}"
            place = entry.start, entry.stop
            yield ExpertEntry(entry.file, name, entry.dtype, shape, *place, entry.name, expert, outputs, transposed)
