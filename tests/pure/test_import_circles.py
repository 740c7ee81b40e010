"""No module imports itself by way of others, imports within functions and those for type checkers included."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"


def import_graph(source: Path) -> dict[str, set[str]]:
    """Return, for each module under a folder, the modules there that it names in an import."""
    modules = {}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        modules[".".join(parts[:-1] if path.name == "__init__.py" else parts)] = path
    return {name: imported_by(path) & (modules.keys() - {name}) for name, path in modules.items()}


def imported_by(path: Path) -> set[str]:
    """Return what a file imports; of `from a import b` both a and a.b, as b may be a module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module), level=0):
                found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
            case ast.ImportFrom():
                pytest.fail(f"{path} has a relative import, which this test does not follow")
    return found


def test_no_circle_of_modules_is_left() -> None:
    graph = import_graph(SOURCE)
    assert len(graph) > 400
    assert "quire.core.request" in graph["quire.memory.manager"]
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_a_circle_would_be_noticed(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "first.py").write_text("def later():\n    from pack import second\n", encoding="utf-8")
    (package / "second.py").write_text("from pack.first import later\n", encoding="utf-8")
    with pytest.raises(CycleError, match=r"pack\.first"):
        TopologicalSorter(import_graph(tmp_path)).prepare()
