"""Models whose tokens attend to later ones: a text is one step, has the same vector in any schedule, and no cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from quire import LLM
from quire.cli import main
from quire.compute.models.labels import separator_of
from quire.compute.models.source import ModelFolder
from quire.compute.weights.checkpoint import Checkpoint
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError, InvalidConfigError, InvalidRequestError, ModelError
from quire.core.failpoints import FAILPOINTS_VARIABLE
from quire.core.pooling import PAIR_TEMPLATE
from quire.core.request import Request
from quire.engine.factory import create_reference_engine, plan_engine
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.greeting import greeting, use_of
from support.server import JSON, running_server
from support.tiny_bert import IDS, TEXT, tokenizer_json, write_tiny_bert, write_tiny_reranker
from support.tiny_checkpoint import write_model_weights

LONGEST = 96  # tokens of a text, and by default of a step at least
PROMPTS = [
    [(7 * i * i + 3 * i + n) % 120 + 5 for i in range(n)] for n in (3, LONGEST, 1, 31, 32, 33, 95, 64, 7, LONGEST)
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {"max_num_batched_tokens": 1024},
    "by default, in fair shares": {"policy": "fair_share", "num_threads": 2},
    "one by one": {"max_num_batched_tokens": LONGEST, "max_num_seqs": 2},
    "two steps at a time": {"max_num_batched_tokens": 128, "max_steps_under_way": 2},
    "memory for one text": {"kv_memory": f"{LONGEST * 3 * 2 * 64 * 4}", "block_size": 16},
    "in the reference": {"backend": "reference"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_bert(tmp_path_factory.mktemp("bert"))


def vectors(folder: Path, prompts: list[list[int]], pooling: str | None = None, **settings: Any) -> list[list[float]]:
    with LLM(folder, **{"num_threads": 1, **settings}) as llm:
        outputs = llm.embed(prompts, pooling=pooling, use_tqdm=False)
        llm.engine.scheduler.check()
        assert [output.num_cached_tokens for output in outputs] == [0] * len(prompts)
        assert not any(output.error for output in outputs)
    return [output.embedding for output in outputs]


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[list[float]]]:
    return {kind: [vectors(folder, [prompt], kind)[0] for prompt in PROMPTS] for kind in ("mean", "cls")}


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_gives_the_vectors_of_each_text_alone(
    folder: Path, alone: dict[str, list[list[float]]], name: str
) -> None:
    if name == "in the reference":  # rounds otherwise, and also to the same bits in any schedule
        expected = [vectors(folder, [prompt], **SCHEDULES[name])[0] for prompt in PROMPTS]
        assert expected == [pytest.approx(vector, abs=1e-5) for vector in alone["mean"]]
        assert vectors(folder, PROMPTS, **SCHEDULES[name]) == expected
        return
    for kind, expected in alone.items():
        assert vectors(folder, PROMPTS * 2, kind, **SCHEDULES[name]) == expected * 2


def test_a_text_that_fails_is_found_without_cutting_any(
    folder: Path, alone: dict[str, list[list[float]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third step fails, and all texts of a failed step are computed again, as whole texts."""
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "error:step=1")
    assert vectors(folder, PROMPTS, "cls", max_num_batched_tokens=1024) == alone["cls"]
    monkeypatch.setenv(FAILPOINTS_VARIABLE, "error:token=4")
    with LLM(folder, num_threads=1, max_num_batched_tokens=1024) as llm:
        bad = [5, 6, 4, 7]
        outputs = llm.embed([*PROMPTS, bad], pooling="cls", use_tqdm=False)
    assert [output.embedding for output in outputs[:-1]] == alone["cls"]
    assert outputs[-1].error


def test_a_step_takes_the_longest_text_or_the_step_is_the_limit(folder: Path) -> None:
    plan = plan_engine(EngineConfig(model=str(folder))).report
    assert (plan.max_num_batched_tokens, plan.plan.max_model_len) == (512, LONGEST)
    assert plan.plan.num_blocks <= 512 // plan.block_size + plan.max_num_seqs  # no more than a step fills
    with LLM(folder, max_num_batched_tokens=64, num_threads=1) as llm:
        assert llm.embed([PROMPTS[7]], use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="maximum context length is 64 tokens"):
            llm.embed([[5] * 65])
    engine = create_reference_engine(ModelFolder(folder))
    assert engine.scheduler.limits.one_step and not engine.scheduler.memory.index.keeps_entries
    with pytest.raises(InvalidRequestError, match="cannot generate text"):
        engine.scheduler.add(Request("r", [5, 6]))
    engine.close()


def test_what_an_encoder_cannot_do_is_said(folder: Path, tmp_path: Path) -> None:
    for settings in ({"disk_cache": str(tmp_path / "disk")}, {"host_cache": "1MiB"}):
        with pytest.raises(InvalidConfigError, match="cannot reuse blocks"):
            LLM(folder, **settings)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfigError, match=r"one of auto, native, reference|attention to later tokens"):
        LLM(folder, backend="torch")
    for model, guesser in ((folder, "guide"), ("guide", str(folder))):
        with pytest.raises(InvalidConfigError, match=r"speculation .* generates text, to guess for another"):
            LLM(model, speculation=guesser, kv_memory="8MiB")
    with pytest.raises(InvalidConfigError, match="has no head"):
        LLM(folder, score_tokens="a,block")
    with pytest.raises(InvalidConfigError, match="auto, last or mean"):
        LLM("guide", kv_memory="8MiB", pooling="cls")
    with LLM(folder, num_threads=1) as llm:
        with pytest.raises(InvalidRequestError, match=r"a text to embed .*cannot generate text"):
            llm.generate(TEXT)
        with pytest.raises(InvalidRequestError, match="cannot generate text"):
            llm.chat([{"role": "user", "content": TEXT}])
        with pytest.raises(InvalidRequestError, match="no labels"):
            llm.classify([TEXT])
        with pytest.raises(InvalidRequestError, match="at least one token"):
            llm.embed([[]])


def test_a_pickle_is_converted_by_the_class_that_reads_it(tmp_path: Path) -> None:
    """As bge-m3 is published."""
    for name, expected in (
        ("XLMRobertaModel", "AutoModel as M"),
        ("BertForMaskedLM", "AutoModelForMaskedLM as M"),
        ("BertForSequenceClassification", "AutoModelForSequenceClassification as M"),
        ("GPT2LMHeadModel", "AutoModelForCausalLM as M"),
    ):
        folder = write_tiny_bert(tmp_path / name)
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
        with pytest.raises(ModelError, match=f"from transformers import {expected}"):
            ModelFolder(folder).tensors()


def test_commands_say_what_the_model_is_for(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "an encoder: it makes vectors or scores of texts, and generates no text"
    assert plan_engine(EngineConfig(model=str(folder))).report.notices == (said,)
    assert main(["plan", str(folder)]) == 2
    assert f"{said}; quire plan is for models that generate text" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(folder, tmp_path / "hub" / "models--tiny--bert" / "snapshots" / ("0" * 40))
    assert main(["models"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny/bert")]
    assert line.endswith("  yes, for vectors or scores only")


def test_a_server_greets_with_a_call_that_the_model_answers(folder: Path) -> None:
    config = plan_engine(EngineConfig(model=str(folder))).config
    shown = greeting("http://here", "bert", has_dashboard=False, has_keys=False, use=use_of(config, has_chat=False))
    assert "http://here/v1/embeddings" in shown and "client.embeddings.create" in shown


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Any]:
    with running_server(model=folder) as server:
        yield lambda path, **fields: server.ask("POST", path, json.dumps(fields).encode(), JSON)


def test_a_server_makes_vectors_of_whole_texts_and_no_texts(served: Any, folder: Path) -> None:
    expected = vectors(folder, [IDS])[0]
    for path, found in (
        ("/v1/embeddings", lambda value: value["data"][0]["embedding"]),
        ("/api/embed", lambda value: value["embeddings"][0]),
        ("/api/embeddings", lambda value: value["embedding"]),
    ):
        answer = served(path, model=folder.name, **({"prompt": TEXT} if path == "/api/embeddings" else {"input": TEXT}))
        assert answer.status == 200 and found(answer.value) == expected, answer.error
    shown = served("/api/show", model=folder.name).value
    assert (shown["capabilities"], shown["details"]["family"]) == (["embedding"], "bert")
    long = "block " * 200
    assert served("/v1/embeddings", input=long).status == 400
    cut = served("/api/embed", model=folder.name, input=long)
    assert cut.value["embeddings"] == vectors(folder, [[2, *[6] * (LONGEST - 2), 3]])
    assert served("/rerank", query="a block", documents=["table", "river"]).status == 200
    for path, fields in (
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/api/generate", {"model": folder.name, "prompt": TEXT}),
        ("/classify", {"input": TEXT}),
    ):
        answer = served(path, **fields)
        assert answer.status == 400 and any(
            words in str(answer.error) for words in ("cannot generate text", "no labels")
        ), (path, answer.error)


PAIRS = [("what a block", "tables"), ("what a block", "a river page " * 8), ("rivers", "a"), ("a", "what is a page")]


def scores(folder: Path, pairs: list[tuple[str, str]], **settings: Any) -> list[float]:
    with LLM(folder, num_threads=1, **settings) as llm:
        return [llm.score(query, document, use_tqdm=False)[0] for query, document in pairs]


def test_a_score_of_a_pair_has_the_same_bits_alone_and_among_others(tmp_path: Path) -> None:
    folder = write_tiny_reranker(tmp_path / "model")
    alone = scores(folder, PAIRS)
    assert len(set(alone)) == len(PAIRS)
    assert scores(folder, PAIRS, backend="reference") == pytest.approx(alone, abs=1e-5)
    with running_server(model=folder) as server:
        for query in ("what a block", "rivers"):
            documents = [document for asked, document in PAIRS if asked == query] * 20
            body = json.dumps({"query": query, "documents": documents}).encode()
            found = server.ask("POST", "/rerank", body, JSON).value["results"]
            expected = [score for (asked, _), score in zip(PAIRS, alone, strict=True) if asked == query] * 20
            assert {each["index"]: each["relevance_score"] for each in found} == dict(enumerate(expected))
        answer = server.ask("POST", "/v1/embeddings", json.dumps({"input": TEXT}).encode(), JSON)
        assert answer.status == 200 and len(answer.value["data"][0]["embedding"]) == 64
        body = json.dumps({"text_1": "a", "text_2": "b", "instruction": "find"}).encode()
        assert "a query and a document only" in str(server.ask("POST", "/score", body, JSON).error)


def test_a_head_for_masked_tokens_changes_no_vector(folder: Path, tmp_path: Path) -> None:
    """As all-mpnet-base-v2 names its family."""
    shutil.copytree(folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(folder)
    tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.entries}
    tensors["cls.predictions.bias"] = np.zeros(128, np.float32)
    write_model_weights(tmp_path / "model", tensors)
    assert vectors(tmp_path / "model", PROMPTS[:3]) == vectors(folder, PROMPTS[:3])
    with running_server(model=tmp_path / "model") as server:
        shown = server.ask("POST", "/api/show", json.dumps({"model": "model"}).encode(), JSON).value
    assert shown["details"]["family"] == "bert"


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Bert", {}),
        ("DistilBert", {}),
        ("MPNet", {"max_position_embeddings": 98}),
        ("ModernBert", {"local_attention": 8}),
        ("ModernBert", {"classifier_pooling": "mean"}),
        ("XLMRoberta", {"type_vocab_size": 1}),
    ],
)
def test_labels_have_the_same_bits_alone_and_among_others(
    family: str, settings: dict[str, object], tmp_path: Path
) -> None:
    folder = write_tiny_reranker(tmp_path / "model", 3, family, **settings)
    texts = ["what a block", TEXT, "rivers " * 20, "a"]
    with LLM(folder, num_threads=1) as llm:
        alone = [llm.classify([text], use_tqdm=False)[0].shares for text in texts]
    assert len({shares["label 0"] for shares in alone}) == len(texts)
    with LLM(folder, backend="reference") as llm:
        for output, shares in zip(llm.classify(texts, use_tqdm=False), alone, strict=True):
            assert output.shares == pytest.approx(shares, abs=1e-5)
    with running_server(model=folder) as server:
        answer = server.ask("POST", "/classify", json.dumps({"input": texts * 10}).encode(), JSON)
        found = [each["probs"] for each in answer.value["data"]]
    assert found == [[shares[f"label {number}"] for number in range(3)] for shares in alone] * 10


def test_a_pair_is_joined_as_the_tokenizer_does_it_and_special_tokens_stay_text(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path)
    ours = Tokenizer.open(ModelFolder(folder), vocab_size=128)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    for query, document in (*PAIRS, ("", "a"), ("a [SEP] block", "[CLS]")):
        messages = [{"role": "user", "content": text} for text in (query, document)]
        ids = ours.encode_chat(messages, template_name=PAIR_TEMPLATE)
        if "[" not in query:
            assert ids == library.encode(query, document).ids
        else:
            assert ids.count(3) == 2 and ids.count(2) == 1
    assert separator_of(tokenizer_json()) == 3
    assert separator_of({"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 9], "cls": ["[CLS]", 8]}}) == 9
    assert separator_of({"post_processor": None}) is None
    library.post_processor = None
    library.save(str(folder / "tokenizer.json"))
    with pytest.raises(InvalidRequestError, match="does not join two"):
        Tokenizer.open(ModelFolder(folder), vocab_size=128).encode_chat(messages, template_name=PAIR_TEMPLATE)


def test_a_classifier_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_reranker(tmp_path, 2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "one"}}))
    with pytest.raises(
        CheckpointError, match=r"classifier\.weight: shape is \[2, 64\]; allowed: \[1, 64\], for 1 label"
    ):
        LLM(folder)
