"""The names that `quire` offers, and what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from quire.core import errors


def test_all_is_sorted_and_importable() -> None:
    assert sorted(quire.__all__) == quire.__all__
    assert len(set(quire.__all__)) == len(quire.__all__)
    for name in quire.__all__:
        assert getattr(quire, name).__name__ == name


def test_dir_offers_exactly_all() -> None:
    assert [name for name in dir(quire) if not name.startswith("_")] == quire.__all__
    assert "__version__" in dir(quire)


def test_every_error_is_public() -> None:
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception) and value.__module__ == errors.__name__
    }
    assert defined <= set(quire.__all__)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(quire.__file__).read_text(encoding="utf-8"))
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    )
    imported = {
        alias.asname or alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(imported) == quire.__all__
    assert {name: getattr(quire, name).__module__ for name in quire.__all__} == imported


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = quire.Nothing  # type: ignore[attr-defined]


def test_star_import_gives_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from quire import *", namespace)
    assert set(quire.__all__) <= set(namespace)


@pytest.mark.parametrize(
    "code",
    [
        "import quire",
        "from quire import *",
        "import quire.cli",
        "from quire.cli import main; assert main(['--version']) == 0",
    ],
)
def test_importing_brings_in_no_arrays_and_no_compiled_core(code: str) -> None:
    heavy = "{'numpy', 'torch', 'quire._native'}"
    program = f"{code}\nimport sys\nloaded = {heavy} & set(sys.modules)\nassert not loaded, loaded"
    done = subprocess.run([sys.executable, "-c", program], check=False, stdout=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0


UNUSED = ("reference", "torch.backend", "gguf.contents", "quantized.awq", "adapters.gguf")


def test_a_model_brings_in_no_other_engine_and_no_other_format() -> None:
    """Imports are most of the time that a small model takes to start."""
    unused = {f"quire.compute.{name}" for name in UNUSED} | {"quire.serve"}
    program = f"import quire, sys\nquire.LLM('guide', kv_memory='1MiB')\nassert not {unused} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_import_quire_loads_nothing_of_quire() -> None:
    program = "import sys, quire\nassert [name for name in sys.modules if name.startswith('quire.')] == []"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=300).returncode == 0
