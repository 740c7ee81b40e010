"""Writes tests/golden/data/qwen3: a tiny Qwen3 and the logits that transformers gives for it.

Run it where torch and transformers are installed:  python scripts/make_goldens.py
One file of weights (rounded to bfloat16, to be small) serves all forms: tied forms ignore its head.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support.transformers_models import all_logits, greedy, tiny_qwen3_model  # noqa: E402

FOLDER = ROOT / "tests" / "golden" / "data" / "qwen3"
TOKENS = [(11 * i * i + 5 * i + 3) % 128 for i in range(140)]
POSITIONS = (0, 1, 23, 24, 63, 64, 127, 139)
WINDOWS = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
FORMS: dict[str, dict[str, Any]] = {
    "untied": {"tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "untied-windows": {"tie_word_embeddings": False, **WINDOWS},
    "tied-windows": {"tie_word_embeddings": True, **WINDOWS},
}


def main() -> None:
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in tiny_qwen3_model(**FORMS["untied"]).state_dict().items()
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file(weights, FOLDER / "model.safetensors", metadata={"format": "pt"})
    (FOLDER / "model.safetensors").chmod(0o644)
    cases = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "tokens": TOKENS,
        "forms": {name: run_form(settings, weights) for name, settings in FORMS.items()},
    }
    (FOLDER / "cases.json").write_text(json.dumps(cases, indent=None, separators=(",", ":")) + "\n")


def run_form(settings: dict[str, Any], weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = tiny_qwen3_model(**settings)
    mine = {name: tensor.float() for name, tensor in weights.items()}
    if settings["tie_word_embeddings"]:
        mine["lm_head.weight"] = mine["model.embed_tokens.weight"]
    model.load_state_dict(mine)
    logits = all_logits(model, TOKENS)
    config = model.config.to_dict()
    return {
        "config": {name: value for name, value in sorted(config.items()) if value is not None},
        "best": logits.argmax(axis=1).tolist(),
        "greedy": greedy(model, TOKENS, 24),
        "logits": {str(position): [round(float(logit), 6) for logit in logits[position]] for position in POSITIONS},
    }


if __name__ == "__main__":
    main()
