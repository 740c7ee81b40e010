"""Rerankers in GGUF files, as llama.cpp converts Qwen3-Reranker: rows for yes and no, a template for pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from quire import LLM
from quire.core.errors import CheckpointError, InvalidConfigError, InvalidRequestError
from quire.engine.text.chat_template import ChatOptions
from support.gguf_models import GgufWriting
from support.tiny_checkpoint import tiny_qwen3_config, tiny_qwen3_tensors, write_model_weights, write_tiny_qwen3

CONTROL = ["<|im_start|>", "<|im_end|>"]
TOKENS = [*sorted(ByteLevel.alphabet()), "ab", *CONTROL]
SETTINGS = {"vocab_size": len(TOKENS), "eos_token_id": len(TOKENS) - 1}
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
TEMPLATE = (
    '<|im_start|>system\nSay "yes" or {no}.<|im_end|>\n<|im_start|>user\n'
    f"<Instruct>: {INSTRUCTION}\n<Query>: {{query}}\n<Document>: {{document}}<|im_end|>\n"
)
ROWS = np.random.default_rng(3).standard_normal((2, 64)).astype(np.float32) / 8
QUERY, DOCUMENTS = "What is a block?", ["A page.", "A river, {query}.", "It <|im_end|> ends.", "é{{ 1 }}\\n\t'\""]


def write_reranker(folder: Path, *, template: str = TEMPLATE, rows: Any = ROWS, labels: Any = ("yes", "no")) -> Path:
    """Write a tiny model as a GGUF file that scores pairs."""
    writing = GgufWriting(write_tiny_qwen3(folder / "base", settings=SETTINGS), folder / "model.gguf")
    writing.settings()
    writing.writer.add_pooling_type(gguf.PoolingType.RANK)
    writing.writer.add_classifier_output_labels(list(labels))
    writing.writer.add_tensor("cls.output.weight", rows)
    if template:
        writing.writer.add_chat_template([{"name": "rerank", "template": template}])
    kinds = [3 if token in CONTROL else 1 for token in TOKENS]
    writing.tokens(TOKENS, kinds)
    writing.weights(gguf.GGMLQuantizationType.F32)
    writing.close()
    return folder / "model.gguf"


def opened(model: Path, **settings: Any) -> LLM:
    return LLM(model, dtype="float32", kv_memory="2MiB", num_threads=1, **settings)


def test_scores_are_those_of_the_rows_in_the_file_for_the_prompt_in_the_file(tmp_path: Path) -> None:
    prompts = [TEMPLATE.replace("{document}", text).replace("{query}", QUERY) for text in ["A page.", "A river."]]
    folder = tmp_path / "folder"
    write_tiny_qwen3(folder, settings=SETTINGS)
    config = tiny_qwen3_config() | SETTINGS | {"architectures": ["Qwen3ForSequenceClassification"]}
    tensors = tiny_qwen3_tensors(config, 0) | {"score.weight": ROWS}
    (folder / "config.json").write_text(json.dumps(config))
    write_model_weights(folder, tensors)
    with opened(write_reranker(tmp_path)) as llm:
        assert llm.report.labels == ("yes", "no") and llm.tokenizer is not None
        assert not llm.tokenizer.has_chat_template, "a template for pairs takes no conversation"
        ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
        scores = llm.score(QUERY, ["A page.", "A river."], use_tqdm=False)
        outputs = llm.classify(prompts, use_tqdm=False)
    assert scores == [output.shares["yes"] for output in outputs]
    assert all(1 > score > 0 for score in scores) and scores[0] != scores[1]
    with opened(folder, skip_tokenizer_init=True) as llm:
        expected = [output.shares["LABEL_0"] for output in llm.classify(ids, use_tqdm=False)]
    assert scores == expected


def test_texts_stay_texts_in_the_prompt_of_a_pair(tmp_path: Path) -> None:
    with opened(write_reranker(tmp_path)) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        for document in DOCUMENTS:
            messages = [{"role": "user", "content": text} for text in (INSTRUCTION, QUERY, document)]
            ids = tokenizer.encode_chat(messages, ChatOptions(template="query_and_document"))
            assert sum(token >= len(TOKENS) - 2 for token in ids) == 4, "the control tokens of the template"
            before, after = TEMPLATE.replace("{query}", QUERY).split("{document}")
            assert tokenizer.decode(ids, skip_special_tokens=False) == before + document + after
        plain = llm.score(QUERY, DOCUMENTS[:1], use_tqdm=False)
        assert llm.score(QUERY, DOCUMENTS[:1], instruction="Find rivers", use_tqdm=False) != plain


def test_an_instruction_needs_a_place_in_the_template(tmp_path: Path) -> None:
    with opened(write_reranker(tmp_path, template="{query}\n{document}")) as llm:
        assert len(llm.score(QUERY, DOCUMENTS, use_tqdm=False)) == 4
        with pytest.raises(InvalidRequestError, match="instruction"):
            llm.score(QUERY, DOCUMENTS, instruction="Find rivers")


def test_what_does_not_fit_is_refused_by_the_names_of_the_file(tmp_path: Path) -> None:
    for place, (changes, said) in enumerate(
        [
            ({"labels": ["yes"]}, "qwen3.classifier.output_labels"),
            ({"rows": ROWS[:, :32].copy()}, "hidden state"),
            ({"rows": ROWS[0], "labels": ["yes"] * 64}, "cls.output.weight: shape"),
        ]
    ):
        with pytest.raises(CheckpointError) as caught:
            opened(write_reranker(tmp_path / str(place), **changes))
        assert said in str(caught.value)
    with pytest.raises(InvalidConfigError, match="score_tokens"):
        opened(write_reranker(tmp_path / "tokens"), score_tokens="a,b")


@pytest.mark.parametrize(("kind", "pooling"), [("LAST", "last"), ("MEAN", "mean"), ("NONE", "")])
def test_a_file_says_how_vectors_are_pooled(kind: str, pooling: str, tmp_path: Path) -> None:
    folder = write_tiny_qwen3(tmp_path / "base", settings=SETTINGS)
    writing = GgufWriting(folder, tmp_path / "model.gguf")
    writing.settings()
    writing.writer.add_pooling_type(gguf.PoolingType[kind])
    writing.tokens(TOKENS, [1] * len(TOKENS))
    writing.weights(gguf.GGMLQuantizationType.F32)
    writing.close()
    with opened(tmp_path / "model.gguf") as llm:
        if not pooling:
            with pytest.raises(InvalidRequestError, match="pooling"):
                llm.embed("A page.")
            return
        found = llm.embed("A page.", use_tqdm=False)[0].embedding
    with opened(folder, skip_tokenizer_init=True, pooling=pooling) as llm:
        ids = [TOKENS.index("Ġ" if letter == " " else letter) for letter in "A page."]
        assert llm.embed([ids], use_tqdm=False)[0].embedding == found
