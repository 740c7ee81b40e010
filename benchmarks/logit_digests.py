"""Prints a digest of log-probabilities for each instruction set and type of numbers, to compare two builds.

    python benchmarks/logit_digests.py guide MODEL.gguf

Four prompts of random tokens, twelve tokens each, the five likeliest of each place. Two builds that print the same
table compute the same bits. A number stands for itself, so the last bit of any of them changes the digest.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from pathlib import Path

from quire import LLM, SamplingParams
from quire._native import kernel_names
from quire.reporting.report import render_table

FORMS = (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8"), ("bfloat16", "k8v4"), ("bfloat16", "int4"))
LENGTHS = (3, 70, 200, 333)


def digest(model: str, dtype: str, kv_dtype: str) -> str:
    """Return the digest of a model's answers."""
    llm = LLM(model, dtype=dtype, kv_dtype=kv_dtype, kv_memory="256MiB", max_model_len=1024, skip_tokenizer_init=True)
    draw = random.Random(1)
    prompts = [[draw.randrange(5, 800) for _ in range(length)] for length in LENGTHS]
    sampling = SamplingParams(temperature=0.0, max_tokens=12, logprobs=5, ignore_eos=True)
    found = hashlib.sha256()
    for output in llm.generate(prompts, sampling, use_tqdm=False):
        for completion in output.outputs:
            found.update(repr((completion.token_ids, completion.logprobs)).encode())
    llm.close()
    return found.hexdigest()[:12]


def main(models: list[str]) -> int:
    """Print the table; returns the exit status."""
    rows = []
    for model in models:
        for name in kernel_names():
            os.environ["QUIRE_ISA"] = name
            rows.append((Path(model).name, name, *(digest(model, *form) for form in FORMS)))
    forms = (dtype if kv_dtype == "auto" else f"{dtype}, KV {kv_dtype}" for dtype, kv_dtype in FORMS)
    print(render_table(("model", "instruction set", *forms), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["guide"]))
