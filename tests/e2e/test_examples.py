"""Every file in examples/ runs on its own, quickly, and prints what it promises."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 60
MAX_LINES_OF_AN_ENGINE = 80

FACTS = {
    "ask_the_guide.py": [
        "What is a block table?",
        "What is prefix caching?",
        "the same answers again, their prompts from the cache",
    ],
    "beam_search.py": ["   A …'A block table'", "   B …'A layer with'"],
    "capacity_plan.py": [
        "      int8      int8             373.4          2,194",
        "narrower types give up to 2.0 times the tokens, on the same card",
    ],
    "eviction_policy.py": ["hit rate with LRU: 4%, with LFU: 25%"],
    "many_callers.py": ["7 callers read everything, 1 left early, 0 blocks in use"],
    "openai_classes.py": [
        "whole:    parts=[Part(kind='pool', count=30), Part(kind='table', count=14)] is_shared=False",
    ],
    "openai_client.py": [
        "3 texts, 24 tokens",
        "16 of 17 tokens of the prompt came from the cache",
        "temperature is -1.0; allowed: a number from 0 to 1e+06",
    ],
    "paging_by_hand.py": [
        "block 2: a4 a5 a6 a7",
        "table of a: [0, 2, 4] reads a0 a1 a2 a3 a4 a5 a6 a7 a8 a9",
        "table of b: [1, 3] reads b0 b1 b2 b3 b4 b5 b6",
        "5 blocks used, 3 of their slots empty, 3 free",
    ],
    "parallel_sampling.py": ["the texts are the same"],
    "prefix_sharing.py": [
        "without sharing: 128 blocks at most, 1664 prompt tokens computed",
        "with sharing:    35 blocks at most, 176 prompt tokens computed, 1488 taken from the cache (89%)",
        "the answers are the same, to the token",
    ],
    "read_a_run.py": ["8 requests, 0 tokens of their prompts hit the cache"],
    "structured_output.py": ["refused: Default retriever does not fetch resources"],
    "tool_calls.py": ["temperature(Oslo)"],
    "simulated_traffic.py": [
        "round_robin      300 turns, 48% of their prompts from a cache",
        "least_work       300 turns, 78% of their prompts from a cache",
    ],
    "whole_engine.py": [
        "step  0: tokens of a 12 (2 blocks)",
        "step  1: tokens of a 5, b 7 (4 blocks)",
        "a: 0 tokens cached; A block table is the list of block ids that a sequence holds. It m",
        "c: 16 tokens cached; A block table is the list of block ids that a sequence holds. It m",
    ],
    "shared_chat.py": ["Ada: What is a block table?   (46 tokens, 0 of them from the cache)"],
}


def test_every_example_is_known() -> None:
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(FACTS)


@pytest.mark.parametrize("name", sorted(FACTS))
def test_example_runs_and_says_what_it_promises(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process, where warnings are errors too, and libraries need not be imported again."""
    path = EXAMPLES / name
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (MAX_LINES_OF_AN_ENGINE if name == "whole_engine.py" else MAX_LINES)
    assert text.startswith('"""')
    assert "\nassert " in text
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    printed = capfd.readouterr()
    assert printed.err == ""
    lines = printed.out.splitlines()
    for fact in FACTS[name]:
        assert fact in lines


def test_an_example_without_its_library_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    needing = sorted(path for path in EXAMPLES.glob("*.py") if "import openai" in path.read_text(encoding="utf-8"))
    assert len(needing) == 3
    assert "openai" in (EXAMPLES / "requirements.txt").read_text(encoding="utf-8")
    monkeypatch.setitem(sys.modules, "openai", None)
    for path in needing:
        with pytest.raises(SystemExit, match=r"pip install -r examples/requirements\.txt$"):
            runpy.run_path(str(path), run_name="__main__")
