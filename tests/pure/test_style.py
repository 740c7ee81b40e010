"""Prose is in plain English: few habits of translated text per folder, and the examples of docs/style.md are real."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
STYLE = ROOT / "scripts" / "style"
ROW = re.compile(r"^\| `([^`|]+)` \| (.+) \| (.+) \|$", re.MULTILINE)
PAIRS = [
    row for row in ROW.findall((ROOT / "docs" / "style.md").read_text(encoding="utf-8")) if (ROOT / row[0]).is_file()
]


def count(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, STYLE, *flags, root]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def in_one_line(path: Path) -> str:
    """A file's text without line breaks: wrapped sentences and split string literals are joined."""
    joined = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
    return " ".join(joined.split())


def test_no_folder_is_over_its_ceiling() -> None:
    found = count(ROOT)
    assert found.returncode == 0, found.stdout + found.stderr


def make_tree(root: Path, ceiling: int) -> None:
    (root / "docs").mkdir()
    (root / "docs" / "page.md").write_text("All of it waits for ever.\n\n```text\nbeside\n```\n\n`beside`\n")
    (root / "docs" / "code.py").write_text('"""Whoever calls."""\nbeside = "so many tokens"  # somebody\n')
    (root / "docs" / "code.cpp").write_text("int beside = 0;  // beside the loop\n")
    (root / "pyproject.toml").write_text(f'[tool.quire.style]\n"docs" = {ceiling}\n')


@pytest.mark.parametrize(("ceiling", "status"), [(6, 0), (5, 1)])
def test_a_folder_over_its_ceiling_fails(tmp_path: Path, ceiling: int, status: int) -> None:
    make_tree(tmp_path, ceiling)
    found = count(tmp_path, "--list")
    assert found.returncode == status
    assert found.stdout.splitlines()[:-1] == [
        "docs/code.cpp:1: beside",
        "docs/code.py:1: Whoever",
        "docs/code.py:2: so many",
        "docs/code.py:2: somebody",
        "docs/page.md:1: of it",
        "docs/page.md:1: for ever",
    ]


def test_each_example_names_a_file() -> None:
    assert len(PAIRS) == 27


@pytest.mark.parametrize(("name", "before", "after"), PAIRS)
def test_an_example_stands_in_its_file_as_it_is_shown(name: str, before: str, after: str) -> None:
    text = in_one_line(ROOT / name)
    assert after in text
    assert before not in text
