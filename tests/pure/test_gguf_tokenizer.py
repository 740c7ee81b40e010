"""The tokenizer of a GGUF file gives the tokens of the library that its vocabulary was made with."""

from __future__ import annotations

import io
import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from quire.compute.gguf.source import GgufFile
from quire.compute.gguf.tokenizer import SPLITTERS
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.generation import GenerationDefaults
from quire.compute.models.source import ModelFolder
from quire.core.errors import CheckpointError, InvalidRequestError
from quire.core.model_files import SPACE_AT_END
from quire.engine.text.tokenizer import Tokenizer
from quire.engine.text.tokenizer_files import LONG_TEXT, long_texts_in
from support.growth import is_linear

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")
LINES = [line for name in PAGES for line in (ROOT / name).read_text().split("\n")]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def strange_texts(count: int, seed: int) -> list[str]:
    """Return texts that no vocabulary expects; none spells a control token out, which would be that token."""
    drawn = random.Random(seed)
    return ["".join(drawn.choices("ab é😀\n\t  the 123\u2581<>'r漢", k=drawn.randrange(30))) for _ in range(count)]


def write(
    path: Path, kind: str, tokens: list[str], kinds: list[int], *, architecture: str = "llama", **settings: Any
) -> GgufFile:
    """Write a file of a tokenizer alone; `settings` are those of `tokenizer.ggml`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in settings.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return GgufFile(path)


@pytest.fixture(scope="module", params=[True, False], ids=["with a space before", "without"])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tokenizer]:
    """A SentencePiece model, and the tokenizer of a GGUF file that has its pieces."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        sentence_iterator=iter([line for line in LINES if line]),
        model_writer=made,
        vocab_size=1200,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=request.param,
        remove_extra_whitespaces=False,
        split_digits=True,
        user_defined_symbols=["<start>", "<end>"],
        minloglevel=2,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())  # type: ignore[call-arg]
    ids = range(theirs.vocab_size())
    kinds = [
        UNKNOWN if theirs.is_unknown(i) else CONTROL if theirs.is_control(i) else BYTE if theirs.is_byte(i)
        else USER_DEFINED if theirs.id_to_piece(i) in ("<start>", "<end>") else NORMAL
        for i in ids
    ]  # fmt: skip
    file = write(
        tmp_path_factory.mktemp("pieces") / "model.gguf",
        "llama",
        [theirs.id_to_piece(i) for i in ids],
        kinds,
        scores=[theirs.get_score(i) for i in ids],
        unknown_token_id=theirs.unk_id(),
        bos_token_id=theirs.bos_id(),
        add_space_prefix=request.param,
    )
    return theirs, Tokenizer.open(file, vocab_size=theirs.vocab_size())


def test_pieces_are_those_of_sentencepiece(pieces: tuple[Any, Tokenizer]) -> None:
    theirs, ours = pieces
    for text in [*LINES[:400], *strange_texts(1500, 1)]:
        tokens = ours.encode(text, add_special_tokens=False)
        assert tokens == theirs.encode(text)
        assert ours.decode(tokens) == theirs.decode(tokens)


def test_a_text_begins_with_the_token_that_begins_texts(pieces: tuple[Any, Tokenizer]) -> None:
    theirs, ours = pieces
    assert ours.encode("block") == [theirs.bos_id(), *theirs.encode("block")]


def test_special_tokens_of_phi_3_take_the_space_after_them_along(tmp_path: Path) -> None:
    """Its chat template has the end of a line after each, which the makers' tokenizer drops; no GGUF file says so."""
    tokens = ["<unk>", "<s>", "<0x0A>", "\u2581", "a", "\u2581a", "<|user|>", "<|endoftext|>"]
    kinds = [UNKNOWN, CONTROL, BYTE, NORMAL, NORMAL, NORMAL, CONTROL, CONTROL]
    expected = {"llama": [6, 3, 2, 4, 7, 3, 2, 4], "phi3": [6, 5, 7, 3, 2, 4]}
    for architecture, ids in expected.items():
        path = tmp_path / f"{architecture}.gguf"
        file = write(path, "llama", tokens, kinds, architecture=architecture, scores=[-1.0] * 8, bos_token_id=1)
        ours = Tokenizer.open(file, vocab_size=8)
        assert ours.encode("<|user|>\na<|endoftext|>\na", add_special_tokens=False) == ids


def merged_pieces() -> tokenizers.Tokenizer:
    """Return a tokenizer with the form of Gemma 4's: pieces with a mark for each space, and a list of merges."""
    library = tokenizers.Tokenizer(models.BPE())
    library.normalizer = normalizers.Replace(" ", "\u2581")  # type: ignore[assignment]
    marks = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1400, special_tokens=marks, show_progress=False, max_token_length=12)
    library.train_from_iterator(["\n".join(LINES[start : start + 4]) for start in range(0, len(LINES), 4)], trainer)
    model = json.loads(library.to_str())["model"]
    pairs = [tuple(merge) for merge in model["merges"]]
    bpe = models.BPE(model["vocab"], pairs, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    whole = tokenizers.Tokenizer(bpe)
    whole.normalizer = library.normalizer
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    whole.decoder = decoders.Sequence(steps)  # type: ignore[assignment]
    return whole


@pytest.mark.parametrize("settings", [{}, {"pre": "gemma4", "scores": [], "add_bos_token": False}])
def test_pieces_with_merges_are_those_of_gemma_4(settings: dict[str, Any], tmp_path: Path) -> None:
    """Ollama calls them by `pre`, as pieces whose scores say nothing; some files say that no text begins with <bos>."""
    theirs = merged_pieces()
    model = json.loads(theirs.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<turn|>", "<|tool_response>"]
    kinds = [CONTROL] * 4 + [BYTE] * 256 + [NORMAL] * (len(tokens) - 262) + [CONTROL, USER_DEFINED]
    given = {"merges": [" ".join(merge) for merge in model["merges"]], "unknown_token_id": 3, "bos_token_id": 2}
    if "scores" in settings:
        given["scores"] = [float(place) for place in range(len(tokens))]
    file = write(
        tmp_path / "m.gguf",
        "llama" if settings else "gemma4",
        tokens,
        kinds,
        **{**settings, **given, "eos_token_id": 1},
    )
    ours = Tokenizer.open(file, vocab_size=len(tokens))
    texts = [*LINES[:400], *strange_texts(1500, 3), "\n" * 40, "\n\n\n  \n"]
    for text in texts:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids) == theirs.decode(ids) == text.replace("\u2581", " ")
    assert ours.encode("block") == [2, *theirs.encode("block").ids]
    assert file.json_object("generation_config.json") == {"eos_token_id": [1, len(tokens) - 2, len(tokens) - 1]}


def test_pieces_with_merges_of_a_gemma_3n_of_ollama_and_its_chats(tmp_path: Path) -> None:
    """Such a file calls its pieces byte-level BPE, and has no chat template."""
    theirs = merged_pieces()
    model = json.loads(theirs.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<start_of_turn>", "<end_of_turn>"]
    kinds = [CONTROL] * 4 + [BYTE] * 256 + [NORMAL] * (len(tokens) - 262) + [CONTROL] * 2
    merges = [" ".join(merge) for merge in model["merges"]]
    marks = {"unknown_token_id": 3, "bos_token_id": 2, "eos_token_id": 1, "add_bos_token": True}
    file = write(
        tmp_path / "m.gguf", "gpt2", tokens, kinds, architecture="gemma3n", pre="default", merges=merges, **marks
    )
    ours = Tokenizer.open(file, vocab_size=len(tokens))
    for text in [*LINES[:100], *strange_texts(300, 3)]:
        assert ours.encode(text) == [2, *theirs.encode(text).ids]
    assert file.json_object("generation_config.json") == {"eos_token_id": [1, len(tokens) - 1]}
    turns = [("system", "Be brief."), ("user", " Hi\n"), ("assistant", "Hello."), ("user", "Bye")]
    chat = [{"role": role, "content": text} for role, text in turns]
    prompt = ours.encode_chat(chat)
    assert prompt[0] == 2 and prompt.count(2) == 1
    assert ours.decode(prompt, skip_special_tokens=False) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello.<end_of_turn>\n"
        "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(InvalidRequestError, match="roles of messages must alternate"):
        ours.encode_chat(chat[:2] + chat[1:2])


def byte_level_vocabulary() -> tuple[list[str], list[list[str]]]:
    """Return tokens and merges of a byte-level BPE."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(LINES, trainer)
    model = json.loads(library.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), model["merges"]


TOKENS, MERGES = byte_level_vocabulary()
WORDS = {  # what each splitter makes of a text, as its makers' own tokenizers do
    "gpt-2": ("it's 12345 days\n\n  on", ["it", "'s", " 12345", " days", "\n\n ", " on"]),
    "smollm": ("it's 123 days", ["it", "'s", " ", "1", "2", "3", " days"]),
    "llama-bpe": ("IT'S 12345 days!\n\nnow", ["IT", "'S", " ", "123", "45", " days", "!\n\n", "now"]),
    "glm4": ("IT'S 12345 days!\n\nnow", ["IT", "'S", " ", "123", "45", " days", "!\n\n", "now"]),
    "chatglm-bpe": ("Ünder 1234", ["Ünder", " ", "123", "4"]),
    "qwen2": ("IT'S 123 (days)", ["IT", "'S", " ", "1", "2", "3", " (", "days", ")"]),
    "qwen35": ("IT'S 12 (किताब)", ["IT", "'S", " ", "1", "2", " (", "किताब", ")"]),
    "phi-2": ("it's 12345 days\n\n  on", ["it", "'s", " 12345", " days", "\n\n ", " on"]),
    "falcon": ("it's  12345 days", ["it", "'", "s", " ", " ", "123", "45", " days"]),
    "deepseek-v3": ("it's 12345 days!\n\n你好now", ["it", "'s", " ", "123", "45", " days", "!\n\n", "你好", "now"]),
    "seed-coder": ("a12 !!\n\n b", ["a", "1", "2", " !!", "\n\n", " b"]),
    "tekken": ("camelCase 12 it's/\n", ["camel", "Case", " ", "1", "2", " it", "'s", "/\n"]),
}


@pytest.mark.parametrize("pre", WORDS)
def test_words_are_split_by_the_name_of_the_splitter(pre: str, tmp_path: Path) -> None:
    merges = [" ".join(merge) for merge in MERGES]
    path = tmp_path / "m.gguf"
    file = write(path, "gpt2", [*TOKENS, "<|im_end|>"], [1] * len(TOKENS) + [CONTROL], pre=pre, merges=merges)
    library = tokenizers.Tokenizer.from_str(file.text("tokenizer.json"))
    assert library.pre_tokenizer is not None and library.decoder is not None
    text, words = WORDS[pre]
    split = [piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(text)]
    plain = decoders.ByteLevel()
    assert [plain.decode([piece]) for piece in split] == words
    ours = Tokenizer.open(file, vocab_size=len(TOKENS) + 1)
    for strange in strange_texts(200, 2):
        assert ours.decode(ours.encode(strange, add_special_tokens=False)) == strange
    assert ours.special_token_ids == {len(TOKENS)}
    assert file.json_object("generation_config.json") == {"eos_token_id": [len(TOKENS)]}


def test_no_merge_is_taken_for_a_comment(tmp_path: Path) -> None:
    tokens = ["#version", "s", "#versions"]
    file = write(tmp_path / "m.gguf", "gpt2", tokens, [1] * 3, pre="gpt-2", merges=["#version s"])
    model = json.loads(tokenizers.Tokenizer.from_str(file.text("tokenizer.json")).to_str())["model"]
    assert model["merges"] == [["#version", "s"]]


def test_the_end_of_a_message_ends_no_answer_of_gpt_oss_and_solar_open(tmp_path: Path) -> None:
    merges, begin = [" ".join(merge) for merge in MERGES], len(TOKENS)
    marks = {
        "phi": (["<|end|>"], [0]),
        "gpt-oss": (["<|end|>", "<|channel|>", "<|call|>", "<|return|>"], [2, 3]),
        "solar": (["<|end|>", "<|calls|>", "<|flush|>"], [1, 2]),
        "llama": (["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>"], [0, 1, 2]),
    }
    for path, (added, ends) in marks.items():
        kinds = [1] * begin + [CONTROL] * len(added)
        file = write(tmp_path / f"{path}.gguf", "gpt2", [*TOKENS, *added], kinds, pre="llama-bpe", merges=merges)
        assert file.json_object("generation_config.json") == {"eos_token_id": [begin + end for end in ends]}, path


def test_the_makers_sampling_defaults_are_read(tmp_path: Path) -> None:
    """A file has numbers of 32 bits, and means the decimals that they were written from."""
    written = {"temp": 0.95, "top_p": 0.8, "min_p": 0.05, "penalty_repeat": 1.05}
    for last_n, window in ((None, 64), (32, 32), (-1, 0)):
        writer = gguf.GGUFWriter(tmp_path / f"{window}.gguf", "llama")
        writer.add_token_list(TOKENS)
        writer.add_int32("general.sampling.top_k", 20)
        for name, number in written.items():
            writer.add_float32(f"general.sampling.{name}", number)
        if last_n is not None:
            writer.add_int32("general.sampling.penalty_last_n", last_n)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        read = GenerationDefaults.read(ConfigFile.read(GgufFile(tmp_path / f"{window}.gguf"), "generation_config.json"))
        assert read == GenerationDefaults(0.95, 0.8, 20, 0.05, repetition_penalty=1.05, penalty_window=window)


def test_a_call_ends_an_answer_of_gemma_4_and_no_text_has_its_marks_of_images(tmp_path: Path) -> None:
    """Files declare the mark of a result as a token that clients see, and name one end."""
    merges, begin = [" ".join(merge) for merge in MERGES], len(TOKENS)
    marks, kinds = ["<eos>", "<|tool_response>", "<turn|>"], [CONTROL, USER_DEFINED, CONTROL]
    settings: Any = {"pre": "llama-bpe", "merges": merges, "eos_token_id": begin, "suppress_tokens": [9, 5]}
    file = write(tmp_path / "gemma.gguf", "gpt2", [*TOKENS, *marks], [1] * begin + kinds, **settings)
    ends = [begin, begin + 1, begin + 2]
    assert file.json_object("generation_config.json") == {"eos_token_id": ends, "suppress_tokens": [9, 5]}


@pytest.mark.parametrize(
    ("pre", "begins"),
    [
        ("llama3", True),
        ("pixtral", True),
        ("tekken", True),
        ("dbrx", False),
        ("glm4", False),
        ("qwen2", False),
        ("gpt-2", False),
    ],
)
def test_texts_begin_as_those_of_the_family_unless_the_file_says_otherwise(
    pre: str, begins: bool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"pre": pre, "merges": ["a b"], "bos_token_id": 3}
    tokens, kinds = ["a", "b", "ab", "<s>"], [1, 1, 1, CONTROL]
    for stated in (None, True, False):
        given = settings if stated is None else settings | {"add_bos_token": stated}
        file = write(tmp_path / "m.gguf", "gpt2", tokens, kinds, **given)
        expected = [3, 2] if (begins if stated is None else stated) else [2]
        assert Tokenizer.open(file, vocab_size=4).encode("ab") == expected


GOOD: dict[str, Any] = {
    "pre": "gpt-2",
    "merges": ["a b"],
    "tokens": ["a", "b", "ab"],
    "kinds": [1, 1, 1],
    "kind": "gpt2",
}
BROKEN = {
    "an unknown kind": ({"kind": "rwkv"}, "tokenizer.ggml.model is 'rwkv'; allowed: gpt2 (byte-level BPE), ll"),
    "an unknown splitter": ({"pre": "dialect"}, "tokenizer.ggml.pre is 'dialect'; allowed: one of gpt-2"),
    "no merges": ({"kind": "gemma4", "merges": 3}, "tokenizer.ggml.merges is 3; allowed: a list of strings"),
    "a torn merge of pieces": ({"kind": "gemma4", "merges": ["ab"]}, "pairs of tokens with one space between them"),
    "a torn merge": ({"merges": ["ab"]}, "pairs of tokens with one space between them"),
    "a token twice": ({"tokens": ["a", "a", "b"]}, "a list of distinct tokens"),
    "a token without a type": ({"kinds": [1, 1]}, "a list of 3 types, one for each token"),
    "a piece of a megabyte": (
        {"kind": "llama", "scores": [0.5] * 3, "tokens": ["a", "b", "a" * (1 << 20)]},
        "pieces of at most 512 characters",
    ),
    "scores of another length": ({"kind": "llama", "scores": [0.5]}, "a list of 3 numbers, one for each token"),
    "scores in words": (
        {"kind": "llama", "scores": ["a", "b", "c"]},
        "tokenizer.ggml.scores is ['a', 'b', 'c']; allowed: a list of 3 numbers",
    ),
    "a named token beyond the end": (
        {"eos_token_id": 3},
        "tokenizer.ggml.eos_token_id is 3; allowed: an integer from 0 to 2",
    ),
}


def test_a_token_that_a_vocabulary_lacks_may_be_minus_one(tmp_path: Path) -> None:
    settings = {"pre": "gpt-2", "merges": ["a b"], **dict.fromkeys(("padding_token_id", "eot_token_id"), (1 << 32) - 1)}
    file = write(tmp_path / "m.gguf", "gpt2", ["a", "b", "ab"], [1] * 3, **settings)
    assert Tokenizer.open(file, vocab_size=3).encode("ab") == [2]
    assert file.json_object("generation_config.json") == {}


@pytest.mark.parametrize("name", BROKEN)
def test_a_vocabulary_that_is_broken_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    changes, said = BROKEN[name]
    settings = GOOD | changes
    kind, tokens, kinds = (settings.pop(key) for key in ("kind", "tokens", "kinds"))
    file = write(tmp_path / "x.gguf", kind, tokens, kinds, **settings)
    with pytest.raises(CheckpointError) as refused:
        Tokenizer.open(file, vocab_size=3)
    assert said in str(refused.value) and "x.gguf" in str(refused.value)


def test_pieces_with_endless_merges_are_refused_before_the_merges_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.compute.gguf.tokenizer.MAX_TOKENIZER_BYTES", 1 << 20)
    tokens = [letter * length for letter in "abcdefgh" for length in range(1, 257)]  # 38 MB of merges
    file = write(tmp_path / "x.gguf", "llama", tokens, [1] * len(tokens), scores=[0.5] * len(tokens))
    assert file.text("tokenizer_config.json")  # which reads its header
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"pieces whose merges fit in a tokenizer\.json of 1 MiB"):
        file.text("tokenizer.json")
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 4 << 20


def pieces_of(pattern: str, text: str) -> list[Any]:
    split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return split.pre_tokenize_str(text)  # type: ignore[no-any-return]


PATTERNS = {pattern: name for name, splitter in SPLITTERS.items() for pattern in splitter.patterns}
RUNS = {
    "spaces": " ",
    "tabs": "\t",
    "line ends": "\n",
    "both line ends": "\r\n",
    "other spaces": "\u00a0\u3000",
    "digits": "7",
    "marks": "\u0301",
    "signs": "!",
    "slashes": "/",
    "small letters": "a",
    "large letters": "A",
    "letters without case": "漢",
    "apostrophes": "'s",
    "a mixture": "Aa 7\n !\u0301",
}


@pytest.mark.parametrize("pattern", PATTERNS, ids=PATTERNS.values())
def test_splitting_takes_time_in_proportion_to_the_text(pattern: str) -> None:
    for name, run in RUNS.items():
        for end in ("", "1", "a", " "):
            text = run * (4096 // len(run))
            assert is_linear(lambda size, text=text, end=end: pieces_of(pattern, text[:size] + end), 1024), (name, end)


def test_space_at_the_end_is_split_off_as_by_the_slow_pattern() -> None:
    drawn = random.Random(7)
    for _ in range(3000):
        text = "".join(drawn.choices("  \t\n\r\v\u0085\u00a0\u2028\u3000a1!漢", k=drawn.randrange(12)))
        assert pieces_of(SPACE_AT_END, text) == pieces_of(r"\s+$", text), repr(text)


def test_a_folder_with_the_slow_pattern_gets_the_fast_one(tmp_path: Path) -> None:
    vocabulary = {token: index for index, token in enumerate([*TOKENS, r"\s+$"])}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge) for merge in MERGES]))
    steps = [
        pre_tokenizers.Split(tokenizers.Regex(r"\s+$"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    library.pre_tokenizer = pre_tokenizers.Sequence(steps)  # type: ignore[assignment]
    library.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    library.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.open(ModelFolder(tmp_path), vocab_size=len(vocabulary))
    for text in strange_texts(300, 2):
        assert ours.encode(text) == library.encode(text).ids
    assert ours.token_text(len(TOKENS)) == r"\s+$"
    assert is_linear(lambda size: ours.encode(" " * size + "1"), 2048)


def test_long_texts_are_looked_for_in_time_in_proportion_to_the_file() -> None:
    assert is_linear(lambda size: LONG_TEXT.findall((b"a" * size + b'","') * 50), 1000)
    assert [len(each) for each in long_texts_in(b'{"a": "' + b"b" * 5000 + b'", "c": "d"}')] == [5000]
    for place in range(0, 2048, 31):
        for length, count in ((4095, 0), (4096, 1)):
            assert len(long_texts_in(b'"' * (place + 1) + b"b" * length + b'"')) == count


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("afmoe", "a1234567 89", ["a", "1", "234", "567", " ", "89"]),
        ("afmoe", "汉字ไทย x+123456", ["汉字ไทย", " x", "+", "123", "456"]),
        ("exaone-moe", "It's a b,  12\n", ["It", "'s", " a b", ",", " ", " ", "1", "2", "\n"]),
        ("jais-2", "a1234       b\n", ["a", "123", "4", "    ", "  ", " b", "\n"]),
        ("minimax-m2", "aB's 1234", ["a", "B's", " ", "123", "4"]),
        ("youtu", "한国\uff0caB 12", ["한", "国", "\uff0c", "a", "B", " ", "1", "2"]),
    ],
)
def test_words_of_recent_splitters(name: str, text: str, words: list[str]) -> None:
    split = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITTERS[name].patterns]
    )
    assert [word for word, _ in split.pre_tokenize_str(text)] == words
