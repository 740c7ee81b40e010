"""Someone who knows the literature finds its concepts here by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "quire"

MAX_FILES_OF_ENGINE = 14

CONCEPTS = {
    "block": "memory/block.py",
    "block table": "memory/block_table.py",
    "block pool": "memory/block_pool.py",
    "free list": "memory/free_list.py",
    "reference count": "memory/block_pool.py",
    "copy-on-write": "memory/copy_on_write.py",
    "prefix cache": "memory/prefix/__init__.py",
    "eviction": "memory/eviction/__init__.py",
    "preemption": "scheduler/preemption.py",
    "swap": "memory/swap.py",
    "scheduler": "scheduler/scheduler.py",
    "continuous batching": "scheduler/scheduler.py",
    "chunked prefill": "scheduler/scheduler.py",
    "paged attention": "compute/reference/attention.py",
}


def named_by(path: Path, concept: str) -> bool:
    """Whether the file name or the first line has the words of a concept."""
    words = re.compile(rf"\b{pattern_of(concept)}\b", re.IGNORECASE)
    first_line = path.read_text(encoding="utf-8").partition("\n")[0]
    return any(words.search(text) is not None for text in (path.stem.replace("_", " "), first_line))


def pattern_of(concept: str) -> str:
    return concept.replace("-", "[ -]")


@pytest.mark.parametrize("concept", CONCEPTS)
def test_a_concept_is_found_by_name(concept: str) -> None:
    path = PACKAGE / CONCEPTS[concept]
    assert named_by(path, concept)
    assert re.search(pattern_of(concept), path.read_text(encoding="utf-8"), re.IGNORECASE), "git grep -i finds nothing"


def test_a_name_that_is_missing_would_be_noticed(tmp_path: Path) -> None:
    path = tmp_path / "free_blocks.py"
    path.write_text('"""BlockPool: the allocator.\n\nIt keeps a free list, for copy-on-write."""\n', encoding="utf-8")
    assert not any(named_by(path, concept) for concept in ("block", "free list", "copy-on-write", "reference count"))
    assert named_by(path.rename(tmp_path / "free_list.py"), "free list")


def test_the_engine_folder_can_be_taken_in_at_a_glance() -> None:
    files = [path.name for path in (PACKAGE / "engine").iterdir() if path.is_file()]
    assert "core.py" in files
    assert len(files) <= MAX_FILES_OF_ENGINE, "put it in a room: engine/text, engine/process or engine/records"
