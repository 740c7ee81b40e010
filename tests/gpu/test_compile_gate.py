"""Every kernel that ships compiles for the GPUs it is meant for: into shared memory, unspilled, with its pipeline."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.gpu.compile_gate import Compiled, kernel_modules, variants_of

ROOT = Path(__file__).parents[2]
PLANTED = "tests.gpu.planted_kernels"


def compiled(*modules: str) -> list[Compiled]:
    """What the gate made of modules, in a process where kernels are not interpreted."""
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "tests.gpu.compile_gate", *modules]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [Compiled(**json.loads(line)) for line in run.stdout.splitlines()]


def test_every_variant_that_ships_passes_the_gate():
    found = compiled(*kernel_modules())
    faults = {
        (one.module, one.variant, one.capability): faults
        for one in found
        if (faults := one.faults(variants_of(one.module)[one.variant]))
    }
    assert not faults, "\n".join(f"{key}: {'; '.join(told)}" for key, told in faults.items())


@pytest.mark.parametrize("module", kernel_modules())
def test_every_kernel_of_a_module_is_in_its_table(module):
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    launched = {
        node.name
        for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
    }
    assert launched == {variant.kernel.__name__ for variant in variants_of(module).values()}


def test_the_gate_finds_what_is_wrong_with_planted_kernels():
    variants = variants_of(PLANTED)
    told = {(one.variant, one.capability): one.faults(variants[one.variant]) for one in compiled(PLANTED)}
    sound = {(name, capability): [] for name in ("sound", "grouped") for capability in (80, 90, 100)}
    halved = ["buffers: 1, not 2", "nothing is loaded while it computes"]
    carried = {("ids not carried", capability): halved for capability in (80, 90, 100)}
    assert told.items() >= {**sound, **carried}.items()
    (too_large,) = told["too large", 80]
    assert too_large.startswith("shared memory: ") and too_large.endswith(" bytes, at most 166912")
    assert told["spilled", 90][-1].startswith("registers are spilled: ")
    assert "0% of the bytes are loaded by 16, at least 75%" in told["narrow", 90]
    (refused,) = told["refused", 90]
    assert refused.startswith("CompilationError: ") and "incompatible dimensions" in refused
