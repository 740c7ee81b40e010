"""The tensors of a GGUF file by the names and in the order of Hugging Face.

A name in Hugging Face refers to a tensor of the file, or to one expert's part. Files of Llama, Arcee, Granite,
InternLM2, Ministral 3 and SmolLM3 have the rows of queries and keys interleaved, because llama.cpp rotates adjacent
dimensions where we rotate halves; this module restores their order. It also reorders the rows of Falcon and GPT-NeoX
files, which have all queries, then all keys, then all values. MXFP4 blocks are returned as Q5_0, which represents the
same weights.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import numpy as np

from quire.compute.arrays import ByteArray, FloatArray, HalfArray
from quire.compute.gguf.blocks import q5_0_of_mxfp4
from quire.compute.gguf.header import MAX_TENSORS, GgufHeader, GgufTensor, same_number
from quire.compute.gguf.settings import architecture_of
from quire.compute.weights.bfloat16 import narrowed
from quire.compute.weights.weight_file import EVERYTHING
from quire.core.errors import CheckpointError
from quire.core.model_files import open_model_file

SETTINGS: Final = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that are settings: the divisors of the frequencies of positions."""

ONCE: Final = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
CLASSIFIER: Final = MappingProxyType({"cls.output": "score"})  # of all architectures
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
NORM_AFTER_ATTENTION: Final = MappingProxyType(
    {
        **{name: ours for name, ours in LAYER.items() if name != "ffn_norm"},
        "post_attention_norm": "post_attention_layernorm",
    }
)
"""The norm before the MLP, by the other name that some files have for it."""

MAX_EXPERTS: Final = 4096  # of a layer: each becomes a name
EXPERTS: Final = MappingProxyType(
    {
        "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
        "ffn_up_exps": "mlp.experts.{expert}.up_proj",
        "ffn_down_exps": "mlp.experts.{expert}.down_proj",
    }
)
MIXTRAL_EXPERTS: Final = MappingProxyType(
    {
        "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
        "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    }
)
GRANITE_EXPERTS: Final = MappingProxyType(
    {theirs: ours.replace("mlp", "block_sparse_moe") for theirs, ours in EXPERTS.items()}
)
EXPERTS_OF: Final = MappingProxyType({"granitemoe": GRANITE_EXPERTS, "llama": MIXTRAL_EXPERTS})
"""Architectures whose experts have other names."""

OF_EXPERT: Final = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")
OLD_EXPERT: Final = re.compile(r"blk\.\d+\.(ffn_(?:gate|up|down))\.(\d+)")
"""A matrix of one expert in the first files of Mixtral, which do not stack experts: its part, and the expert."""

GEMMA: Final = MappingProxyType(
    {
        **LAYER,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
PHI2: Final = MappingProxyType({**LAYER, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"})
OFFSET: Final = "exp_probs_b"
"""The offsets of experts (`ExpertsSpec.offset`), which the file calls a bias."""

ROW: Final = "ffn_gate_inp_shexp"
"""A matrix of one row, which older files have as a vector."""

BY_HEAD: Final = MappingProxyType({"attn_k_b": True, "attn_v_b": False})
"""Tensors with a matrix per head, and whether it is transposed."""

KEPT_AS: Final = MappingProxyType({"MXFP4": "Q5_0"})
"""Block types that engines get as another type."""

APART: Final = frozenset({"falcon", "gptneox"})
"""Architectures whose files have all queries, then all keys, then all values in one tensor."""

INTERLEAVED: Final = frozenset({"arcee", "granite", "granitemoe", "internlm2", "llama", "mistral3", "smollm3"})
"""Architectures whose files interleave the rows of the two halves of each query and key head."""

SHARED: Final = MappingProxyType(
    {
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
        OFFSET: "mlp.gate.e_score_correction_bias",
    }
)
FURTHER: Final = MappingProxyType(
    {
        **{f"nextn.{name}": name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
        **{f"nextn.shared_head_{name}": f"shared_head.{name}" for name in ("head", "norm")},
    }
)
"""Tensors of the layers that predict further tokens."""

LATENTS: Final = MappingProxyType(
    {
        **LAYER,
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        **SHARED,
    }
)
LAYERS: Final = MappingProxyType(
    {
        **dict.fromkeys(("deepseek2", "minicpm3"), LATENTS),
        "gemma2": GEMMA,
        "gemma3": GEMMA,
        **dict.fromkeys(("chatglm", "phi3"), MappingProxyType({**LAYER, "ffn_up": "mlp.gate_up_proj"})),
        "glm4": MappingProxyType(
            {
                **LAYER,
                "ffn_up": "mlp.gate_up_proj",
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            }
        ),
        "glm4moe": MappingProxyType(
            {
                **NORM_AFTER_ATTENTION,
                **{**SHARED, **FURTHER},
            }
        ),
        "seed_oss": NORM_AFTER_ATTENTION,
        "gpt-oss": MappingProxyType(
            {
                **NORM_AFTER_ATTENTION,
                "attn_sinks": "self_attn.sinks",
                "ffn_gate_inp": "mlp.router",
            }
        ),
        "granitemoe": MappingProxyType(
            {
                **LAYER,
                "ffn_gate_inp": "block_sparse_moe.router.layer",
                "ffn_gate_shexp": "shared_mlp.gate_proj",
                "ffn_up_shexp": "shared_mlp.up_proj",
                "ffn_down_shexp": "shared_mlp.output_linear",
            }
        ),
        "hunyuan-dense": MappingProxyType(
            {**LAYER, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
        ),
        "llama": MappingProxyType({**LAYER, "ffn_gate_inp": "block_sparse_moe.gate"}),
        **dict.fromkeys(
            ("exaone4", "olmo2"),
            MappingProxyType({name: ours for name, ours in GEMMA.items() if name not in ("attn_norm", "ffn_norm")}),
        ),
        "qwen2moe": MappingProxyType(
            {
                **LAYER,
                "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
                "ffn_up_shexp": "mlp.shared_expert.up_proj",
                "ffn_down_shexp": "mlp.shared_expert.down_proj",
                ROW: "mlp.shared_expert_gate",
            }
        ),
        "starcoder2": MappingProxyType({**LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    }
)
FALCON_ONCE: Final = MappingProxyType(
    {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"}
)
FALCON_LAYER: Final = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    }
)
TWO_NORMS: Final = MappingProxyType({"attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"})
GPTNEOX_ONCE: Final = MappingProxyType(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"}
)
GPTNEOX_LAYER: Final = MappingProxyType(
    {
        **{name: ours.replace("self_attention", "attention") for name, ours in FALCON_LAYER.items()},
        "ffn_norm": "post_attention_layernorm",
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


Rows = TypeVar("Rows", FloatArray, ByteArray)


@dataclass(frozen=True, slots=True)
class Order:
    """Puts the rows of a tensor in the order of Hugging Face, if the file interleaves the halves of each of `heads`.

    With `kv_heads`, the file has all queries, all keys and all values; the result has each key and each value after the
    queries that read them.
    """

    heads: int
    kv_heads: int = 0

    def __call__(self, stored: Rows) -> Rows:
        """Return the rows in the order of Hugging Face."""
        rows, rest = stored.shape[0], stored.shape[1:]
        if not self.kv_heads:
            pairs = stored.reshape(self.heads, rows // self.heads // 2, 2, *rest)
            return pairs.swapaxes(1, 2).reshape(rows, *rest)
        size = rows // (self.heads + 2 * self.kv_heads)
        ends = [self.heads * size, (self.heads + self.kv_heads) * size]
        parts = [part.reshape(self.kv_heads, -1, *rest) for part in np.split(stored, ends)]
        return np.concatenate(parts, axis=1).reshape(rows, *rest)


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of an architecture's tensors: those outside layers, those of each layer, and those of each expert.

    `has_stacks`: whether all experts of a layer are in one tensor.
    """

    architecture: str
    once: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str
    has_stacks: bool = True

    @classmethod
    def of(cls, architecture: str, tensors: Collection[str]) -> _Names:
        """Return the names of an architecture, in a file with these tensors."""
        match architecture:
            case "gpt2":
                return cls(architecture, GPT2_ONCE, GPT2_LAYER, "transformer.h.")
            case "gptneox":
                return cls(architecture, GPTNEOX_ONCE, GPTNEOX_LAYER, "gpt_neox.layers.")
            case "falcon":
                norms = TWO_NORMS if any(".attn_norm_2." in name for name in tensors) else {}
                return cls(architecture, FALCON_ONCE, {**FALCON_LAYER, **norms}, "transformer.h.")
            case "llama":
                has_stacks = not any(OLD_EXPERT.fullmatch(name.rpartition(".")[0]) for name in tensors)
                return cls(architecture, ONCE, LAYERS["llama"], "model.layers.", has_stacks)
            case "phi2":
                return cls(architecture, {**ONCE, "output_norm": "model.final_layernorm"}, PHI2, "model.layers.")
        return cls(architecture, ONCE, LAYERS.get(architecture, LAYER), "model.layers.")

    @property
    def experts(self) -> Mapping[str, str]:
        """The names of the tensors of an expert."""
        return EXPERTS_OF.get(self.architecture, EXPERTS)

    def stored(self, name: str) -> str:
        """Return the file's name for a tensor of Hugging Face; the same name if files have no other."""
        stem, _, kind = name.rpartition(".")
        where, theirs = "", _key_of({**self.once, **CLASSIFIER}, stem)
        if stem.startswith(self.prefix):
            layer, _, part = stem.removeprefix(self.prefix).partition(".")
            where, theirs = f"blk.{layer}.", self._stored_part(part)
        return name if theirs is None else f"{where}{theirs}.{'bias' if theirs == OFFSET else kind}"

    def _stored_part(self, part: str) -> str | None:
        of_expert = OF_EXPERT.fullmatch(part)
        if of_expert is None:
            return _key_of(self.layer, part)
        module, expert, matrix = of_expert.groups()
        stack = _key_of(self.experts, f"{module}.{{expert}}.{matrix}")
        return stack if stack is None or self.has_stacks else f"{stack.removesuffix('_exps')}.{expert}"


def _key_of(names: Mapping[str, str], ours: str) -> str | None:
    return next((theirs for theirs, name in names.items() if name == ours), None)


@dataclass(frozen=True, slots=True)
class GgufEntry:
    """A tensor of Hugging Face in a file: `tensor` or one expert in it, with the rows reordered by `order`.

    `transposed`: the file has it transposed. `by_head`: the file has a matrix per head; here their rows are
    concatenated.
    """

    tensor: GgufTensor
    expert: int | None = None
    order: Order | None = None
    transposed: bool = False
    by_head: bool = False

    @property
    def dtype(self) -> str:
        """The format of its numbers."""
        return self.tensor.type.name

    @property
    def has_blocks(self) -> bool:
        """Whether it is a matrix of blocks, not of floats."""
        return self.tensor.type.size > 1 and len(self.shape) == 2 and not self.by_head

    @property
    def byte_range(self) -> tuple[int, int]:
        """The range of its bytes in the tensor."""
        if self.expert is None:
            return 0, self.tensor.num_bytes
        num_bytes = self.tensor.num_bytes // self.tensor.shape[0]
        return self.expert * num_bytes, (self.expert + 1) * num_bytes

    @property
    def num_outputs(self) -> int:
        """The number of its rows in the file."""
        return self.tensor.shape[0 if self.expert is None else 1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, rows first."""
        shape = self.tensor.shape if self.expert is None else self.tensor.shape[1:]
        if self.by_head:
            heads, rows, columns = shape
            return (heads * columns, rows) if self.transposed else (heads * rows, columns)
        return shape[::-1] if self.transposed else shape


class GgufTensors:
    """Implements `WeightFile` with GGUF files; each is mapped when one of its tensors is first read."""

    def __init__(self, header: GgufHeader) -> None:
        self._names = _Names.of(architecture_of(header), header.tensors.keys())
        self.entries: Mapping[str, GgufEntry] = MappingProxyType(_entries(header, self._names))
        self.block_types: Mapping[str, str] = MappingProxyType(
            {name: KEPT_AS.get(entry.dtype, entry.dtype) for name, entry in self.entries.items() if entry.has_blocks}
        )
        self._header = header
        self._mappings: dict[Path, mmap.mmap] = {}

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
        """Return rows of a tensor as bfloat16, read-only."""
        found = self._numbers(self.entries[name], rows)
        bits = narrowed(found.reshape(-1)).reshape(found.shape)
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
        if entry.dtype != "MXFP4":
            return blocks
        try:
            return q5_0_of_mxfp4(blocks)
        except ValueError as error:
            where = f"{self.name}: tensor {self.stored_name(name)!r}"
            raise CheckpointError(where, error, "from 2^-24 to 2^15, or the option --weights widened") from error

    def setting(self, name: str) -> FloatArray | None:
        """Return a tensor of the file that is a setting, or None."""
        tensor = self._header.tensors.get(name)
        return None if tensor is None else self._widened(tensor, 0, tensor.num_bytes).reshape(tensor.shape)

    def release(self) -> None:
        """Free the memory of the mapped files."""
        for mapping in self._mappings.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                mapping.madvise(mmap.MADV_DONTNEED)

    def _numbers(self, entry: GgufEntry, rows: slice) -> FloatArray:
        tensor, shape = entry.tensor, entry.shape
        if entry.transposed or entry.by_head or entry.order is not None:
            whole = self._widened(tensor, 0, tensor.num_bytes).reshape(tensor.shape)
            if entry.transposed:
                whole = whole.swapaxes(-1, -2)
            whole = whole.reshape(shape) if entry.order is None else entry.order(whole)
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
        with np.errstate(over="ignore", invalid="ignore"):  # scales that are not finite show in the weights
            return tensor.type.widen(self._bytes(tensor, start, stop).reshape(-1, tensor.type.num_bytes))

    def _bytes(self, tensor: GgufTensor, start: int, stop: int) -> ByteArray:
        if tensor.file not in self._mappings:
            self._mappings[tensor.file] = self._mapped(tensor.file)
        return np.frombuffer(self._mappings[tensor.file], np.uint8, stop - start, tensor.start + start)

    def _mapped(self, path: Path) -> mmap.mmap:
        """Return the mapping of a file; raises if the file's size has changed since its header was checked."""
        with open_model_file(path) as file:
            size, checked = os.fstat(file.fileno()).st_size, self._header.file_bytes[path]
            if size != checked:
                raise CheckpointError(f"{path}: size", size, f"{checked} bytes, as when it was checked")
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _entries(header: GgufHeader, names: _Names) -> dict[str, GgufEntry]:
    """Return the tensors of a file by the names of Hugging Face; unknown names stay unchanged."""
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
    """Return the names and entries for a tensor of the file, one for each expert in it."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("blk."):
        once = {**names.once, **CLASSIFIER}
        return [(f"{once[stem]}.{kind}" if stem in once else name, GgufEntry(tensor))]
    _, layer, part = stem.split(".", 2) if stem.count(".") >= 2 else ("", "", stem)
    if part in EXPERTS and len(tensor.shape) == (3 if kind == "weight" else 2):
        if tensor.shape[0] > MAX_EXPERTS:
            raise CheckpointError(
                f"{header.path}: tensor {name!r}", f"{tensor.shape[0]} experts", f"at most {MAX_EXPERTS}"
            )
        return [
            (f"{names.prefix}{layer}.{names.experts[part].format(expert=expert)}.{kind}", GgufEntry(tensor, expert))
            for expert in range(tensor.shape[0])
        ]
    old = OLD_EXPERT.fullmatch(stem)
    if old is not None:
        ours = names.experts[f"{old[1]}_exps"].format(expert=old[2])
        return [(f"{names.prefix}{layer}.{ours}.{kind}", GgufEntry(tensor))]
    if part not in names.layer:
        return [(name, GgufEntry(tensor))]
    if part == ROW and len(tensor.shape) == 1:
        tensor = replace(tensor, shape=(1, *tensor.shape))
    order = _order(header, names.architecture, part, tensor)
    by_head = part in BY_HEAD and len(tensor.shape) == 3
    transposed = (names.architecture == "gpt2" and len(tensor.shape) == 2) or (by_head and BY_HEAD[part])
    ours = f"{names.prefix}{layer}.{names.layer[part]}.{'weight' if part == OFFSET else kind}"
    return [(ours, GgufEntry(tensor, order=order, transposed=transposed, by_head=by_head))]


def _order(header: GgufHeader, architecture: str, part: str, tensor: GgufTensor) -> Order | None:
    """Return the order for the rows of a tensor; None if they already have that of Hugging Face."""
    key = f"{architecture}.attention.head_count"
    heads: Any = header.settings.get(key)
    kv_heads: Any = heads if architecture == "gptneox" else same_number(header.settings.get(f"{key}_kv", heads))
    if architecture in INTERLEAVED and part in ("attn_q", "attn_k"):
        counts = [kv_heads if part == "attn_k" else heads]
    elif architecture in APART and part == "attn_qkv":
        counts = [heads, kv_heads]
    else:
        return None
    if all(type(count) is int and count > 0 for count in counts):
        order = Order(*counts)
        if order.kv_heads:  # rows that do not fit have a wrong shape, which a later check detects
            fits = tensor.shape[0] % (order.heads + 2 * order.kv_heads) == 0 == order.heads % order.kv_heads
            return order if fits else None
        if tensor.shape[0] % (2 * order.heads) == 0:
            return order
    raise CheckpointError(
        f"{header.path}: {key}", counts[0], f"heads whose rows make up the {tensor.shape[0]} of {part}"
    )
