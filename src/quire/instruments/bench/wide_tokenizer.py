"""Makes a tokenizer as large as those of real models, because the cost of masks depends on the tokens.

A vocabulary of bytes and numbered words would make masks too cheap: the first letters distinguish nearly all of its
tokens. So this one is trained on the Python sources that every machine with quire has: a byte-level BPE that splits
texts like Qwen's tokenizers. If that gives too few tokens, the same words are added in other forms (Capitals, UPPER
CASE, after a space), as in real vocabularies. Nothing is random: an interpreter always gives the same vocabulary.
"""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Final

from quire.engine.text.tokenizer_files import TOKENIZER_FILE

END: Final = "<|endoftext|>"
SPACE: Final = "Ġ"
MAX_TOKEN_LENGTH: Final = 16
"""Longer words in sources are numbers and keys, not words."""

MAX_CORPUS_CHARACTERS: Final = 32_000_000
PIECES: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def write_wide_tokenizer(folder: Path, vocab_size: int, *, max_corpus_characters: int = MAX_CORPUS_CHARACTERS) -> None:
    """Write a tokenizer of exactly this many tokens; the last token ends a text. Takes some seconds."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=1,
        max_token_length=MAX_TOKEN_LENGTH,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(max_corpus_characters), trainer)
    found = json.loads(tokenizer.to_str())
    words = found["model"]["vocab"]
    for word in islice(_other_words(words), vocab_size - 1 - len(words)):
        words[word] = len(words)
    end = {"id": vocab_size - 1, "content": END, "special": True, "normalized": False}
    found["added_tokens"] = [{**end, "single_word": False, "lstrip": False, "rstrip": False}]
    (folder / TOKENIZER_FILE).write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    settings = {"eos_token_id": vocab_size - 1}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _corpus(max_characters: int) -> Iterator[str]:
    """Yield sources of the standard library, in the order of their names, up to this many characters."""
    left, root = max_characters, Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if left > 0 and "site-packages" not in path.parts:
            text = path.read_text(encoding="utf-8", errors="replace")[:left]
            left -= len(text)
            yield text


def _other_words(words: Iterable[str]) -> Iterator[str]:
    """Yield endless new words: other forms of the given words, then numbered words."""
    known = set(words)
    plain = [word.removeprefix(SPACE) for word in known if word.isascii() or word.startswith(SPACE)]
    letters = sorted({word for word in plain if word.isalpha() and word.isascii()})
    written = (form for word in letters for form in (SPACE + word, word.capitalize(), SPACE + word.capitalize()))
    numbered = (f"{SPACE}w{number}" for number in count())
    for source in (written, (word.upper() for word in letters), numbered):
        for word in source:
            if word not in known:
                known.add(word)
                yield word
