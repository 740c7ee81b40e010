"""The site that `make docs` builds: every page has one place in it, and every link between pages a target."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import quire
from quire.core.config import EngineConfig
from quire.serve.config import ServerConfig

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "source"
    subprocess.run([sys.executable, ROOT / "scripts/site_pages", folder], check=True)
    return folder


def test_every_page_has_one_place_in_the_navigation(pages: Path) -> None:
    trees = re.findall(r"```\{toctree\}\n(?::.*\n)*\n((?:[^`\n]+\n)*)```", (pages / "index.md").read_text())
    placed = Counter(page for tree in trees for page in tree.split())
    every = {path.relative_to(pages).with_suffix("").as_posix() for path in pages.rglob("*.md")} - {"index"}
    assert set(placed) == every
    assert set(placed.values()) == {1}
    assert {"docs/tutorial", "docs/how-to/serve", "docs/design/block-table", "reference/http"} <= every


def test_every_link_between_pages_has_a_target(pages: Path) -> None:
    for path in pages.rglob("*.md"):
        text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
        for link in LINK.findall(text):
            assert (path.parent / link).is_file(), f"{path.relative_to(pages)} links to {link}"


def test_the_reference_has_every_name_and_setting(pages: Path) -> None:
    python, settings = ((pages / f"reference/{name}.md").read_text() for name in ("python", "settings"))
    for name in quire.__all__:
        assert f".. autoclass:: quire.{name}\n" in python
    for kind in (EngineConfig, ServerConfig):
        for name in kind.__dataclass_fields__:
            assert f"| `--{name.replace('_', '-')}` |" in settings
    http = (pages / "reference/http.md").read_text()
    assert "## POST /v1/chat/completions" in http and "| `messages` | array | required |" in http
