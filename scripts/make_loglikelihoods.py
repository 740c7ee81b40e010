"""Writes tests/clients/loglikelihoods.json: log-likelihoods of texts by transformers, with the guide in float32.

python scripts/make_loglikelihoods.py        needs torch and transformers
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
GUIDE = ROOT / "src" / "quire" / "guide"
CASES = [
    ("A block table is", " the list of block ids that a sequence holds."),
    ("A block table is", " a kind of furniture for small gardens"),
    ("The memory manager", " frees the blocks."),
    ("Paged attention", " reads the keys and values through the block table."),
    ("Question: What is a block?\nAnswer:", " Room for the keys and values of 16 tokens."),
    ("Question: What is a block?\nAnswer:", " I do not know."),
    ("One", " two three four five six seven eight nine ten"),
    ("A reference count says", " how many block tables hold a block."),
]


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(GUIDE)
    model = AutoModelForCausalLM.from_pretrained(GUIDE, dtype=torch.float32).eval()
    found = []
    for context, continuation in CASES:
        start = len(tokenizer.encode(context))
        tokens = tokenizer.encode(context + continuation)
        with torch.no_grad():
            logprobs = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
        wanted = torch.tensor(tokens[start:])
        told = logprobs[start - 1 : len(tokens) - 1]
        found.append(
            {
                "context": context,
                "continuation": continuation,
                "loglikelihood": float(told[torch.arange(len(wanted)), wanted].sum()),
                "is_greedy": bool((told.argmax(-1) == wanted).all()),
            }
        )
    path = ROOT / "tests" / "clients" / "loglikelihoods.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
