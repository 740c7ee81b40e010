"""The tokens of GGUF vocabularies are those of the makers' own tokenizers (`scripts/make_tokenizer_goldens.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from quire.compute.gguf.source import GgufFile
from quire.engine.text.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data" / "tokenizers"
ALIKE = {"tekken": {"gpt-4o"}}  # Tekken has no token of several digits, and none with an apostrophe in a word
VOCABULARIES = sorted(DATA.glob("*.json"))


def written(golden: dict[str, Any], path: Path) -> GgufFile:
    """Write the vocabulary of a golden as a GGUF file."""
    tokens = golden["tokens"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(golden["model"])
    writer.add_token_list(tokens)
    writer.add_token_types(golden.get("kinds") or [1] * len(tokens))
    if golden["model"] == "llama":
        writer.add_token_scores(golden["scores"])
        writer.add_unk_token_id(golden["ids"].index(0))
    else:
        writer.add_tokenizer_pre(golden["pre"])
        writer.add_token_merges([f"{tokens[left]} {tokens[right]}" for left, right in golden["merges"]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


def differences(golden: dict[str, Any], path: Path) -> list[tuple[str, list[int], list[int]]]:
    """Return the texts whose tokens differ: ours, and the makers'."""
    tokenizer = Tokenizer.open(written(golden, path), vocab_size=len(golden["tokens"]))
    found = []
    for text, expected in zip(golden["texts"], golden["expected"], strict=True):
        ours = [golden["ids"][token] for token in tokenizer.encode(text, add_special_tokens=False)]
        if ours != expected:
            found.append((text, ours, expected))
    return found


@pytest.mark.parametrize("path", VOCABULARIES, ids=[path.stem for path in VOCABULARIES])
def test_tokens_are_those_of_the_makers_tokenizer(path: Path, tmp_path: Path) -> None:
    golden = json.loads(path.read_text(encoding="utf-8"))
    assert len(golden["texts"]) >= 40
    assert differences(golden, tmp_path / "m.gguf") == []


def test_another_splitter_gives_other_tokens(tmp_path: Path) -> None:
    """The texts tell splitters apart. Those that llama.cpp brings along are plainer, and do not."""
    goldens = [json.loads(path.read_text(encoding="utf-8")) for path in VOCABULARIES]
    splitters = {golden["pre"] for golden in goldens if "pre" in golden}
    assert len(splitters) == 9
    for golden in goldens:
        if golden["model"] == "gpt2" and len(golden["texts"]) > 100:
            for other in splitters - {golden["pre"]} - ALIKE.get(golden["pre"], set()):
                assert differences(golden | {"pre": other}, tmp_path / "m.gguf"), (golden["pre"], other)
