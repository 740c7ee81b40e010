"""The compile gate: every variant of every kernel, compiled for GPUs that are not here, and what came of it.

    VARIANTS of the modules of kernels/ ──► triton.compile for sm_80, sm_90, sm_100 ──► machine code, PTX, TTGIR
                                                                                                  │
    test_compile_gate.py, RESULTS.md ◄── one JSON object a line ◄── `Compiled` ◄── read off it ◄──┘

Triton brings its own assembler, so neither a GPU nor CUDA is needed. What is read off:

    shared memory                 what the compiler says of it
    registers, bytes of stack     cuobjdump, of the machine code; what is spilled goes to the stack
    buffers                       the first dimension of what is allocated for tiles that are read ahead (TTGIR)
    loads under way               the largest number in cp.async.wait_group: 0 is a pipeline in name only (PTX)
    widths of loads               ld.global and cp.async, counted as they stand in the PTX

It runs in processes of its own, without TRITON_INTERPRET: where the interpreter has taken the place of the kernels,
there is nothing to compile.

    PYTHONPATH=src python -m tests.gpu.compile_gate [MODULE ...]          one JSON object a line
    PYTHONPATH=src python -m tests.gpu.compile_gate --markdown FILE       a table, in its part of the file
    PYTHONPATH=src python -m tests.gpu.compile_gate --tiles               the tiles that a GPU has yet to choose from
    PYTHONPATH=src python -m tests.gpu.compile_gate --record              compiled.jsonl, once kernels have changed

`make test` compiles what has changed since compiled.jsonl was written, by digests of the kernels, of all that they call
and of this file; the long tests compile everything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from importlib import import_module, metadata
from itertools import groupby
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from quire.compute.torch import kernels
from quire.compute.torch.kernels.variants import KernelVariant
from quire.instruments.bench.gpu_tiles import DECODE_TILES, PROMPT_TILES
from quire.reporting.report import render_table
from quire.reporting.results import write_part

MAX_SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Of one program, by capability."""

RECORD = Path(__file__).with_name("compiled.jsonl")
RARE = re.compile(r"bf16 (80|256) | (i8|k8v4|int4) .* sm_80|(biases|scales|by Q).* sm_80|by (Q4_1|Q8_0)")
"""What few need: heads of an uncommon size, narrow KV on older GPUs, and there products that are not plain; and codes
of which others have all the parts. Each takes seconds to compile."""

WIDE = 16
ASYNC_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?\],\s*\[[^\]]*\],\s*(0x[0-9a-f]+|\d+)")
LOAD = re.compile(r"ld\.global(?:\.[A-Za-z_0-9:]+)*?(?:\.v([248]))?\.[busf](8|16|32|64|128)\s")
WAIT = re.compile(r"cp\.async\.wait_group\s+(\d+)")
BUFFERS = re.compile(r"ttg\.local_alloc\s*(?:\{[^}]*\})?\s*:\s*\(\)\s*->\s*!ttg\.memdesc<(\d+)x\d+(?:x\d+)+x")
RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a variant for GPUs of one capability; `error`: why it made nothing."""

    module: str
    variant: str
    capability: int
    num_warps: int = 0
    num_stages: int = 0
    registers: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    num_buffers: int | None = None
    num_under_way: int = 0
    wide_share: float | None = None
    num_fused: int = 0
    error: str = ""

    def faults(self, variant: KernelVariant) -> list[str]:
        """What keeps the variant from shipping."""
        if self.error:
            return [self.error]
        most, wanted = MAX_SHARED_BYTES[self.capability], variant.num_buffers
        share = 1.0 if self.wide_share is None else self.wide_share
        faults = {
            f"shared memory: {self.shared_bytes} bytes, at most {most}": self.shared_bytes > most,
            f"{self.num_fused} products and sums are rounded once": self.num_fused > 0 and not variant.fuses,
            f"registers are spilled: {self.stack_bytes} bytes of stack": self.stack_bytes > 0,
            f"buffers: {self.num_buffers}, not {wanted}": self.num_buffers != wanted,
            "nothing is loaded while it computes": wanted is not None and wanted > 1 and not self.num_under_way,
            f"{share:.0%} of the bytes are loaded by 16, at least {variant.min_wide_share:.0%}": (
                share < variant.min_wide_share
            ),
        }
        return [text for text, is_fault in faults.items() if is_fault]


# ---- the variants ---------------------------------------------------------------------------------------------------


def kernel_modules() -> list[str]:
    """The names of all modules of kernels."""
    names = (found.name for found in iter_modules(kernels.__path__))
    return [f"{kernels.__name__}.{name}" for name in names if name != "variants"]


def variants_of(module: str) -> dict[str, KernelVariant]:
    """The variants of a module, by their names."""
    return {variant.name: variant for variant in getattr(import_module(module), "VARIANTS", ())}


# ---- compiling ------------------------------------------------------------------------------------------------------


def compile_variant(module: str, variant: KernelVariant, capability: int) -> Compiled:
    """Compile a variant for GPUs of a capability, and read off what came of it."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "enable_fp_fusion": variant.fuses}
    made = triton.compile(_source(variant), target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack_bytes = _resources(made.asm["cubin"])
    return Compiled(
        module,
        variant.name,
        capability,
        num_warps=made.metadata.num_warps,
        num_stages=variant.num_stages,
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=made.metadata.shared,
        num_buffers=_num_buffers(made.asm["ttgir"]),
        num_under_way=max((int(number) for number in WAIT.findall(made.asm["ptx"])), default=0),
        wide_share=_wide_share(made.asm["ptx"]),
        num_fused=made.asm["ptx"].count("fma.rn"),
    )


def _source(variant: KernelVariant) -> Any:
    """The kernel with the types and constants of a variant."""
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    unknown = {*variant.arguments, *variant.constants} ^ set(names)
    assert not unknown, f"{variant.name}: {sorted(unknown)} are parameters or in the variant, and not both"
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    aligned: dict[tuple[int, ...], list[list[object]]] = {}

    def plain(kind: Any, path: tuple[int, ...]) -> Any:
        """A type as Triton has it; what it is a multiple of, and what is no type, is noted beside."""
        if isinstance(kind, tuple):
            members = [plain(member, (*path, index)) for index, member in enumerate(kind)]
            return type(kind)(*members) if hasattr(kind, "_fields") else tuple(members)
        if not isinstance(kind, str):
            constants[path] = kind
            return "constexpr"
        if kind.endswith(":16"):
            aligned[path] = [["tt.divisibility", 16]]
        return kind.partition(":")[0]

    kinds = [variant.arguments.get(name, "constexpr") for name in names]
    signature = {name: plain(kind, (index,)) for index, (name, kind) in enumerate(zip(names, kinds, strict=True))}
    return ASTSource(variant.kernel, signature, constexprs=constants, attrs=aligned)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of memory of its own."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = RESOURCES.search(told)
    assert found is not None, told
    return int(found[1]), int(found[2]) + int(found[3])


def _num_buffers(ttgir: str) -> int | None:
    """Tiles of one tensor in shared memory; None where none is read ahead."""
    return max((int(number) for number in BUFFERS.findall(ttgir)), default=None)


def _wide_share(ptx: str) -> float | None:
    """How many of the bytes that are loaded from global memory come by 16; None where nothing is."""
    widths = Counter(int(width, 0) for width in ASYNC_COPY.findall(ptx))
    widths += Counter(int(count or 1) * int(bits) // 8 for count, bits in LOAD.findall(ptx))
    total = sum(width * count for width, count in widths.items())
    return sum(width * count for width, count in widths.items() if width >= WIDE) / total if total else None


def digest_job(module: str, name: str, capability: int) -> str:
    """Return a digest of all that decides what a variant is compiled to, and what is read off it."""
    variant = variants_of(module)[name]
    _forget_hashes()
    options = (variant.num_warps, variant.num_stages, variant.fuses, capability, metadata.version("triton"))
    digest = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=16)
    digest.update(repr((_source(variant).hash(), options)).encode())
    return digest.hexdigest()


def _forget_hashes() -> None:
    """Make Triton hash every function again: its hash of a caller depends on which callees it has hashed before."""
    from triton.runtime.jit import JITCallable

    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if issubclass(type(value), JITCallable):  # some modules warn when a member is asked for its class
                value.hash, value.used_global_vals = None, {}


def recorded() -> dict[str, Compiled]:
    """What was compiled before, by digest."""
    lines = map(json.loads, RECORD.read_text(encoding="utf-8").splitlines())
    return {line.pop("digest"): Compiled(**line) for line in lines}


def record() -> None:
    """Compile what `make test` looks at, and write what came of it."""
    found = [
        (module, name, variant.capabilities[0])
        for module in kernel_modules()
        for name, variant in variants_of(module).items()
        if not RARE.search(name)
    ]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        columns = list(zip(*found, strict=True))
        digests, compiled = pool.map(digest_job, *columns), pool.map(compile_job, *columns)
        lines = [json.dumps({"digest": each} | asdict(one)) for each, one in zip(digests, compiled, strict=True)]
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


def compile_all(modules: Sequence[str]) -> Iterator[Compiled]:
    """Compile every variant of some modules for each of its capabilities, in the order of the tables."""
    jobs = [
        (module, variant.name, capability)
        for module in modules
        for variant in variants_of(module).values()
        for capability in variant.capabilities
    ]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(compile_job, *zip(*jobs, strict=True))


def compile_job(module: str, name: str, capability: int) -> Compiled:
    """Compile a variant by its name; what the compiler says against it is in what is returned."""
    try:
        return compile_variant(module, variants_of(module)[name], capability)
    except Exception as error:  # whatever it is, it is this variant's, and the others are compiled
        return Compiled(module, name, capability, error=" ".join(f"{type(error).__name__}: {error}".split()))


# ---- telling --------------------------------------------------------------------------------------------------------


HEADER = (
    "variant",
    "sm_",
    "warps",
    "registers",
    "shared memory, KiB",
    "stages",
    "buffers",
    "loads under way",
    "loaded by 16 bytes",
)


def _cells(one: Compiled) -> tuple[str, ...]:
    return (
        str(one.capability),
        str(one.num_warps),
        str(one.registers),
        f"{one.shared_bytes / 1024:.1f}",
        str(one.num_stages),
        "–" if one.num_buffers is None else str(one.num_buffers),
        str(one.num_under_way),
        "–" if one.wide_share is None else f"{one.wide_share:.0%}",
    )


def _rows(found: Sequence[Compiled]) -> Iterator[tuple[str, ...]]:
    """A row for each variant; what is not the same for all GPUs stands side by side."""
    for (module, variant), group in groupby(found, key=lambda one: (one.module, one.variant)):
        columns = zip(*map(_cells, group), strict=True)
        shown = (column[0] if len(set(column)) == 1 else " / ".join(column) for column in columns)
        yield f"{module.rpartition('.')[2]}: {variant}", *shown


def report(found: Sequence[Compiled]) -> str:
    """What was compiled, as a part of a file of results."""
    faulty = [one for one in found if one.faults(variants_of(one.module)[one.variant])]
    text = (
        f"Written by `python -m tests.gpu.compile_gate --markdown benchmarks/RESULTS.md` with Triton "
        f"{metadata.version('triton')} and its assembler, without a GPU: {len(found)} kernels, {len(faulty)} with "
        "faults. Registers are those of a thread, and none is spilled. Buffers: tiles of keys, and as many of values, "
        "in shared memory at once. Loads under way: how many the code lets run while it computes. What differs between "
        "GPUs is given for each."
    )
    return f"# GPU: what was compiled\n\n{text}\n\n{render_table(HEADER, list(_rows(found)))}"


# ---- tiles to choose from -------------------------------------------------------------------------------------------

ATTENTION = f"{kernels.__name__}.paged_attention"
TILES = {"decode": DECODE_TILES, "prompt": PROMPT_TILES}
REGISTERS, SHARED_BYTES, RESERVED_BYTES = 65_536, 228 << 10, 1 << 10
"""Of a multiprocessor of sm_90, and what each program takes in addition."""


def tiles_report() -> str:
    """What the tiles are compiled to for sm_90, the used one first, as a part of a file of results."""
    header = (
        "use",
        "rows",
        "tokens",
        "warps",
        "stages",
        "registers",
        "spilled, bytes",
        "shared memory, KiB",
        "at once",
    )
    rows = []
    for use, tiles in TILES.items():
        variant = variants_of(ATTENTION)[f"{use} bf16 128"]
        used = variant.constants["SHAPE"]
        shapes = dict.fromkeys([used, *(replace(tile.shape(used), split=used.split) for tile in tiles)])
        for shape in shapes:
            options = {"num_warps": shape.num_warps, "num_stages": shape.num_stages}
            made = compile_variant(ATTENTION, replace(variant, constants={"SHAPE": shape}, **options), 90)
            by_registers = REGISTERS // (32 * shape.num_warps * -(-made.registers // 8) * 8)
            at_once = min(by_registers, SHARED_BYTES // (made.shared_bytes + RESERVED_BYTES))
            tile = map(str, (shape.rows, shape.tokens, shape.num_warps, shape.num_stages))
            shared = f"{made.shared_bytes / 1024:.0f}"
            rows.append((use, *tile, str(made.registers), str(made.stack_bytes), shared, str(at_once)))
    text = (
        "Written by `python -m tests.gpu.compile_gate --tiles --markdown benchmarks/RESULTS.md`, without a GPU, for "
        "sm_90, bfloat16 and heads of 128; the first of each use is the used one. At once: programs that fit on a "
        "multiprocessor. Which is the fastest, `quire bench gpu-kernels --only tiles` says on a GPU, also with other "
        "splits, which need the same."
    )
    return f"# GPU: tiles to choose from\n\n{text}\n\n{render_table(header, rows)}"


def main(arguments: Sequence[str]) -> int:
    """Compile, and print or write what came of it."""
    parser = argparse.ArgumentParser(
        prog="tests.gpu.compile_gate", description="Compile every variant of every kernel."
    )
    parser.add_argument("modules", metavar="MODULE", nargs="*", help="modules of kernels; default: all that ship")
    parser.add_argument("--markdown", metavar="FILE", help="write a table as a part of this file")
    parser.add_argument("--tiles", action="store_true", help="compile the tiles that a GPU has yet to choose from")
    parser.add_argument("--record", action="store_true", help="write what `make test` need not compile again")
    options = parser.parse_args(arguments)
    if options.record:
        record()
        return 0
    if options.tiles:
        write_part(options.markdown, tiles_report()) if options.markdown else print(tiles_report())
        return 0
    found = compile_all(options.modules or kernel_modules())
    if options.markdown:
        write_part(options.markdown, report(list(found)))
    else:
        for one in found:
            print(json.dumps(asdict(one)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
