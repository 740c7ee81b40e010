"""Labels against transformers: the shares of a ...ForSequenceClassification, by family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM

FAMILIES = [
    "gemma",
    "gemma2",
    "gpt-neox",
    "gpt2",
    "llama",
    "llama-2",
    "mistral",
    "phi3",
    "qwen2",
    "smollm3",
    "stablelm",
]
PROMPTS = [[3, 9, 27, 5], [(7 * i * i + 3 * i + 1) % 63 + 1 for i in range(60)], [11]]


@pytest.mark.transformers
@pytest.mark.filterwarnings("ignore")  # of models that are not trained
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_labels", [1, 3])
def test_shares_are_those_of_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    import torch
    import transformers

    from support import transformers_models

    config: Any = transformers_models.small_model(name).config
    config.num_labels = num_labels
    torch.manual_seed(3)
    model = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
    model.save_pretrained(tmp_path)
    settings: dict[str, Any] = {"dtype": "float32", "kv_memory": "1MiB", "max_model_len": 64}  # Phi-3's short factors
    with LLM(tmp_path, skip_tokenizer_init=True, num_threads=1, **settings) as llm:
        found = [list(output.shares.items()) for output in llm.classify(PROMPTS, use_tqdm=False)]
        names = llm.report.labels
    for prompt, shares in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt])).logits[0]
        theirs = torch.sigmoid(logits) if num_labels == 1 else torch.softmax(logits, 0)
        ours = [dict(shares)[each] for each in names]
        assert np.allclose(ours, theirs.numpy(), atol=1e-5)
