"""Labels and scores: of whole models, in Python and over HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.core.errors import CheckpointError, InvalidConfigError, InvalidRequestError
from support.server import JSON, RunningServer, running_server
from support.tiny_checkpoint import tiny_qwen3_config, tiny_qwen3_tensors, write_model_weights, write_tiny_qwen3

QUERY = "What is a block table?"
DOCUMENTS = ["It maps the blocks of a sequence.", "Rivers flow to the sea.", "What is a block table?", "A mat."]
PAIR = "a,the"


def share(llm: LLM, prompt: list[int], tokens: list[int]) -> float:
    """Return the share of the first token among two, from their probabilities after a prompt."""
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
    chances = []
    for token in tokens:
        (output,) = llm.generate([[*prompt, token]], sampling, use_tqdm=False)
        assert output.prompt_logprobs is not None and output.prompt_logprobs[-1] is not None
        chances.append(math.exp(output.prompt_logprobs[-1][token].logprob))
    return chances[0] / sum(chances)


def write_classifier(folder: Path, count: int, /, **settings: Any) -> Path:
    """Write a tiny model with a row of scores for each label, and without a head."""
    write_tiny_qwen3(folder, tie=False)
    config = tiny_qwen3_config(tie=False) | {"architectures": ["Qwen3ForSequenceClassification"], **settings}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = tiny_qwen3_tensors(config, 0)
    del tensors["lm_head.weight"]
    tensors["score.weight"] = np.random.default_rng(3).standard_normal((count, 64)).astype(np.float32) / 8
    write_model_weights(folder, tensors)
    return folder


def test_two_tokens_score_as_their_probabilities_say() -> None:
    with LLM("guide", kv_memory="8MiB", score_tokens=PAIR) as llm:
        assert llm.report.labels == ("a", "the") and llm.tokenizer is not None
        ids = [llm.tokenizer.id_of(text) for text in PAIR.split(",")]
        prompts = [llm.tokenizer.encode(text) for text in DOCUMENTS]
        outputs = llm.classify(DOCUMENTS, use_tqdm=False)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.shares["a"] == pytest.approx(share(llm, prompt, ids), rel=1e-3)
            assert output.label == max(output.shares, key=output.shares.__getitem__)
        scores = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        assert len(set(scores)) == 4 and all(0 < score < 1 for score in scores)
        assert scores == [llm.score(QUERY, text, use_tqdm=False)[0] for text in DOCUMENTS], "alone and together"
        assert llm.stats().hit_tokens_total > 0, "documents share the blocks of their query"
        for query, documents, field in (
            (None, "a", "query"),
            ("a", None, "documents"),
            ("a", [None], r"documents\[0\]"),
        ):
            with pytest.raises(InvalidRequestError, match=rf"^{field} is None; allowed: a text"):
                llm.score(query, documents)  # type: ignore[arg-type]


def test_vectors_score_as_their_cosine() -> None:
    with LLM("guide", kv_memory="8MiB", pooling="mean") as llm:
        scores = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        vectors = np.array([each.embedding for each in llm.embed([QUERY, *DOCUMENTS], use_tqdm=False)])
        assert scores == pytest.approx(vectors[1:] @ vectors[0], abs=1e-6)
        assert scores.index(max(scores)) == 2
        with pytest.raises(InvalidRequestError, match="this model has no labels, so it cannot classify texts"):
            llm.classify("A text")
    with LLM("guide", kv_memory="4MiB") as llm, pytest.raises(InvalidRequestError, match="pooling"):
        llm.score(QUERY, DOCUMENTS)


@pytest.mark.parametrize(
    ("num_labels", "settings", "names", "total"),
    [
        (3, {"id2label": {"0": "bad", "1": "fair", "2": "good"}}, ("bad", "fair", "good"), 1.0),
        (2, {}, ("LABEL_0", "LABEL_1"), 1.0),
        (1, {"id2label": {"0": "fits"}}, ("fits",), None),
        (3, {"num_labels": 3, "problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1", "LABEL_2"), None),
    ],
)
def test_a_classifier_has_the_labels_of_its_settings(
    tmp_path: Path, num_labels: int, settings: dict[str, Any], names: tuple[str, ...], total: float | None
) -> None:
    folder = write_classifier(tmp_path, num_labels, **settings)
    prompts = [[5, 6, 7], [9] * 40, [1, 2]]
    found = {}
    for name, changes in {"whole": {}, "cut": {"max_num_batched_tokens": 16, "max_num_seqs": 2}}.items():
        with LLM(folder, kv_memory="1MiB", skip_tokenizer_init=True, num_threads=1, **changes) as llm:
            found[name] = [output.shares for output in llm.classify(prompts, use_tqdm=False)]
            assert llm.report.labels == names
            with pytest.raises(InvalidRequestError, match="this model cannot generate text"):
                llm.generate([[1, 2]])
    assert found["whole"] == found["cut"]
    with LLM(folder, kv_memory="1MiB", skip_tokenizer_init=True, backend="reference") as llm:
        for output, shares in zip(llm.classify(prompts, use_tqdm=False), found["whole"], strict=True):
            assert output.shares == pytest.approx(shares, rel=1e-4)
    assert set(found["whole"][0]) == set(names)
    if total is not None:
        assert all(sum(shares.values()) == pytest.approx(total) for shares in found["whole"])


def test_settings_and_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    def opened(folder: Path, **settings: Any) -> str:
        with pytest.raises((CheckpointError, InvalidConfigError)) as caught:
            LLM(folder, kv_memory="1MiB", skip_tokenizer_init=True, **settings)
        return str(caught.value)

    assert "3 rows" in opened(write_classifier(tmp_path / "count", 2, id2label={"0": "a", "1": "b", "2": "c"}))
    assert "problem_type" in opened(write_classifier(tmp_path / "kind", 1, problem_type="regression"))
    assert "id2label" in opened(write_classifier(tmp_path / "name", 1, id2label={"0": 7}))
    good = write_classifier(tmp_path / "good", 2)
    assert "score_tokens" in opened(good, score_tokens="a,b")
    for pair in ("a", "a,a", "a,the,of", "a,nothing like a token"):
        with pytest.raises(InvalidConfigError, match="two tokens of the model"):
            LLM("guide", kv_memory="4MiB", score_tokens=pair)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(settings={"score_tokens": PAIR, "pooling": "mean"}) as running:
        yield running


@pytest.fixture(scope="module")
def scores() -> list[float]:
    with LLM("guide", kv_memory="8MiB", num_threads=1, score_tokens=PAIR) as llm:
        return llm.score(QUERY, DOCUMENTS, use_tqdm=False)


def ask(server: RunningServer, path: str, **fields: Any) -> Any:
    answer = server.ask("POST", path, json.dumps(fields).encode(), JSON)
    assert answer.status == 200, answer.error
    return answer.value


def test_scores_over_http(server: RunningServer, scores: list[float]) -> None:
    for path in ("/score", "/v1/score"):
        found = ask(server, path, text_1=QUERY, text_2=DOCUMENTS, model="guide")
        assert [each["score"] for each in found["data"]] == scores
    assert found["object"] == "list" and found["usage"]["prompt_tokens"] == found["usage"]["total_tokens"] > 20
    pairs = ask(server, "/score", text_1=[QUERY] * 4, text_2=DOCUMENTS)
    assert [each["score"] for each in pairs["data"]] == scores
    turned = ask(server, "/score", text_1=DOCUMENTS, text_2=QUERY)
    assert [each["score"] for each in turned["data"]] != scores


def test_documents_are_put_in_order(server: RunningServer, scores: list[float]) -> None:
    expected = sorted(range(4), key=lambda place: -scores[place])
    for path in ("/rerank", "/v1/rerank"):
        found = ask(server, path, query=QUERY, documents=DOCUMENTS)
        assert [each["index"] for each in found["results"]] == expected
        assert [each["relevance_score"] for each in found["results"]] == [scores[place] for place in expected]
        assert [each["document"]["text"] for each in found["results"]] == [DOCUMENTS[place] for place in expected]
    best = ask(
        server,
        "/rerank",
        query=QUERY,
        documents=[{"text": text} for text in DOCUMENTS],
        top_n=2,
        return_documents=False,
    )
    assert best["results"] == [{"index": place, "relevance_score": scores[place]} for place in expected[:2]]
    cohere = ask(server, "/v2/rerank", query=QUERY, documents=DOCUMENTS, top_n=2, model="guide")
    assert cohere["results"] == best["results"], "Cohere sends no texts back"
    assert cohere["meta"]["api_version"] == {"version": "2"} and cohere["meta"]["billed_units"] == {"search_units": 1}
    assert cohere["meta"]["tokens"]["input_tokens"] == found["usage"]["prompt_tokens"]
    many = ask(server, "/v2/rerank", query=QUERY, documents=["A mat."] * 101, return_documents=True)
    assert many["meta"]["billed_units"] == {"search_units": 2} and many["results"][0]["document"] == {"text": "A mat."}
    other = ask(server, "/rerank", query=QUERY, documents=DOCUMENTS, instruction="Find rivers")
    assert other["results"] != found["results"]


def test_labels_over_http(server: RunningServer) -> None:
    found = ask(server, "/classify", input=DOCUMENTS)["data"]
    assert [each["num_classes"] for each in found] == [2] * 4
    for each in found:
        assert each["label"] == PAIR.split(",")[each["probs"][1] > each["probs"][0]]
    ids = ask(server, "/tokenize", prompt=DOCUMENTS[0])["tokens"]
    assert ask(server, "/classify", input=ids)["data"][0]["probs"] == found[0]["probs"]


def test_calls_that_cannot_be_are_refused_by_field(server: RunningServer) -> None:
    def refused(path: str, **fields: Any) -> tuple[int, str]:
        answer = server.ask("POST", path, json.dumps(fields).encode(), JSON)
        return answer.status, answer.error["param"]

    assert refused("/score", text_1=["a", "b"], text_2=["a", "b", "c"]) == (400, "text_2")
    assert refused("/score", text_1=[], text_2="a")[0] == 400
    assert refused("/score", text_1="a", text_2="")[0] == 400
    assert refused("/rerank", query="a", documents=[]) == (400, "documents")
    assert refused("/rerank", query="a", documents=["b", 3]) == (400, "documents[1]")
    assert refused("/rerank", query="a", documents=[{"text": "b", "more": 1}]) == (400, "documents[0]")
    assert refused("/rerank", query="a", documents=["b"], top_n=0) == (400, "top_n")
    assert refused("/rerank", query="a", documents=["b " * 9000])[0] == 400
    assert refused("/classify", input=[]) == (400, "input")
    assert refused("/rerank", query="a", documents=["b"], truncate_prompt_tokens=0) == (400, "truncate_prompt_tokens")
    with running_server() as plain:
        answer = plain.ask("POST", "/classify", json.dumps({"input": "a"}).encode(), JSON)
        assert (answer.status, answer.error["param"]) == (400, "input")
        assert answer.error["message"] == "this model has no labels, so it cannot classify texts"
        answer = plain.ask("POST", "/rerank", json.dumps({"query": "a", "documents": ["b"]}).encode(), JSON)
        assert answer.status == 400 and "--score-tokens" in answer.error["message"]
        assert answer.error["param"] is None


def test_a_long_query_for_many_documents_makes_no_prompts_larger_than_a_body(server: RunningServer) -> None:
    def refusal(path: str, **fields: Any) -> str:
        answer = server.ask("POST", path, json.dumps(fields).encode(), JSON)
        assert answer.status == 400
        return str(answer.error["message"])

    assert "2049 texts" in refusal("/rerank", query="a", documents=["b"] * 2049)
    for fields in ({"query": "a" * 5000}, {"query": "a", "instruction": "a" * 5000}):
        assert "the max_body" in refusal("/rerank", documents=["b"] * 2048, **fields)
    assert "the max_body" in refusal("/score", text_1="a" * 5000, text_2=["b"] * 2048)


def test_a_server_of_vectors_ranks_by_their_cosine() -> None:
    with running_server(settings={"pooling": "mean"}) as running, LLM("guide", pooling="mean", num_threads=1) as llm:
        expected = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
        found = ask(running, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
        assert {each["index"]: each["relevance_score"] for each in found} == dict(enumerate(expected))
        assert found[0]["index"] == 2
