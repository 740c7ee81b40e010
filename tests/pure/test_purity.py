"""The control plane runs where nothing but Python is installed, and the whole product where torch is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "triton", "transformers", "ray", "starlette")
CONTROL_PLANE = (
    "quire.core.executor",
    "quire.core.validate",
    "quire.memory.manager",
    "quire.memory.prefix.hash_chain",
    "quire.memory.prefix.radix_tree",
    "quire.scheduler.scheduler",
    "quire.engine.core",
    "quire.engine.records.step_log",
    "quire.simulate.executor",
    "quire.simulate.paper",
    "quire.simulate.workload.step_log",
    "quire.simulate.roofline",
)


def modules_after(imports: str) -> set[str]:
    """The modules loaded in a new interpreter after these imports."""
    code = f"import sys\n{imports}\nprint('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize("module", CONTROL_PLANE)
def test_the_control_plane_reaches_no_framework_no_arrays_and_nothing_compiled(module):
    loaded = modules_after(f"import {module}")
    assert module in loaded
    assert loaded.isdisjoint({*FRAMEWORKS, "numpy", "quire._native"})


@pytest.mark.parametrize("module", ["quire.engine.factory", "quire.compute.reference", "quire.cli"])
def test_the_default_install_reaches_no_framework(module):
    assert modules_after(f"import {module}").isdisjoint(FRAMEWORKS)


def test_core_is_the_standard_library_only():
    loaded = modules_after("\n".join(f"import {name}" for name in CONTROL_PLANE if name.startswith("quire.core")))
    foreign = {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) - {"quire", "__main__"}
    # What site hooks of an editable install load before any import of ours.
    assert foreign <= {name.partition(".")[0] for name in modules_after("")}
