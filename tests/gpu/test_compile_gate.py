"""Every kernel that ships compiles for the GPUs it is meant for: into shared memory, unspilled, with its pipeline."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.compile_gate import RARE, compile_job, digest_job, kernel_modules, recorded, variants_of

PLANTED = "tests.gpu.planted_kernels"
LEAST_SHARED_BYTES = 99 << 10
"""What a program of sm_86 and sm_89 may have, which use the forms of sm_80."""


@pytest.fixture(scope="module")
def compiler() -> Iterator[ProcessPoolExecutor]:
    """A process in which kernels are not interpreted. One: tests run side by side."""
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, get_context("spawn")) as pool:
        patch.delenv("TRITON_INTERPRET", raising=False)
        pool.submit(os.getpid).result()  # it has started with this environment
        yield pool


RECORDED = recorded()


def shipped() -> Iterator[Any]:
    """Yield a variant and a capability that it is meant for.

    `make test` looks at each variant that is not rare, for its first capability, the smallest; the long tests at all.
    What has not changed since compiled.jsonl was written is not compiled again.
    """
    for module in kernel_modules():
        for name, variant in variants_of(module).items():
            first, *others = variant.capabilities
            yield pytest.param(module, name, first, marks=[pytest.mark.long] * bool(RARE.search(name)))
            yield from (pytest.param(module, name, other, marks=pytest.mark.long) for other in others)


@pytest.mark.parametrize(("module", "name", "capability"), list(shipped()))
def test_every_variant_that_ships_passes_the_gate(
    module: str, name: str, capability: int, compiler: ProcessPoolExecutor
) -> None:
    digest = compiler.submit(digest_job, module, name, capability).result()
    compiled = RECORDED.get(digest) or compiler.submit(compile_job, module, name, capability).result()
    assert compiled.faults(variants_of(module)[name]) == []
    assert capability != 80 or compiled.shared_bytes <= LEAST_SHARED_BYTES


@pytest.mark.long
def test_what_is_recorded_is_what_comes_of_compiling(compiler: ProcessPoolExecutor) -> None:
    changed = "kernels have changed: python -m tests.gpu.compile_gate --record"
    for digest, before in RECORDED.items():
        place = before.module, before.variant, before.capability
        assert before.variant in variants_of(before.module), changed
        assert compiler.submit(digest_job, *place).result() == digest, changed
        assert compiler.submit(compile_job, *place).result() == before


def test_a_digest_does_not_depend_on_what_was_asked_for_or_compiled_before(compiler: ProcessPoolExecutor) -> None:
    """Triton keeps the hash of each function, and the hash of one that calls others depends on theirs."""
    places = [(each.module, each.variant, each.capability) for each in RECORDED.values()][::10]
    digests = [compiler.submit(digest_job, *place).result() for place in places]
    compiler.submit(compile_job, PLANTED, "sound", 90).result()
    assert [compiler.submit(digest_job, *place).result() for place in reversed(places)] == digests[::-1]


@pytest.mark.parametrize("module", kernel_modules())
def test_every_kernel_of_a_module_is_in_its_table(module: str) -> None:
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    launched = {
        node.name
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert launched == {variant.kernel.__name__ for variant in variants_of(module).values()}


def test_the_gate_finds_what_is_wrong_with_planted_kernels(compiler: ProcessPoolExecutor) -> None:
    told = {
        (name, capability): compiler.submit(compile_job, PLANTED, name, capability).result().faults(variant)
        for name, variant in variants_of(PLANTED).items()
        for capability in variant.capabilities
    }
    sound = {(name, capability): [] for name in ("sound", "grouped") for capability in (80, 90, 100)}
    halved = ["buffers: 1, not 2", "nothing is loaded while it computes"]
    carried = {("ids not carried", capability): halved for capability in (80, 90, 100)}
    assert told.items() >= {**sound, **carried}.items()
    (too_large,) = told["too large", 80]
    assert too_large.startswith("shared memory: ") and too_large.endswith(" bytes, at most 166912")
    assert told["spilled", 90][-1].startswith("registers are spilled: ")
    assert "0% of the bytes are loaded by 16, at least 75%" in told["narrow", 90]
    assert told["fused", 90] == ["1 products and sums are rounded once"]
    (refused,) = told["refused", 90]
    assert refused.startswith("CompilationError: ") and "incompatible dimensions" in refused
