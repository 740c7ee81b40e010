"""A quantised folder answers as the folder does that has the weights it stands for, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from support.quantized_models import FORMS, write_quantized

PROMPT = [(7 * i * i + 3 * i + 5) % 128 for i in range(40)]
SAMPLING = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)


def answer_of(model: Path, **settings: str) -> tuple[Sequence[int], str]:
    """Return the tokens that a model writes, and their log-probabilities."""
    with LLM(str(model), kv_memory="4MiB", skip_tokenizer_init=True, **settings) as llm:
        (output,) = llm.generate([PROMPT], SAMPLING, use_tqdm=False)
    return output.outputs[0].token_ids, str(output.outputs[0].logprobs)


@pytest.mark.parametrize("form", FORMS)
def test_a_quantised_folder_answers_as_the_weights_it_stands_for(form: str, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", form)
    plain = tmp_path / "model-plain"
    assert answer_of(folder, backend="native", dtype="float32") == answer_of(plain, backend="native", dtype="float32")


@pytest.mark.parametrize("form", ["gptq-act-order", "fp8"])
@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "reference"},
        {"backend": "native", "dtype": "bfloat16"},
        {"backend": "native", "dtype": "float32", "weights": "int8"},
        {"backend": "native", "dtype": "float32", "weights": "int4"},
    ],
)
def test_it_does_so_on_every_backend_and_with_weights_made_at_load(
    form: str, settings: dict[str, str], tmp_path: Path
) -> None:
    folder = write_quantized(tmp_path / "model", form)
    assert answer_of(folder, **settings) == answer_of(tmp_path / "model-plain", **settings)


def test_the_start_says_how_the_weights_are_quantised(tmp_path: Path) -> None:
    model = read_model(ModelFolder(write_quantized(tmp_path / "model", "gptq-8")))
    assert model.notices == ("weights quantised by GPTQ, 8 bits: widened while loading",)
    assert model.quantization == "GPTQ, 8 bits"
