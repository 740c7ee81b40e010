"""The tensors of a GGUF file by the names and in the order of Hugging Face.

A name of Hugging Face stands for a tensor of the file, or for the part of one expert. Files of Llama, Granite and
SmolLM3 have the rows of queries and keys interleaved, because llama.cpp turns neighbours where we turn halves; they are
put back.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np

from quire.compute.arrays import ByteArray, FloatArray, HalfArray
from quire.compute.gguf.header import MAX_TENSORS, GgufHeader, GgufTensor
from quire.compute.gguf.settings import architecture_of
from quire.compute.weights.bfloat16 import narrowed
from quire.compute.weights.weight_file import EVERYTHING
from quire.core.errors import CheckpointError
from quire.core.model_files import open_model_file

SETTINGS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are settings: frequencies of positions are divided by them."""

ONCE: Final = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
LAYER: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
    }
)
MAX_EXPERTS: Final = 4096  # of a layer: each becomes a name
EXPERTS: Final = MappingProxyType(
    {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
)
GEMMA: Final = MappingProxyType(
    {
        **LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
INTERLEAVED: Final = frozenset({"granite", "llama", "smollm3"})
"""Architectures whose files have the rows of each head of queries and keys in turn."""

LAYERS: Final = MappingProxyType(
    {
        "gemma2": GEMMA,
        "gemma3": GEMMA,
        "glm4": MappingProxyType(
            {
                **LAYER,
                "ffn_up": "mlp.gate_up_proj",
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            }
        ),
        "olmo2": MappingProxyType(
            {name: ours for name, ours in GEMMA.items() if name not in ("attn_norm", "ffn_norm")}
        ),
        "phi3": MappingProxyType({**LAYER, "ffn_up": "mlp.gate_up_proj"}),
        "starcoder2": MappingProxyType({**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    }
)
GPT2_ONCE: Final = MappingProxyType(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    }
)
GPT2_LAYER: Final = MappingProxyType(
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
)


@dataclass(frozen=True, slots=True)
class _Names:
    """What the tensors of an architecture are called: those that it has once, and those of each layer."""

    architecture: str
    once: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str

    @classmethod
    def of(cls, architecture: str) -> _Names:
        """Return the names of an architecture."""
        if architecture == "gpt2":
            return cls(architecture, GPT2_ONCE, GPT2_LAYER, "transformer.h.")
        return cls(architecture, ONCE, LAYERS.get(architecture, LAYER), "model.layers.")

    def stored(self, name: str) -> str:
        """Return what a file calls a tensor of Hugging Face; the name itself where files have no other."""
        stem, _, kind = name.rpartition(".")
        layer, _, part = stem.removeprefix(self.prefix).partition(".")
        names, where = self.once, ""
        if stem.startswith(self.prefix):
            names, stem, where = self.layer, part, f"blk.{layer}."
            if part.startswith("mlp.experts."):
                names, stem = EXPERTS, part.rpartition(".")[2]
        return next((f"{where}{theirs}.{kind}" for theirs, ours in names.items() if ours == stem), name)


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """A tensor of Hugging Face in a file: one expert of `tensor` where there is one, its rows put in order by `heads`.

    `heads`: how many heads' rows are interleaved, 0 for none. `transposed`: the file has it the other way round.
    """

    tensor: GgufTensor
    expert: int | None = None
    heads: int = 0
    transposed: bool = False

    @property
    def dtype(self) -> str:
        """How its numbers are stored."""
        return self.tensor.type.name

    @property
    def has_blocks(self) -> bool:
        """Whether it is a matrix of blocks, not of floats."""
        return self.tensor.type.size > 1 and len(self.shape) == 2

    @property
    def byte_range(self) -> tuple[int, int]:
        """Where its bytes are in the tensor."""
        if self.expert is None:
            return 0, self.tensor.num_bytes
        num_bytes = self.tensor.num_bytes // self.tensor.shape[0]
        return self.expert * num_bytes, (self.expert + 1) * num_bytes

    @property
    def num_outputs(self) -> int:
        """How many rows it has in the file."""
        return self.tensor.shape[0 if self.expert is None else 1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, rows first."""
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        return shape[::-1] if self.transposed else shape


class GgufTensors:
    """Implements `WeightFile` with GGUF files; each is mapped when one of its tensors is first asked for."""

    def __init__(self, header: GgufHeader) -> None:
        self._names = _Names.of(architecture_of(header))
        self.entries: Mapping[str, GgufEntry] = MappingProxyType(_entries(header, self._names))
        self.block_types: Mapping[str, str] = MappingProxyType(
            {name: entry.dtype for name, entry in self.entries.items() if entry.has_blocks}
        )
        self._header = header
        self._mappings: dict[Path, mmap.mmap] = {}

    @property
    def name(self) -> str:
        """The path of the file."""
        return str(self._header.path)

    def require_floats(self, name: str) -> None:
        """Do nothing: a header has no type that cannot be asked for."""

    def tensor(self, name: str, rows: slice = EVERYTHING) -> FloatArray:
        """Return rows of a tensor as float32, read-only."""
        found = self._numbers(self.entries[name], rows)
        found.flags.writeable = False
        return found

    def bfloat16_bits(self, name: str, rows: slice = EVERYTHING) -> HalfArray:
        """Return rows of a tensor as bfloat16, read-only."""
        found = self._numbers(self.entries[name], rows)
        bits = narrowed(found.reshape(-1)).reshape(found.shape)
        bits.flags.writeable = False
        return bits

    def stored_name(self, name: str) -> str:
        """Return what a file calls a tensor, whether this one has it or not."""
        return self._names.stored(name)

    def block_rows(self, name: str, rows: slice = EVERYTHING) -> ByteArray:
        """Return rows of a matrix as they are stored, in the order of Hugging Face, read-only.

        A matrix of Hugging Face that is the other way round has its outputs as rows too.
        """
        entry = self.entries[name]
        blocks = self._bytes(entry.tensor, *entry.byte_range).reshape(entry.num_outputs, -1)
        return _halves(blocks, entry.heads)[rows] if entry.heads else blocks[rows]

    def setting(self, name: str) -> FloatArray | None:
        """Return a tensor of the file that is a setting; None where there is none."""
        tensor = self._header.tensors.get(name)
        return None if tensor is None else self._widened(tensor, 0, tensor.num_bytes).reshape(tensor.shape)

    def release(self) -> None:
        """Free the memory that the mapped files take up."""
        for mapping in self._mappings.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)

    def _numbers(self, entry: GgufEntry, rows: slice) -> FloatArray:
        tensor, shape = entry.tensor, entry.shape
        if entry.transposed or entry.heads:
            whole = self._widened(tensor, 0, tensor.num_bytes).reshape(tensor.shape)
            whole = whole.T if entry.transposed else _halves(whole, entry.heads)
            return np.ascontiguousarray(whole[rows])
        row_bytes = tensor.num_bytes // tensor.shape[0]
        start, num_rows = 0, shape[0]
        if entry.expert is not None:
            start, row_bytes = entry.expert * row_bytes, row_bytes // shape[0]
        if rows != EVERYTHING:
            start, num_rows = start + rows.start * row_bytes, rows.stop - rows.start
        found = self._widened(tensor, start, start + num_rows * row_bytes)
        return found.reshape(num_rows, *shape[1:])

    def _widened(self, tensor: GgufTensor, start: int, stop: int) -> FloatArray:
        """Return the numbers in a range of a tensor's bytes."""
        with np.errstate(over="ignore", invalid="ignore"):  # scales that are not finite: the weights show it
            return tensor.type.widen(self._bytes(tensor, start, stop).reshape(-1, tensor.type.num_bytes))

    def _bytes(self, tensor: GgufTensor, start: int, stop: int) -> ByteArray:
        if tensor.file not in self._mappings:
            self._mappings[tensor.file] = self._mapped(tensor.file)
        return np.frombuffer(self._mappings[tensor.file], np.uint8, stop - start, tensor.start + start)

    def _mapped(self, path: Path) -> mmap.mmap:
        """Return a file in memory; it must be as long as it was when its header was checked."""
        with open_model_file(path) as file:
            size, checked = os.fstat(file.fileno()).st_size, self._header.file_bytes[path]
            if size != checked:
                raise CheckpointError(f"{path}: size", size, f"{checked} bytes, as when it was checked")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


Rows = TypeVar("Rows", FloatArray, ByteArray)


def _halves(interleaved: Rows, heads: int) -> Rows:
    """Return the rows of heads with the halves of each one after the other, not in turn."""
    rows, rest = interleaved.shape[0], interleaved.shape[1:]
    pairs = interleaved.reshape(heads, rows // heads // 2, 2, *rest)
    return pairs.swapaxes(1, 2).reshape(rows, *rest)


def _entries(header: GgufHeader, names: _Names) -> dict[str, GgufEntry]:
    """Return the tensors of a file by the names of Hugging Face; a name that is unknown stays as it is."""
    entries: dict[str, GgufEntry] = {}
    for name, tensor in header.tensors.items():
        if name not in SETTINGS:
            for theirs, entry in _named(header, names, name, tensor):
                if theirs in entries:
                    raise CheckpointError(f"{header.path}: tensor {name!r}", "given twice", "each once")
                entries[theirs] = entry
            if len(entries) > MAX_TENSORS:
                raise CheckpointError(
                    f"{header.path}: tensors, each expert as one", f"{len(entries)} and more", f"at most {MAX_TENSORS}"
                )
    return entries


def _named(header: GgufHeader, names: _Names, name: str, tensor: GgufTensor) -> list[tuple[str, GgufEntry]]:
    """Return what a tensor of the file is called, one name for each expert in it."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        return [(f"{names.once[stem]}.{kind}" if stem in names.once else name, GgufEntry(tensor))]
    _, layer, part = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", stem)
    if part in EXPERTS and len(tensor.shape) == 3:
        if tensor.shape[0] > MAX_EXPERTS:
            raise CheckpointError(
                f"{header.path}: tensor {name!r}", f"{tensor.shape[0]} experts", f"at most {MAX_EXPERTS}"
            )
        prefix = f"{names.prefix}{layer}.mlp.experts"
        return [
            (f"{prefix}.{expert}.{EXPERTS[part]}.{kind}", GgufEntry(tensor, expert))
            for expert in range(tensor.shape[0])
        ]
    if part not in names.layer:
        return [(name, GgufEntry(tensor))]
    heads = _interleaved_heads(header, names.architecture, part, tensor)
    transposed = names.architecture == "gpt2" and len(tensor.shape) == 2
    ours = f"{names.prefix}{layer}.{names.layer[part]}.{kind}"
    return [(ours, GgufEntry(tensor, heads=heads, transposed=transposed))]


def _interleaved_heads(header: GgufHeader, architecture: str, part: str, tensor: GgufTensor) -> int:
    """Return how many heads have their rows interleaved in a tensor; 0 where none have."""
    if architecture not in INTERLEAVED or part not in ("attn_q", "attn_k"):
        return 0
    key = f"{architecture}.attention.head_count"
    heads = header.settings.get(f"{key}_kv", header.settings.get(key)) if part == "attn_k" else header.settings.get(key)
    if type(heads) is not int or heads < 1 or tensor.shape[0] % (2 * heads):
        raise CheckpointError(
            f"{header.path}: {key}", heads, f"heads whose rows make up the {tensor.shape[0]} of {part}"
        )
    return heads
