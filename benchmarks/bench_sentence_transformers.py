r"""sentence-transformers, as its users call it, for `quire bench vectors --peer-python`: runs in its interpreter.

    python benchmarks/bench_sentence_transformers.py \
        --model FOLDER --texts FILE --out FILE --threads N --length N [--dtype DTYPE]

The texts are a JSON list. `encode` sorts them by length and pads each batch, of 32 by default, to its longest text.
Texts are cut at `--length` tokens, as quire cuts them. Prints one line of JSON, with the seconds of `encode` alone,
after a warm-up; the vectors go to a file, as float32. It imports nothing from quire.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the options, make the vectors, and print what it took."""
    parser = argparse.ArgumentParser()
    for name in ("--model", "--texts", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--dtype", default="")
    for name in ("--threads", "--length"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args()
    import sentence_transformers
    import torch

    torch.set_num_threads(options.threads)
    settings: dict[str, Any] = {"dtype": getattr(torch, options.dtype)} if options.dtype else {}
    model = sentence_transformers.SentenceTransformer(options.model, device="cpu", model_kwargs=settings)
    model.max_seq_length = options.length
    texts = json.loads(Path(options.texts).read_text(encoding="utf-8"))
    model.encode(texts[:2])
    started = time.perf_counter()
    vectors = model.encode(texts, show_progress_bar=False)
    seconds = time.perf_counter() - started
    Path(options.out).write_bytes(vectors.astype("<f4").tobytes())
    packages = ("sentence-transformers", "transformers", "torch")
    versions = {name: importlib.metadata.version(name) for name in packages}
    print(json.dumps({"seconds": seconds, "dtype": str(next(model.parameters()).dtype), "versions": versions}))


if __name__ == "__main__":
    main()
