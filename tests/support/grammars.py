"""Compilers of grammars over tiny vocabularies, and masks as sets."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from quire.compute.arrays import MaskArray
from quire.compute.grammar import GrammarCompiler, GrammarLimits, Vocabulary


def vocabulary_of(library: Tokenizer, *, vocab_size: int = 0, eos_token_ids: frozenset[int]) -> Vocabulary:
    """Return the tokens of a tokenizer of the library; 0: of just its ids."""

    def read() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(library.to_str())
        return found

    size = vocab_size or library.get_vocab_size(with_added_tokens=True)
    return Vocabulary(read, vocab_size=size, eos_token_ids=eos_token_ids)


def compiler_for(
    library: Tokenizer,
    *,
    vocab_size: int = 0,
    eos_token_ids: frozenset[int],
    limits: GrammarLimits | None = None,
    max_cache_bytes: int = 64 << 20,
) -> GrammarCompiler:
    """Return a compiler over a tokenizer of the library; 0: of just its ids."""
    vocabulary = vocabulary_of(library, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    return GrammarCompiler(vocabulary, limits=limits, max_cache_bytes=max_cache_bytes)


def tokens_of(mask: bytes | MaskArray) -> set[int]:
    """Return the tokens whose bit is set."""
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist())
