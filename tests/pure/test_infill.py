"""Prompts to fill in: the tokens of each family of models, and texts that models without them refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from quire.compute.models.source import ModelFolder
from quire.engine.text.infill import FILE, MARKS, PADDING, REPOSITORY, OtherFile, infill_format
from quire.engine.text.tokenizer import Tokenizer
from support.tiny_tokenizer import byte_level, write_tokenizer

CONTROL = ("<|im_start|>", "<|im_end|>")


def tokenizer_with(folder: Path, marks: tuple[str, ...], *, special: bool = True) -> Tokenizer:
    library = byte_level(control=CONTROL)
    library.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return Tokenizer.open(ModelFolder(write_tokenizer(folder, library, {})), vocab_size=400)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("marks", MARKS)
def test_a_prompt_has_the_tokens_of_the_family(tmp_path: Path, marks: tuple[str, ...], special: bool) -> None:
    tokenizer = tokenizer_with(tmp_path, (*marks, FILE[0], PADDING[0]), special=special)
    found = infill_format(tokenizer)
    assert found is not None
    prefix, suffix, middle = map(tokenizer.id_of, marks)
    text = found.prompt("def f(", "):\n")
    assert tokenizer.encode(text) == [
        prefix,
        *tokenizer.encode("def f("),
        suffix,
        *tokenizer.encode("):\n"),
        middle,
    ]
    assert found.end_token_ids == tuple(sorted(map(tokenizer.id_of, (*marks, FILE[0], PADDING[0]))))  # type: ignore[type-var]


@pytest.mark.parametrize("marks", [(), MARKS[0][:2], CONTROL])
def test_a_model_without_all_three_tokens_cannot_fill_in(tmp_path: Path, marks: tuple[str, ...]) -> None:
    assert infill_format(tokenizer_with(tmp_path, marks)) is None


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            ("<|repo_name|>", "<|file_sep|>"),
            "<|repo_name|>unnamed\n<|file_sep|>a.py\nA<|file_sep|>b.py\nB<|file_sep|>unnamed\n",
        ),
        (("<|file_sep|>",), "<|file_sep|>a.py\nA<|file_sep|>b.py\nB"),
        ((), "\n\n--- snippet ---\n\nA\n\n--- snippet ---\n\nB"),
    ],
)
def test_other_files_come_first(tmp_path: Path, more: tuple[str, ...], expected: str) -> None:
    found = infill_format(tokenizer_with(tmp_path, (*MARKS[0], *more)))
    assert found is not None
    own = "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    assert found.prompt("x", "y", [OtherFile("a.py", "A"), OtherFile("b.py", "B")]) == expected + own
    assert found.prompt("x", "y") == own
    assert set(more) <= {*REPOSITORY, *FILE}
