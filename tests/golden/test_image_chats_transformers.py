"""Whole conversations with images: from bytes to log-probabilities, compared with those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire import LLM, SamplingParams
from support.image_models import PREPARED, write_image_model
from support.image_processors import processor
from support.tiny_images import asked_about, file_of, picture

pytestmark = pytest.mark.transformers
# The processors of LFM2-VL and Gemma 4 12B need torchvision; the weights written here for Qwen3.5 have names that only
# quire takes.
NAMES = [name for name in PREPARED if name not in ("gemma4-unified", "lfm2-vl", "qwen3-5")]
SIZES = [[(90, 60)], [(56, 56), (300, 40), (33, 200)]]


def expected_logprobs(folder: Path, name: str, images: list[Image.Image]) -> tuple[list[int], Any]:
    """Return the tokens of the prompt, and the log-probability of each next token, by transformers."""
    import torch
    import transformers

    theirs = processor(PREPARED[name][0], folder)
    shown = asked_about(*images)
    for part in shown[0]["content"]:
        part.pop("image", None)
    text = theirs.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
    if PREPARED[name][0] in ("GLM-4V", "Gemma 4", "Qwen2-VL"):
        inputs = theirs.inputs(images, text)
    else:
        inputs = theirs(images=images, text=text, return_tensors="pt")
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1]
    return inputs["input_ids"][0].tolist(), torch.log_softmax(logits, -1).numpy()


@pytest.mark.parametrize("sizes", SIZES, ids=["one image", "three images"])
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_those_of_transformers(tmp_path: Path, name: str, sizes: list[tuple[int, int]]) -> None:
    write_image_model(tmp_path, name)
    images = [picture(*size, seed=seed) for seed, size in enumerate(sizes)]
    tokens, expected = expected_logprobs(tmp_path, name, images)
    sampling = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    for backend in ("native", "reference"):
        with LLM(tmp_path, kv_memory="16MiB", num_threads=1, backend=backend, dtype="float32") as llm:
            (output,) = llm.chat(asked_about(*map(file_of, images)), sampling)
        assert list(output.prompt_token_ids) == tokens
        assert output.outputs[0].logprobs is not None
        found = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
        assert len(found) == 20
        np.testing.assert_allclose(list(found.values()), [expected[token] for token in found], atol=2e-3)
        assert max(found, key=found.__getitem__) == int(expected.argmax())
