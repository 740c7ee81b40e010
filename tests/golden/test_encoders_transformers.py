"""Encoders against transformers: hidden states of a text, as vectors of each pooling.

Against numbers that transformers gave once (`scripts/make_goldens.py encoders`), on both CPU engines.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import LLM
from support.tiny_bert import tokenizer_json

DATA = Path(__file__).parent / "data" / "encoders"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text())
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "dtype": "float32", "kv_memory": "2MiB", "num_threads": 2}


def assert_near(ours: list[float], theirs: list[float]) -> None:
    """Compare a vector of length 1 with hidden states."""
    numbers: NDArray[np.float64] = np.array(theirs)
    assert np.abs(np.array(ours) - numbers / np.linalg.norm(numbers)).max() < 2e-6


def folder_of(name: str, folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CASES["forms"][name]["config"]))
    shutil.copy(DATA / f"{name}.safetensors", folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("name", CASES["forms"])
def test_vectors_are_those_that_transformers_gave(name: str, backend: str, tmp_path: Path) -> None:
    form, tokens = CASES["forms"][name], CASES["tokens"]
    expected = {"cls": form["states"]["0"], "last": form["states"][str(len(tokens) - 1)], "mean": form["mean"]}
    with LLM(folder_of(name, tmp_path), backend=backend, **SETTINGS) as llm:
        for pooling, theirs in expected.items():
            assert_near(llm.embed([tokens], pooling=pooling, use_tqdm=False)[0].embedding, theirs)


@pytest.mark.transformers
@pytest.mark.parametrize("name", CASES["forms"])
def test_a_folder_of_transformers_gives_its_vectors(name: str, tmp_path: Path) -> None:
    from support import transformers_models

    model = transformers_models.small_encoder(name)
    texts = [[2 + (5 * i * i + 3 * i + length) % 61 for i in range(length)] for length in (1, 31, 64, 190)]
    with LLM(transformers_models.save(model, tmp_path), **SETTINGS) as llm:
        outputs = llm.embed(texts, pooling="mean", use_tqdm=False)
    for text, output in zip(texts, outputs, strict=True):
        assert_near(output.embedding, transformers_models.hidden_states(model, text).mean(axis=0).tolist())


@pytest.mark.transformers
@pytest.mark.parametrize(
    "name", ["bert", "distil-bert", "euro-bert", "jina-embeddings-v3", "modern-bert", "mpnet", "xlm-roberta"]
)
def test_a_folder_with_a_head_for_masked_tokens_gives_its_vectors(name: str, tmp_path: Path) -> None:
    import transformers

    from support import transformers_models

    config = transformers_models.small_encoder(name).config
    config.architectures = [config.architectures[0].replace("Model", "ForMaskedLM")]
    model = transformers_models.tiny_model(config.architectures[0], config)
    assert isinstance(model, transformers.PreTrainedModel)
    text = [2 + (5 * i * i + 3 * i) % 61 for i in range(100)]
    with LLM(transformers_models.save(model, tmp_path), **SETTINGS) as llm:
        (output,) = llm.embed([text], pooling="mean", use_tqdm=False)
    states = transformers_models.hidden_states(model.base_model, text)
    assert_near(output.embedding, states.mean(axis=0).tolist())


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")  # of models that are not trained
@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("Bert", {}),
        ("DistilBert", {}),
        ("EuroBert", {}),
        ("EuroBert", {"classifier_pooling": "bos"}),
        ("EuroBert", {"classifier_pooling": "mean", "attention_bias": True, "mlp_bias": True}),
        ("JinaEmbeddingsV3", {"model_type": "jina_embeddings_v3"}),  # by which it names its tensors
        ("MPNet", {"max_position_embeddings": 258}),
        ("ModernBert", {"local_attention": 4, "num_hidden_layers": 4}),
        ("ModernBert", {"classifier_pooling": "mean", "classifier_activation": "silu", "classifier_bias": True}),
        ("ModernBert", {"classifier_activation": "gelu_pytorch_tanh", "norm_bias": True, "mlp_bias": True}),
        ("XLMRoberta", {}),
    ],
)
def test_scores_of_pairs_are_those_of_transformers(
    family: str, own: dict[str, object], num_labels: int, tmp_path: Path
) -> None:
    """The second text of a pair has the second token type, if the model has one."""
    import tokenizers
    import torch
    import transformers

    from support import transformers_models

    settings = {**CASES["forms"]["bert"]["config"], "type_vocab_size": 2 if family == "Bert" else 1}
    settings |= {"pad_token_id": 0, "id2label": {number: f"label {number}" for number in range(num_labels)}}
    config = getattr(transformers, f"{family}Config")(**settings | own)
    config.architectures = [f"{family}ForSequenceClassification"]
    model = transformers_models.tiny_model(config.architectures[0], config)
    folder = transformers_models.save(model, tmp_path)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.no_truncation()
    pairs = [("what a block", "tables"), ("what a block", "a river page a river"), ("rivers", "a")]
    options = {key: value for key, value in SETTINGS.items() if key != "skip_tokenizer_init"}
    with LLM(folder, **options) as llm:
        ours = [llm.score(*pair, use_tqdm=False)[0] for pair in pairs]
    for pair, score in zip(pairs, ours, strict=True):
        encoded = library.encode(*pair)
        types = torch.tensor([encoded.type_ids]) if family == "Bert" else None
        with torch.no_grad():
            logits = model(torch.tensor([encoded.ids]), token_type_ids=types).logits[0]
        shares = torch.sigmoid(logits) if num_labels == 1 else torch.softmax(logits, 0)
        assert score == pytest.approx(float(shares[0]), abs=1e-6)
