"""The tensors of a GGUF file by the names and in the order of Hugging Face.

A name in Hugging Face refers to a tensor of the file, or to one expert's part (names.py). Rows that the file has in
another order are reordered (row_orders.py). Blocks of IQ1 to IQ3, TQ1 and TQ2 are returned as quire's own
(grid_blocks.py), and so are those of NVFP4 (block_fields.py), with the factor that the file has in a tensor next to the
matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from quire.compute.arrays import ByteArray, FloatArray, HalfArray
from quire.compute.gguf.blocks import check_mxfp4, nvfp4_numbers, packed_nvfp4
from quire.compute.gguf.grid_blocks import GRID_TYPES
from quire.compute.gguf.header import MAX_TENSORS, GgufHeader, GgufTensor
from quire.compute.gguf.name_tables.mixtures import ROW
from quire.compute.gguf.name_tables.table import EXPERTS
from quire.compute.gguf.names import GATE_AND_UP, GATE_UP, OLD_EXPERT, Names
from quire.compute.gguf.rope_settings import DIVISORS
from quire.compute.gguf.row_orders import ColoursLast, Order, Turns, order_of
from quire.compute.gguf.settings import architecture_of
from quire.compute.weights.bfloat16 import narrowed
from quire.compute.weights.mapped_files import MappedFiles
from quire.compute.weights.weight_file import EVERYTHING
from quire.core.errors import CheckpointError

SETTINGS: Final = (DIVISORS, "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are settings: the divisors of the frequencies of positions."""

OF_OLLAMA: Final = ("gemma3", "lfm2", "llama4", "mistral3", "qwen25vl", "qwen35", "qwen35moe", "qwen3vl")
WITH_SOUND: Final = ("gemma3n", "gemma4")
IMAGES: Final = MappingProxyType(
    {**dict.fromkeys(WITH_SOUND, ("v.", "mm.", "a.")), **dict.fromkeys(OF_OLLAMA, ("v.", "mm."))}
)
"""Architectures whose text model Ollama has in one file with those for images and sound → their tensors' prefixes."""

MAX_EXPERTS: Final = 4096  # of a layer: each becomes a name
BY_HEAD: Final = MappingProxyType({"attn_k_b": True, "attn_v_b": False})
"""Tensors with a matrix per head, and whether it is transposed."""

FILTERS: Final = frozenset({"shortconv.conv", "ssm_conv1d"})
"""Causal filters of each row, without the second of Hugging Face's three dimensions."""

FLAT: Final = frozenset({"ssm_a", "ssm_d", "ssm_norm"})
"""Vectors, which files with state-space layers have with two dimensions."""

DECAY: Final = "ssm_a"
"""A tensor with -exp(x) of the numbers in Hugging Face."""

TABLE: Final = "model.embed_tokens_per_layer.weight"
"""Engines look up its rows, and it may be larger than all matrices together: a copy would take much memory."""

PATCH_DIMENSIONS: Final = 4  # of the matrix of a patch: outputs, colours, height and width
SCALES: Final = MappingProxyType(
    {"MXFP4": "from 2^-23 to 2^16", "NVFP4": "scales from 0 to 448 and a factor below 256"}
)
"""Block types some of whose scales engines cannot have, and those that they can."""
ONE: Final = np.float32(1)


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """A tensor of Hugging Face in a file: `tensor` or one expert in it, with the rows reordered by `order`.

    `expert`: its number, or that of another matrix in a stack. `transposed`: the file has it transposed. `by_head`: the
    file has a matrix per head; here their rows are concatenated. `is_exponential`: the file has -exp(x). `others`:
    tensors of the same shape whose rows follow, or with four dimensions, the other frames of a patch. `factors`: of a
    matrix in NVFP4, or of the experts in its stack.
    """

    tensor: GgufTensor
    expert: int | None = None
    order: Order | Turns | ColoursLast | None = None
    transposed: bool = False
    by_head: bool = False
    is_exponential: bool = False
    others: tuple[GgufTensor, ...] = ()
    factors: GgufTensor | None = None

    @property
    def dtype(self) -> str:
        """The format of its numbers."""
        return self.tensor.type.name

    @property
    def has_blocks(self) -> bool:
        """Whether it is a matrix of blocks, not of floats."""
        return self.tensor.type.size > 1 and len(self.shape) == 2 and not (self.by_head or self.others)

    @property
    def is_rearranged(self) -> bool:
        """Whether its numbers are in another order in the file."""
        return self.transposed or self.by_head or self.order is not None or bool(self.others)

    @property
    def byte_range(self) -> tuple[int, int]:
        """The range of its bytes in the tensor."""
        if self.expert is None:
            return 0, self.tensor.num_bytes
        num_bytes = self.tensor.num_bytes // self.tensor.shape[0]
        return self.expert * num_bytes, (self.expert + 1) * num_bytes

    @property
    def has_frames(self) -> bool:
        """Whether the tensors are one frame each, not some rows."""
        return bool(self.others) and len(self.tensor.shape) == PATCH_DIMENSIONS

    @property
    def num_outputs(self) -> int:
        """The number of its rows in the file."""
        return self.tensor.shape[0 if self.expert is None else 1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, rows first."""
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        if self.others:
            count = 1 + len(self.others)
            return (*shape[:2], count, *shape[2:]) if self.has_frames else (count * shape[0], *shape[1:])
        if self.by_head:
            heads, rows, columns = shape
            return (heads * columns, rows) if self.transposed else (heads * rows, columns)
        return shape[::-1] if self.transposed else shape


class GgufTensors:
    """Implements `WeightFile` with GGUF files; each is mapped when one of its tensors is first read."""

    def __init__(self, header: GgufHeader) -> None:
        self._names = Names.of(architecture_of(header), header.tensors.keys())
        self.entries: Mapping[str, GgufEntry] = MappingProxyType(_entries(header, self._names))
        self.block_types = block_types_of(self.entries)
        self._header = header
        self._files = MappedFiles(header.file_bytes)

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self._header.path)

    def require_floats(self, name: str) -> None:
        """Do nothing: every type that passes the check of the header can be read."""

    def tensor(self, name: str, rows: slice = EVERYTHING) -> FloatArray:
        """Return rows of a tensor as float32, read-only."""
        found = self._numbers(self.entries[name], rows)
        found.flags.writeable = False
        return found

    def bfloat16_bits(self, name: str, rows: slice = EVERYTHING) -> HalfArray:
        """Return rows of a tensor as bfloat16, read-only; O(1) if the file has bfloat16 in the same order."""
        entry = self.entries[name]
        if entry.dtype in ("BF16", "F16") and not (entry.is_rearranged or entry.is_exponential):
            data, shape = self._rows(entry, rows)
            is_half = entry.dtype == "F16"
            bits = narrowed(data.view("<f2")) if is_half else np.require(data.view("<u2"), np.uint16, ["ALIGNED"])
            bits = bits.reshape(shape)
        else:
            bits = narrowed(self._numbers(entry, rows))
        bits.flags.writeable = False
        return bits

    def stored_name(self, name: str) -> str:
        """Return the file's name for a tensor; the file need not have it."""
        return self._names.stored(name)

    def block_rows(self, name: str, rows: slice = EVERYTHING) -> ByteArray:
        """Return the stored rows of a matrix, in the order of Hugging Face, read-only.

        A matrix that Hugging Face stores transposed has its outputs as rows too.
        """
        entry = self.entries[name]
        blocks = self._bytes(entry.tensor, *entry.byte_range).reshape(entry.num_outputs, -1)
        blocks = entry.order(blocks)[rows] if entry.order is not None else blocks[rows]
        if entry.dtype in GRID_TYPES:
            return GRID_TYPES[entry.dtype].own_blocks(blocks)
        try:
            if entry.dtype == "NVFP4":
                return packed_nvfp4(blocks, self._factor(entry))
            if entry.dtype == "MXFP4":
                check_mxfp4(blocks)
        except ValueError as error:
            where = f"{self.name}: tensor {self.stored_name(name)!r}"
            raise CheckpointError(where, error, f"{SCALES[entry.dtype]}, or the option --weights widened") from error
        return blocks

    def setting(self, name: str) -> FloatArray | None:
        """Return a tensor of the file that is a setting, or None."""
        tensor = self._header.tensors.get(name)
        return None if tensor is None else self._widened(tensor)

    def release(self) -> None:
        """Free the memory of the mapped files."""
        self._files.release()

    def _numbers(self, entry: GgufEntry, rows: slice) -> FloatArray:
        tensor, shape = entry.tensor, entry.shape
        if entry.is_exponential:
            with np.errstate(divide="ignore", invalid="ignore"):  # numbers that are not negative show in the weights
                return np.log(-self._numbers(replace(entry, is_exponential=False), rows))
        if entry.is_rearranged:
            whole = self._whole(entry)
            if entry.transposed:
                whole = whole.swapaxes(-1, -2)
            whole = whole.reshape(shape) if entry.order is None else entry.order(whole)
            return np.ascontiguousarray(whole[rows])
        data, shape = self._rows(entry, rows)
        return _numbers_in(tensor, data, self._factor(entry)).reshape(shape)

    def _factor(self, entry: GgufEntry) -> np.float32:
        """Return the factor of a matrix in NVFP4; one if the file has none."""
        if entry.factors is None:
            return ONE
        factors = self._widened(entry.factors)
        place: int = 0 if entry.expert is None else entry.expert * len(factors) // entry.tensor.shape[0]
        factor: np.float32 = factors[place]
        return factor

    def _rows(self, entry: GgufEntry, rows: slice) -> tuple[ByteArray, tuple[int, ...]]:
        """Return the bytes of rows that are in the order of the file, and the shape of their numbers."""
        tensor, shape = entry.tensor, entry.shape
        row_bytes = tensor.num_bytes // tensor.shape[0]
        start, num_rows = 0, shape[0]
        if entry.expert is not None:
            start, row_bytes = entry.expert * row_bytes, row_bytes // shape[0]
        if rows != EVERYTHING:
            start, num_rows = start + rows.start * row_bytes, rows.stop - rows.start
        return self._bytes(tensor, start, start + num_rows * row_bytes), (num_rows, *shape[1:])

    def _whole(self, entry: GgufEntry) -> FloatArray:
        """Return all numbers of an entry, in the order of the file."""
        if not entry.others:
            return self._widened(entry.tensor, self._factor(entry))
        parts = [self._widened(tensor) for tensor in (entry.tensor, *entry.others)]
        return np.stack(parts, axis=2) if entry.has_frames else np.concatenate(parts)

    def _widened(self, tensor: GgufTensor, factor: np.float32 = ONE) -> FloatArray:
        """Return all numbers of a tensor, with its shape."""
        return _numbers_in(tensor, self._bytes(tensor, 0, tensor.num_bytes), factor).reshape(tensor.shape)

    def _bytes(self, tensor: GgufTensor, start: int, stop: int) -> ByteArray:
        return self._files.bytes_of(tensor.file, tensor.start + start, tensor.start + stop)


def block_types_of(entries: Mapping[str, GgufEntry]) -> Mapping[str, str]:
    """Return the types of the matrices whose bytes engines may take as they are, by name, as engines get them."""
    return MappingProxyType(
        {
            name: GRID_TYPES[entry.dtype].kept if entry.dtype in GRID_TYPES else entry.dtype
            for name, entry in entries.items()
            if entry.has_blocks or (entry.dtype == "F16" and name == TABLE)
        }
    )


def _numbers_in(tensor: GgufTensor, data: ByteArray, factor: np.float32) -> FloatArray:
    """Return the numbers in some of a tensor's bytes; `factor`: of a matrix in NVFP4."""
    blocks = data.reshape(-1, tensor.type.num_bytes)
    if tensor.type.name == "NVFP4":
        return nvfp4_numbers(blocks, factor)
    with np.errstate(over="ignore", invalid="ignore"):  # scales that are not finite show in the weights
        return tensor.type.widen(blocks)


def _entries(header: GgufHeader, names: Names) -> dict[str, GgufEntry]:
    """Return the tensors of a file by the names of Hugging Face; unknown names stay unchanged."""
    entries: dict[str, GgufEntry] = {}
    factors, are_factors = _factors(header, names)
    others = are_factors.union(SETTINGS)
    for name, tensor in header.tensors.items():
        if name not in others and not name.startswith(IMAGES.get(names.architecture, ())):
            for theirs, entry in _named(header, names, name, tensor):
                if theirs in entries:
                    raise CheckpointError(f"{header.path}: tensor {name!r}", "given twice", "each once")
                entries[theirs] = replace(entry, factors=factors[name]) if name in factors else entry
            if len(entries) > MAX_TENSORS:
                raise CheckpointError(
                    f"{header.path}: tensors, each expert as one", f"{len(entries)} and more", f"at most {MAX_TENSORS}"
                )
    return entries


def _factors(header: GgufHeader, names: Names) -> tuple[dict[str, GgufTensor], set[str]]:
    """Return the tensors with the factors of matrices in NVFP4, by the name of the matrix; and which names are factors.

    Among these are the names of factors of inputs, which quire does not use.
    """
    found: dict[str, GgufTensor] = {}
    used: set[str] = set()
    for name, tensor in header.tensors.items():
        stem = name.removesuffix(".weight")
        scale = f"{stem}.scale"
        if tensor.type.name != "NVFP4" or scale.split(".", 2)[-1] in names.table.layer:
            continue
        used |= {scale, f"{stem}.input_scale"}
        if scale in header.tensors:
            factors, count = header.tensors[scale], tensor.shape[0] if len(tensor.shape) == 3 else 1
            if factors.type.name != "F32" or factors.shape not in ((1,), (count,)):
                shown, allowed = f"{factors.type.name}, {list(factors.shape)}", f"F32, [{count}], as for its matrix"
                raise CheckpointError(f"{header.path}: tensor {scale!r}", shown, allowed)
            found[name] = factors
    return found, used


def _named(header: GgufHeader, names: Names, name: str, tensor: GgufTensor) -> list[tuple[str, GgufEntry]]:
    """Return the names and entries for a tensor of the file, one for each expert in it."""
    stem, _, kind = name.rpartition(".")
    table, once = names.table, names.once
    if kind in table.weights or kind == "scale":
        stem, kind = name, "weight"
    if not stem.startswith("blk."):
        if stem in table.stacks and len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS:
            ours = table.stacks[stem]
            return [(f"{ours.format(number=n)}.{kind}", GgufEntry(tensor, n)) for n in range(tensor.shape[0])]
        return [(f"{once[stem]}.{kind}" if stem in once else name, GgufEntry(tensor))]
    _, layer, part = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", stem)
    parts = GATE_AND_UP if part == GATE_UP and names.has_gate_up else (part,)
    is_stack = parts[0] in EXPERTS and len(tensor.shape) == (3 if kind == "weight" else 2)
    if is_stack and tensor.shape[1] % len(parts) == 0:
        if tensor.shape[0] > MAX_EXPERTS:
            raise CheckpointError(
                f"{header.path}: tensor {name!r}", f"{tensor.shape[0]} experts", f"at most {MAX_EXPERTS}"
            )
        return _experts(f"{table.prefix}{layer}.", [f"{table.experts[one]}.{kind}" for one in parts], tensor)
    old = OLD_EXPERT.fullmatch(stem)
    if old is not None:
        ours = table.experts[f"{old[1]}_exps"].format(expert=old[2])
        return [(f"{table.prefix}{layer}.{ours}.{kind}", GgufEntry(tensor))]
    if part not in table.layer:
        return [(name, GgufEntry(tensor))]
    if part == ROW and len(tensor.shape) == 1:
        tensor = replace(tensor, shape=(1, *tensor.shape))
    if part in FILTERS and len(tensor.shape) == 2:
        tensor = replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[1]))
    if part in FLAT and len(tensor.shape) == 2:
        tensor = replace(tensor, shape=(tensor.shape[0] * tensor.shape[1],))
    order = order_of(header, names.architecture, part, tensor)
    by_head = part in BY_HEAD and len(tensor.shape) == 3
    transposed = (names.architecture == "gpt2" and len(tensor.shape) == 2) or (by_head and BY_HEAD[part])
    ours = f"{table.prefix}{layer}.{table.layer[part]}.{'weight' if part in table.weights else kind}"
    entry = GgufEntry(tensor, None, order, transposed, by_head, is_exponential=part == DECAY)
    return [(ours, entry)]


def _experts(prefix: str, names: Sequence[str], tensor: GgufTensor) -> list[tuple[str, GgufEntry]]:
    """Return the names and entries of each expert's matrices in a stack, in which these follow each other."""
    count = len(names)
    each = replace(tensor, shape=(count * tensor.shape[0], tensor.shape[1] // count, *tensor.shape[2:]))
    return [
        (prefix + names[place % count].format(expert=place // count), GgufEntry(each, place))
        for place in range(each.shape[0])
    ]
