"""GGUF files of encoders: vectors of the folders that they were made from, to the bit, and their tokenizers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from quire import LLM
from quire.compute.gguf.encoders import word_pieces
from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.settings import config_of, dense_config_of
from quire.compute.gguf.source import GgufFile
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.gguf.tokenizer import tokenizer_config_of, tokenizer_json_of
from quire.compute.models import read_model
from quire.compute.models.pooling import IDENTITY
from quire.compute.models.source import ModelFolder
from quire.compute.weights.decoder_weights import WeightReader
from quire.core.errors import CheckpointError, InvalidConfigError
from support.gguf_answers import spec_of
from support.gguf_models import GgufWriting
from support.tiny_bert import IDS, TEXT, WORDS, tokenizer_json, write_tiny_bert, write_tiny_reranker
from support.tiny_checkpoint import write_model_weights

TEXTS = [[(7 * i * i + 3 * i + n) % 120 + 5 for i in range(n)] for n in (1, 40, 70)]
ROPE = {"rope_type": "default", "rope_theta": 1000.0}
NEAR, FAR = "sliding_attention", "full_attention"
GEMMA: dict[str, object] = {
    **{"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True, "head_dim": 16, "rms_norm_eps": 1e-6},
    **{"num_key_value_heads": 2, "sliding_window": 24, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "rope_parameters": {FAR: {**ROPE, "rope_theta": 1e6}, NEAR: {**ROPE, "rope_theta": 1e4}},
}
MODERN: dict[str, object] = {
    **{"norm_eps": 1e-5, "local_attention": 24, "global_attn_every_n_layers": 2, "hidden_activation": "silu"},
    "rope_parameters": {FAR: {**ROPE, "rope_theta": 1.6e5}, NEAR: {**ROPE, "rope_theta": 1e4}},
}
FORMS: dict[str, dict[str, object]] = {
    "bert": {},
    "xlm-roberta": {"architectures": ["XLMRobertaModel"], "type_vocab_size": 1, "pad_token_id": 1},
    "distil-bert": {"architectures": ["DistilBertModel"]},
    "euro-bert": {
        **{"architectures": ["EuroBertModel"], "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
        "rope_parameters": ROPE,
    },
    "jina": {"architectures": ["JinaEmbeddingsV3Model"], "rope_parameters": {**ROPE, "rope_theta": 2e4}},
    "modern-bert": {"architectures": ["ModernBertModel"], **MODERN},
    "nomic": {"architectures": ["NomicBertModel"], "rope_parameters": ROPE},
    "gemma": GEMMA,
}
MARKED = [word if word[0] == "[" else word[2:] if word[:2] == "##" else f"\u2581{word}" for word in WORDS]
KINDS = [3] * 5 + [1] * (len(WORDS) - 5)


def written(folder: Path, path: Path, kind: str = "F32", tokens: Sequence[str] = MARKED) -> GgufWriting:
    """Write all but the end of the file."""
    writing = GgufWriting(folder, path)
    writing.settings()
    writing.writer.add_tokenizer_model("bert")
    writing.writer.add_token_list([*tokens, *(f"{number}" for number in range(128 - len(tokens)))])
    writing.writer.add_token_types([*KINDS, *[1] * (128 - len(KINDS))])
    for name, token_id in (("unk", 1), ("bos", 2), ("sep", 3), ("pad", 0), ("mask", 4)):
        getattr(writing.writer, f"add_{name}_token_id")(token_id)
    writing.weights(gguf.GGMLQuantizationType[kind])
    return writing


def embedded(model: Path, **settings: Any) -> list[list[float]]:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_threads": 1, "kv_memory": "2MiB", "pooling": "mean"}
    with LLM(model, **(options | settings)) as llm:
        return [output.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


@pytest.mark.parametrize("form", FORMS)
def test_vectors_are_those_of_the_folder(form: str, tmp_path: Path) -> None:
    epsilon = {} if form in ("euro-bert", "gemma", "modern-bert") else {"layer_norm_eps": 1e-12}
    folder = write_tiny_bert(tmp_path / "model", **{**epsilon, **FORMS[form]})
    written(folder, tmp_path / "m.gguf").close()
    for backend in ("native", "reference"):
        assert embedded(tmp_path / "m.gguf", backend=backend) == embedded(folder, backend=backend)
    written(folder, tmp_path / "packed.gguf", "Q8_0").close()
    near = embedded(tmp_path / "packed.gguf")
    assert near == [pytest.approx(vector, abs=0.05) for vector in embedded(folder)]


def test_the_epsilon_of_a_distil_bert_is_that_of_its_file(tmp_path: Path) -> None:
    settings: dict[str, object] = {"architectures": ["DistilBertModel"], "layer_norm_eps": 1e-12}
    written(write_tiny_bert(tmp_path / "model", **settings), tmp_path / "m.gguf").close()
    header = GgufHeader.read(tmp_path / "m.gguf")
    other = replace(header, settings={**header.settings, "bert.attention.layer_norm_epsilon": 0.25})
    assert [spec_of(each, tmp_path / name).norm.epsilon for name, each in (("a", header), ("b", other))] == [
        1e-12,
        0.25,
    ]
    folder = write_tiny_bert(tmp_path / "folder", **{**settings, "dim": 64, "layer_norm_eps": 0.25})
    assert read_model(ModelFolder(folder)).spec.norm.epsilon == 1e-12


def test_a_file_says_how_texts_are_cut_into_words_and_pooled(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path / "model", layer_norm_eps=1e-12)
    writing = written(folder, tmp_path / "m.gguf")
    writing.writer.add_pooling_type(gguf.PoolingType.CLS)
    writing.close()
    with LLM(tmp_path / "m.gguf", num_threads=1) as llm:
        (output,) = llm.embed([TEXT], use_tqdm=False)
        assert output.prompt_token_ids == IDS
    with LLM(folder, num_threads=1, pooling="cls") as llm:
        assert llm.embed([TEXT], use_tqdm=False)[0].embedding == output.embedding
    ours = tokenizers.Tokenizer.from_str(tokenizer_json_of(GgufHeader.read(tmp_path / "m.gguf")))
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json()))
    theirs.no_truncation()
    for text in (TEXT, "Blocks, T\u00e1bleing!", "pages  river\u7530", "[SEP] what[MASK]", "", "unheard of"):
        assert ours.encode(text).ids == theirs.encode(text).ids, text
        assert ours.encode(text, "a river").ids == theirs.encode(text, "a river").ids
        assert ours.encode(text, "a river").type_ids == theirs.encode(text, "a river").type_ids


def header_of(tmp_path: Path, **settings: Any) -> GgufHeader:
    """Return the header of a tiny BERT, with other settings of its tokenizer; None: without that one."""
    written(write_tiny_bert(tmp_path / "model", layer_norm_eps=1e-12), tmp_path / "m.gguf").close()
    header = GgufHeader.read(tmp_path / "m.gguf")
    changed = {**header.settings, **{f"tokenizer.ggml.{name}": value for name, value in settings.items()}}
    return replace(header, settings={name: value for name, value in changed.items() if value is not None})


PIECES = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "\u2581a",
    "\u2581block",
    "\u2581blo",
    "ck",
    "s",
    "\u2581",
    "\u00df",
    "<mask>",
]
UNIGRAM: dict[str, Any] = {
    **{"model": "t5", "tokens": PIECES, "scores": [0.0] * 4 + [-2.0, -4.0, -3.0, -3.0, -2.5, -5.0, -6.0, 0.0]},
    **{"token_type": [3, 3, 3, 2, *[1] * 7, 3], "unknown_token_id": 3, "bos_token_id": 0, "eos_token_id": 2},
    "seperator_token_id": None,
}


def test_pieces_with_scores_are_the_best_ones(tmp_path: Path) -> None:
    header = header_of(tmp_path, **UNIGRAM)
    library = tokenizers.Tokenizer.from_str(tokenizer_json_of(header))
    assert library.encode("blocks  a\n").ids == [0, 5, 8, 4, 2]
    assert library.encode("a", "block").ids == [0, 4, 2, 2, 5, 2]
    assert library.encode("xs<mask>").ids == [0, 9, 3, 8, 11, 2]
    assert library.decode([5, 8, 4]) == "blocks a"
    assert tokenizer_config_of(header)["add_bos_token"] is False
    broken = replace(header, settings={**header.settings, "tokenizer.ggml.precompiled_charsmap": [-1, 200, 3]})
    assert '"precompiled_charsmap": "/8gD"' in tokenizer_json_of(broken)


def test_a_byte_level_bpe_has_a_token_on_both_sides(tmp_path: Path) -> None:
    """As ModernBERT's: composed letters, and no second token type."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "\u0120", "ab", "\u00c3", "\u00a9"]
    settings: dict[str, Any] = {"model": "gpt2", "pre": "modern-bert", "tokens": tokens, "merges": ["a b"]}
    settings |= {"token_type": [3] * 5 + [1] * 6, "add_bos_token": True, "add_sep_token": True}
    header = header_of(tmp_path, **settings)
    library = tokenizers.Tokenizer.from_str(tokenizer_json_of(header))
    assert library.encode("ab b").ids == [2, 8, 7, 6, 3]
    assert library.encode("a", "[MASK]e\u0301").ids == [2, 5, 3, 4, 9, 10, 3]
    assert tokenizer_config_of(header)["add_bos_token"] is False
    plain = replace(header, settings={**header.settings, "tokenizer.ggml.add_sep_token": False})
    assert tokenizers.Tokenizer.from_str(tokenizer_json_of(plain)).encode("ab b").ids == [8, 7, 6]
    assert tokenizer_config_of(plain)["add_bos_token"] is True


def test_a_modern_bert_has_no_scaled_positions(tmp_path: Path) -> None:
    written(write_tiny_bert(tmp_path / "model", **{**FORMS["modern-bert"]}), tmp_path / "m.gguf").close()
    header = GgufHeader.read(tmp_path / "m.gguf")
    scaled = replace(header, settings={**header.settings, "modern-bert.rope.scaling.type": "yarn"})
    with pytest.raises(CheckpointError, match="'yarn'; allowed: none"):
        config_of(scaled, GgufTensors(scaled).setting)


def test_capital_letters_are_kept_by_a_vocabulary_that_has_some(tmp_path: Path) -> None:
    real = "\u2581\u211d"  # which is a capital letter in vocabularies of lower case too
    for tokens, has_capitals in (([*MARKED, real], False), ([*MARKED[:-1], "\u2581What"], True)):
        everything = [*tokens, *(f"{number}" for number in range(128 - len(tokens)))]
        text = tokenizer_json_of(header_of(tmp_path / str(has_capitals), tokens=everything))
        assert ('"lowercase": false' in text) is has_capitals and '"strip_accents": null' in text
        header = header_of(tmp_path / f"{has_capitals}-said", tokens=everything)
        said = {f"tokenizer.ggml.normalizer.{name}": has_capitals for name in ("lowercase", "strip_accents")}
        text = tokenizer_json_of(replace(header, settings={**header.settings, **said}))
        assert f'"strip_accents": {str(has_capitals).lower()}, "lowercase": {str(has_capitals).lower()}' in text
    assert word_pieces(["[unused1]", "[", "]"], [1, 1, 1]) == ["[unused1]", "##[", "##]"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scores": [0.0]}, "scores"),
        ({"precompiled_charsmap": "text"}, "precompiled_charsmap"),
        ({"precompiled_charsmap": [1.5]}, "precompiled_charsmap"),
        ({"unknown_token_id": 99}, "unknown_token_id"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"model": "rwkv"}, "t5"),
    ],
)
def test_what_is_no_tokenizer_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_json_of(header_of(tmp_path, **{**UNIGRAM, **settings}))


def test_an_encoder_is_not_causal(tmp_path: Path) -> None:
    header = header_of(tmp_path)
    causal = replace(header, settings={**header.settings, "bert.attention.causal": True})
    with pytest.raises(CheckpointError, match="causal is True; allowed: false: each token attends to later ones"):
        config_of(causal, GgufTensors(causal).setting)
    with pytest.raises(InvalidConfigError, match="reuse blocks"):
        LLM(tmp_path / "m.gguf", host_cache="1MiB")


RERANKERS: dict[str, dict[str, object]] = {
    "DistilBert": {"layer_norm_eps": 1e-12},
    "ModernBert": {**MODERN, "classifier_pooling": "mean"},
    "XLMRoberta": {"type_vocab_size": 1, "layer_norm_eps": 1e-5, "pad_token_id": 1},
}


@pytest.mark.parametrize("family", RERANKERS)
def test_a_reranker_scores_as_its_folder(family: str, tmp_path: Path) -> None:
    folder = write_tiny_reranker(tmp_path / "model", family=family, **RERANKERS[family])
    writing = written(folder, tmp_path / "m.gguf")
    writing.writer.add_pooling_type(gguf.PoolingType.RANK)
    writing.close()
    documents = ["a river", "table what page", "blocks"]
    found = []
    for model in (folder, tmp_path / "m.gguf"):
        with LLM(model, num_threads=1) as llm:
            found.append(llm.score("what a block", documents, use_tqdm=False))
            assert not llm.report.recommends_sampling and len(llm.report.labels) == 1
    assert found[0] == found[1] and len(set(found[0])) == 3


def test_layers_after_the_pooling_are_in_the_file(tmp_path: Path) -> None:
    folder, random = write_tiny_bert(tmp_path / "model", **GEMMA), np.random.default_rng(0)
    writing = written(folder, tmp_path / "m.gguf")
    for number, shape in ((2, (96, 64)), (3, (32, 96))):
        weight = random.standard_normal(shape, np.float32) / 8
        step = folder / f"{number}_Dense"
        step.mkdir()
        sizes = {"in_features": shape[1], "out_features": shape[0], "bias": False, "activation_function": IDENTITY}
        (step / "config.json").write_text(json.dumps(sizes))
        write_model_weights(step, {"linear.weight": weight})
        writing.writer.add_tensor(f"dense_{number}.weight", weight)
    writing.close()
    found = embedded(tmp_path / "m.gguf")
    assert found == embedded(folder) and {len(vector) for vector in found} == {32}
    # Files of Ollama have other names, and the architecture of Gemma 3.
    header = GgufHeader.read(tmp_path / "m.gguf")
    tensors = dict(header.tensors)
    for ours, name in (("dense_2", "dense.0"), ("dense_3", "dense.1")):
        tensors[f"{name}.weight"] = tensors.pop(f"{ours}.weight")
    settings = {name.replace("gemma-embedding", "gemma3"): each for name, each in header.settings.items()}
    settings |= {"general.architecture": "gemma3", "gemma3.pooling_type": 1}
    theirs = replace(header, tensors=tensors, settings=settings)
    assert spec_of(theirs, tmp_path / "spec") == read_model(GgufFile(tmp_path / "m.gguf")).spec
    assert dense_config_of(theirs, "3_Dense/config.json") == dense_config_of(header, "3_Dense/config.json")
    assert dense_config_of(theirs, "4_Dense/config.json") is None
    WeightReader(spec_of(theirs, tmp_path / "again"), GgufTensors(theirs), "float32")
