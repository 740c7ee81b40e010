"""The layer that guesses against its published definition: a model of one layer in transformers, over joined rows.

row i = fc [norm(embedding of t(i + 1)), norm(h(i))]; h: the states of transformers' model after its final norm
"""

from __future__ import annotations

import copy
import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import SamplingParams
from support.guess_runs import make
from support.tiny_checkpoint import write_model_weights

pytestmark = pytest.mark.transformers

FULL = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
SPARSE = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3-5": FULL,
    "qwen3-5-moe": FULL,
    "qwen3-next": {**FULL, "mlp_only_layers": []},
    "glm4-moe": SPARSE,
    "glm4-moe-lite": {**SPARSE, "mlp_layer_types": ["sparse"]},
    "deepseek-v3": SPARSE,
}
"""The form of a family → the settings of a model with one layer, like the one that guesses."""
TOKENS = [(7 * i * i + 3 * i + 5) % 61 for i in range(40)]

Note = tuple[list[int], "array[int]", NDArray[np.float32]]


def write(name: str, folder: Path) -> tuple[Any, Any, list[Any]]:
    """Write a model with its layer; return both as transformers has them, and the norms and the matrix that join."""
    import torch

    from support.transformers_models import FORMS, model_of, save

    family, settings = FORMS[name]
    model, layer = model_of(family, settings), model_of(family, {**settings, **LAYERS[name]})
    join = torch.nn.Linear(2 * settings["hidden_size"], settings["hidden_size"], bias=False)
    norms = [copy.deepcopy(model.model.norm) for _ in range(2)]
    with torch.no_grad():
        for part in (*norms, join, *layer.parameters()):
            weight = part if isinstance(part, torch.nn.Parameter) else part.weight
            weight.add_(torch.randn(weight.shape) * 0.1)
    save(model, folder)
    tensors = _tensors(folder)
    own = _tensors(save(layer, folder / "layer"))
    is_qwen, count = name.startswith("qwen"), settings["num_hidden_layers"]
    prefix = "mtp." if is_qwen else f"model.layers.{count}."
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    names = names if is_qwen else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    for each, part in zip(names, (*norms, join, layer.model.norm), strict=True):
        tensors[f"{prefix}{each}.weight"] = part.weight.detach().numpy()
    start = "mtp.layers.0." if is_qwen else prefix
    for key, tensor in own.items():
        if key.startswith("model.layers.0."):
            tensors[start + key.removeprefix("model.layers.0.")] = tensor
    write_model_weights(folder, tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | ({} if is_qwen else {"num_nextn_predict_layers": 1})))
    return model, layer, [*norms, join]


def _tensors(folder: Path) -> dict[str, NDArray[np.float32]]:
    from safetensors.numpy import load_file

    tensors: dict[str, NDArray[np.float32]] = load_file(folder / "model.safetensors")
    return tensors


def expected(model: Any, layer: Any, joins: list[Any], text: list[int], made: array[int]) -> NDArray[np.float32]:
    """Return the layer's logits after a text and its guesses so far."""
    import torch

    of_token, of_state, join = joins
    with torch.no_grad():
        states = model.model(torch.tensor([text[:-1]]), use_cache=False).last_hidden_state[0]
        next_tokens = text[1:]
        for guess in [*made, None]:
            embedded = model.model.embed_tokens(torch.tensor(next_tokens))
            rows = join(torch.cat((of_token(embedded), of_state(states)), dim=-1))
            outputs = layer.model(inputs_embeds=rows[None], use_cache=False).last_hidden_state[0]
            if guess is not None:
                states, next_tokens = torch.cat((states, outputs[-1:])), [*next_tokens, guess]
        logits: NDArray[np.float32] = model.lm_head(outputs[-1]).numpy()
    return logits


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "native") for name in LAYERS), ("qwen3-next", "reference"), ("glm4-moe", "torch")]
)
def test_logits_are_those_of_the_published_definition(name: str, backend: str, tmp_path: Path) -> None:
    """Also of guesses after the first, and after guesses that were wrong."""
    model, layer, joins = write(name, tmp_path)
    notes: list[Note] = []
    with make(tmp_path, backend=backend, dtype="float32", speculation="mtp", max_model_len=100) as llm:
        rows = llm.engine._executor._layer
        guess = rows._guess

        def noted(jobs: Any, places: Any, batch: Any) -> Any:
            for index, job in enumerate(jobs):
                logits = rows._layer.logits(np.array(places))[0][index, : model.config.vocab_size].tolist()
                notes.append((list(batch.tokens(job.row)), job.made[:], np.array(logits, np.float32)))
            return guess(jobs, places, batch)

        rows._guess = noted
        prompts = [{"prompt_token_ids": TOKENS}, {"prompt_token_ids": TOKENS[3:20]}]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert len(notes) >= 12 and max(len(made) for _, made, _ in notes) >= 1
    for text, made, logits in notes:
        theirs = expected(model, layer, joins, text, made)
        assert np.abs(logits - theirs).max() <= 5e-4 * max(1.0, float(np.abs(theirs).max()))  # through two models
