"""Names: the names of the tensors of a GGUF file, and those of Hugging Face for the same tensors.

The tables are in name_tables/: dense decoders, Gemma, mixtures of experts, recurrent layers, older decoders, encoders.
An architecture without a table has Llama's names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.name_tables.dense import DENSE
from quire.compute.gguf.name_tables.encoders import DISTIL_BERT, ENCODERS, TOKEN_TYPES
from quire.compute.gguf.name_tables.gemma import GEMMA
from quire.compute.gguf.name_tables.mixtures import MIXTURES
from quire.compute.gguf.name_tables.older import FALCON_TWO_NORMS, OLDER
from quire.compute.gguf.name_tables.recurrent import DENSE_GRANITE, LFM2_ONCE_OF_OLLAMA, RECURRENT
from quire.compute.gguf.name_tables.table import NameTable

CLASSIFIER: Final = MappingProxyType({"cls.output": "score"})  # of all architectures
TABLES: Final[Mapping[str, NameTable]] = MappingProxyType(
    {**DENSE, **ENCODERS, **GEMMA, **MIXTURES, **OLDER, **RECURRENT}
)
LLAMA: Final = NameTable()
GATE_UP: Final = "ffn_gate_up_exps"
GATE_AND_UP: Final = ("ffn_gate_exps", "ffn_up_exps")
"""The matrices in a tensor that has the gate of each expert, and then its up projection."""

OF_EXPERT: Final = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(\w+)")
OLD_EXPERT: Final = re.compile(r"blk\.\d+\.(ffn_(?:gate|up|down))\.(\d+)")
"""A matrix of one expert in the first files of Mixtral, which do not stack experts: its part, and the expert."""


@dataclass(frozen=True, slots=True)
class Names:
    """The names of the tensors of one file.

    `has_stacks`: whether all experts of a layer are in one tensor; `has_gate_up`: with gate and up of each together.
    """

    architecture: str
    table: NameTable
    has_stacks: bool = True
    has_gate_up: bool = False

    @classmethod
    def of(cls, architecture: str, tensors: Collection[str]) -> Names:
        """Return the names of an architecture, in a file with these tensors."""
        table = TABLES.get(architecture, LLAMA)
        match architecture:
            case "bert" if TOKEN_TYPES not in tensors:
                table = DISTIL_BERT
            case "falcon" if any(".attn_norm_2." in name for name in tensors):
                table = FALCON_TWO_NORMS
            case "gemma4":
                has_gate_up = any(f".{GATE_UP}." in name for name in tensors)
                return cls(architecture, table, has_gate_up=has_gate_up)
            case "granitehybrid" if not any(".ffn_gate_inp." in name for name in tensors):
                table = DENSE_GRANITE
            case "lfm2" | "lfm2moe" if "output_norm.weight" in tensors:
                table = table._replace(once=LFM2_ONCE_OF_OLLAMA)
            case "llama":
                has_stacks = not any(OLD_EXPERT.fullmatch(name.rpartition(".")[0]) for name in tensors)
                return cls(architecture, table, has_stacks)
        return cls(architecture, table)

    @property
    def once(self) -> Mapping[str, str]:
        """The names of the tensors outside layers."""
        return {**CLASSIFIER, **self.table.once}

    def stored(self, name: str) -> str:
        """Return the file's name for a tensor of Hugging Face; the same name if files have no other."""
        stem, _, kind = name.rpartition(".")
        where, theirs = "", key_of(self.once, stem)
        of_stack = re.fullmatch(r"(.*\.)\d+", stem)
        if of_stack is not None and (stack := key_of(self.table.stacks, f"{of_stack[1]}{{number}}")) is not None:
            return f"{stack}.{kind}"
        if stem.startswith(self.table.prefix):
            layer, _, part = stem.removeprefix(self.table.prefix).partition(".")
            where, theirs = f"blk.{layer}.", self._stored_part(part)
        return name if theirs is None else f"{where}{theirs}{self.table.weights.get(theirs, f'.{kind}')}"

    def _stored_part(self, part: str) -> str | None:
        of_expert = OF_EXPERT.fullmatch(part)
        if of_expert is None:
            return key_of(self.table.layer, part)
        module, expert, matrix = of_expert.groups()
        stack = key_of(self.table.experts, f"{module}.{{expert}}.{matrix}")
        if self.has_gate_up and stack in GATE_AND_UP:
            return GATE_UP
        return stack if stack is None or self.has_stacks else f"{stack.removesuffix('_exps')}.{expert}"


def key_of(names: Mapping[str, str], ours: str) -> str | None:
    """Return the name in a file of what is `ours` in a checkout; None: it has none."""
    return next((theirs for theirs, name in names.items() if name == ours), None)
