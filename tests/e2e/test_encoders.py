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
from quire.compute.models.heads import HeadSpec
from quire.compute.models.labels import separator_of
from quire.compute.models.source import ModelFolder
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.classifier import Classifier, ClassifierLayer
from quire.core.config import EngineConfig
from quire.core.errors import (
    CheckpointError,
    InvalidConfigError,
    InvalidRequestError,
    ModelError,
    RequestTooLargeError,
)
from quire.core.failpoints import FAILPOINTS_VARIABLE
from quire.core.pooling import PAIR_TEMPLATE
from quire.core.request import Request
from quire.engine.factory import create_reference_engine, plan_engine
from quire.engine.text.chat_template import ChatOptions
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


def test_the_makers_limit_of_a_text_is_the_context_unless_the_user_names_another(folder: Path, tmp_path: Path) -> None:
    limited = shutil.copytree(folder, tmp_path / "limited")
    limit = limited / "sentence_bert_config.json"
    limit.write_text(json.dumps({"max_seq_length": 32, "do_lower_case": False}))
    with LLM(limited, num_threads=1) as llm:
        assert llm.report.plan.max_model_len == 32
        with pytest.raises(InvalidRequestError, match="maximum context length is 32 tokens"):
            llm.embed([[5] * 33])
    assert vectors(limited, [[5] * 32]) == vectors(folder, [[5] * 32])
    assert vectors(limited, [[5] * 64], max_model_len=64) == vectors(folder, [[5] * 64])
    with pytest.raises(InvalidConfigError, match=f"max_model_len is 97; allowed: at most {LONGEST}, the model's"):
        LLM(limited, max_model_len=97)
    for value, longest in ((4096, LONGEST), (None, LONGEST)):
        limit.write_text(json.dumps({"max_seq_length": value}))
        assert plan_engine(EngineConfig(model=str(limited))).report.plan.max_model_len == longest
    for value in (0, -1, "32", 1e9, True):
        limit.write_text(json.dumps({"max_seq_length": value}))
        with pytest.raises(CheckpointError, match=r"sentence_bert_config.json: max_seq_length"):
            plan_engine(EngineConfig(model=str(limited)))


def test_layers_after_the_model_are_in_the_plan_of_its_memory(folder: Path, tmp_path: Path) -> None:
    def planned(model: Path, backend: str) -> int:
        return plan_engine(EngineConfig(model=str(model), backend=backend)).report.plan.needs.weight_bytes

    dense = shutil.copytree(folder, tmp_path / "dense") / "2_Dense"
    dense.mkdir()
    settings = {"in_features": 64, "out_features": 1000, "activation_function": "torch.nn.modules.linear.Identity"}
    (dense / "config.json").write_text(json.dumps(settings))
    scores = write_tiny_reranker(tmp_path / "scores", labels=7)
    for backend in ("native", "reference"):
        assert planned(dense.parent, backend) - planned(folder, backend) == 1000 * 65 * 4
        assert planned(scores, backend) - planned(folder, backend) == (64 + 7) * 65 * 8


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
    for machine in ([], ["--hardware", "here"]):
        assert main(["simulate", str(folder), *machine]) == 2
        assert f"{said}; quire simulate is for models that generate text" in capsys.readouterr().err
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(folder, tmp_path / "hub" / "models--tiny--bert" / "snapshots" / ("0" * 40))
    assert main(["models"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tiny/bert")]
    assert line.endswith("  yes, for vectors or scores only")


def test_texts_that_are_too_long_are_cut_if_the_user_asks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "block " * 5000
    ids = [2, *[6] * (LONGEST - 2), 3]
    with LLM(folder, num_threads=1) as llm:
        with pytest.raises(InvalidRequestError, match=f"maximum context length is {LONGEST} tokens"):
            llm.embed([TEXT, "block " * LONGEST])
        prompts = [long, TEXT, [5, *[6] * LONGEST], {"prompt": TEXT}]
        outputs = llm.embed(prompts, truncate=True, use_tqdm=False)
    expected = vectors(folder, [ids, IDS, [5, *[6] * (LONGEST - 1)], IDS])
    assert [output.embedding for output in outputs] == expected
    command = ["embed", str(folder), "--quiet", "-p", "block " * LONGEST, "-p", TEXT]
    assert main(command) == 2
    assert "--truncate cuts the end of texts that are too long" in capsys.readouterr().err
    assert main([*command, "--truncate"]) == 0
    assert [json.loads(line)["embedding"] for line in capsys.readouterr().out.splitlines()] == expected[:2]


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
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "truncate_prompt_tokens": 9}),
        ("/v1/messages", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 3}),
        ("/v1/responses", {"input": TEXT}),
        ("/api/generate", {"model": folder.name, "prompt": TEXT}),
        ("/classify", {"input": TEXT}),
    ):
        answer = served(path, **fields)
        assert answer.status == 400 and any(
            words in str(answer.error) for words in ("cannot generate text", "no labels")
        ), (path, answer.error)


def test_a_long_text_is_named_by_its_field_and_cut_for_coheres_clients(served: Any) -> None:
    long, texts = "block " * 200, ["a", "table", "a"]
    for path, fields, place in (
        ("/rerank", {"query": "a", "documents": ["table", long]}, "documents[1]"),
        ("/rerank", {"query": "a", "documents": ["a", long]}, "documents[1]"),
        ("/rerank", {"query": long, "documents": texts}, "query"),
        ("/score", {"text_1": "a", "text_2": ["a", "table", long]}, "text_2[2]"),
        ("/score", {"text_1": [*texts, long], "text_2": [*texts, "page"]}, "text_1[3]"),
        ("/score", {"text_1": [long], "text_2": texts}, "text_1[0]"),
        ("/score", {"text_1": texts, "text_2": long}, "text_2"),
    ):
        answer = served(path, **fields)
        assert (answer.status, answer.error["param"]) == (400, place)
    ranked = served("/v2/rerank", query="a", documents=[long, "table"], max_tokens_per_doc=4096)
    cut = served("/rerank", query="a", documents=[long, "table"], truncate_prompt_tokens=-1, return_documents=False)
    assert (ranked.status, ranked.value["results"]) == (200, cut.value["results"])
    assert served("/v2/rerank", query="a", documents=["table"], max_tokens_per_doc=None).status == 200
    answer = served("/v2/rerank", query="a", documents=["table"], max_tokens_per_doc=LONGEST - 1)
    assert (answer.status, answer.error["param"]) == (400, "max_tokens_per_doc")


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


def test_python_cuts_long_texts_as_the_server_does(tmp_path: Path) -> None:
    folder, texts = write_tiny_reranker(tmp_path / "model"), ["a page", "block " * 200]
    with LLM(folder, num_threads=1) as llm:
        with pytest.raises(RequestTooLargeError, match=r"^prompts\[1\]: "):
            llm.score("a", texts, use_tqdm=False)
        with pytest.raises(RequestTooLargeError, match=r"^prompts\[1\]: "):
            llm.classify(texts, use_tqdm=False)
        found = llm.score("a", texts, truncate=True, use_tqdm=False)
        labels = [each.shares for each in llm.classify(texts, truncate=True, use_tqdm=False)]
    with running_server(model=folder) as server:
        body = json.dumps({"text_1": "a", "text_2": texts, "truncate_prompt_tokens": -1}).encode()
        data = server.ask("POST", "/score", body, JSON).value["data"]
        assert [each["score"] for each in data] == found
        body = json.dumps({"input": texts, "truncate_prompt_tokens": -1}).encode()
        data = server.ask("POST", "/classify", body, JSON).value["data"]
        assert [each["probs"] for each in data] == [list(each.values()) for each in labels]


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
        ("EuroBert", {}),
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


def test_a_late_head_takes_the_mean_of_the_scores_of_tokens() -> None:
    states, rows = np.array([[1.0, -2.0], [-0.5, 3.0], [2.0, 0.25]], np.float32), np.array([[1.0, 2.0], [-1.0, 0.5]])
    layer = ClassifierLayer(HeadSpec(pooling="mean", late=True), np.array([[1.0, -1.0], [0.5, 2.0]]), np.ones(2))
    classifier = Classifier(rows, True, np.array([0.25, -0.25]), layer)
    shares = classifier.shares(classifier.before_pooling(states).mean(axis=0))
    scores = np.mean([rows @ layer(state) + [0.25, -0.25] for state in states], axis=0)
    assert shares == pytest.approx(np.exp(scores) / np.exp(scores).sum())


def test_a_pair_is_joined_as_the_tokenizer_does_it_and_special_tokens_stay_text(tmp_path: Path) -> None:
    folder = write_tiny_bert(tmp_path)
    ours = Tokenizer.open(ModelFolder(folder), vocab_size=128)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    for query, document in (*PAIRS, ("", "a"), ("a [SEP] block", "[CLS]")):
        messages = [{"role": "user", "content": text} for text in (query, document)]
        ids = ours.encode_chat(messages, ChatOptions(template=PAIR_TEMPLATE))
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
        Tokenizer.open(ModelFolder(folder), vocab_size=128).encode_chat(messages, ChatOptions(template=PAIR_TEMPLATE))


def test_a_pair_that_is_too_long_is_cut_as_transformers_cuts_it(tmp_path: Path) -> None:
    folder = write_tiny_reranker(tmp_path)
    ours = Tokenizer.open(ModelFolder(folder), vocab_size=128)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    pairs = [(("block " * one).strip(), ("page " * two).strip()) for one, two in ((9, 9), (2, 30), (30, 2), (20, 21))]
    for pair in pairs:
        for most in range(5, 60):
            library.enable_truncation(most)
            assert ours.encode_pair(pair, most) == library.encode(*pair).ids
        assert ours.encode_pair(pair, 2) == [2, 6]
    with running_server(model=folder) as server:
        query, document = "what a block", "a river page " * 500
        fields = {"text_1": query, "text_2": document, "truncate_prompt_tokens": -1}
        cut = server.post("/score", fields).value["data"][0]["score"]
        ids = ours.encode_pair((query, document), LONGEST)
        assert (len(ids), ids[-1], ids.count(3)) == (LONGEST, 3, 2)
        assert cut == scores(folder, [(query, ours.decode(ids[ids.index(3) :]))])[0]
        assert server.post("/score", {**fields, "truncate_prompt_tokens": None}).status == 400
        ranked = server.post("/v2/rerank", {"query": query, "documents": [document, "a"]}).value["results"]
        assert {each["relevance_score"] for each in ranked} == {cut, scores(folder, [(query, "a")])[0]}


def test_a_tokenizer_that_makes_no_token_of_an_example_joins_no_pair(tmp_path: Path) -> None:
    folder, text = write_tiny_bert(tmp_path), tokenizer_json()
    text["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(InvalidRequestError, match="does not join two"):
        Tokenizer.open(ModelFolder(folder), vocab_size=128).encode_pair(("a", "block"))


def test_a_classifier_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_reranker(tmp_path, 2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "one"}}))
    with pytest.raises(
        CheckpointError, match=r"classifier\.weight: shape is \[2, 64\]; allowed: \[1, 64\], for 1 label"
    ):
        LLM(folder)
