"""Embeddings of real texts, compared with sentence-transformers: the same folder and texts, each with its usual calls.

The texts are paragraphs of documents, so their lengths differ. Both tokenize, both have the same number of threads, and
their runs alternate. The vectors are compared, too: both must compute the same.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import quire
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.engine.llm import LLM
from quire.engine.text.tokenizer_files import TOKENIZER_FILE
from quire.guide import GUIDE_FOLDER
from quire.instruments.bench.peer import Peer
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell
from quire.reporting.samples import ratios, summarize

SCRIPT: Final = Path(quire.__file__).parents[2] / "benchmarks" / "bench_sentence_transformers.py"
LEAST_SPEED: Final = 2.0
LEAST_CHARACTERS, MOST_CHARACTERS = 40, 2000
KINDS: Final = {"as users call it": "", "float32": "float32", "bfloat16": "bfloat16"}
"""The types in which the peer computes."""

MODULES: Final = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))


def paragraphs(folder: Path, count: int) -> list[str]:
    """Return paragraphs of the Markdown files below a folder, spread over all files."""
    texts = [part.strip() for path in sorted(folder.rglob("*.md")) for part in re.split(r"\n\s*\n", path.read_text())]
    found = [text for text in dict.fromkeys(texts) if LEAST_CHARACTERS <= len(text) <= MOST_CHARACTERS]
    if len(found) < count:
        raise InvalidConfigError("peer_texts", count, f"at most the {len(found)} paragraphs below {folder}")
    return found[:: len(found) // count][:count]


def complete_folder(folder: Path, settings: Mapping[str, object]) -> None:
    """Add the files that sentence-transformers needs to a folder of random weights: the guide's tokenizer, pooling."""
    guide = GUIDE_FOLDER
    for name in (TOKENIZER_FILE, "tokenizer_config.json"):
        shutil.copy(guide / name, folder / name)
    modules = [
        {"idx": index, "name": f"{index}", "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(MODULES)
    ]
    pooling = {"word_embedding_dimension": settings["hidden_size"], "pooling_mode_lasttoken": True}
    for name, content in (("modules.json", modules), ("1_Pooling/config.json", pooling)):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def measure_peer(config: EngineConfig, python: str, texts: Sequence[str], repeat: int, tell: Tell) -> Section:
    """Measure quire, then the peer in each type, in turn; returns the speed of each."""
    seconds: dict[str, list[float]] = {kind: [] for kind in ("quire", *KINDS)}
    notes, least = dict[str, Any](), dict[str, float]()
    own = replace(config, enable_prefix_caching=False)
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as folder, LLM(own) as llm:
        length = str(llm.report.plan.max_model_len)
        place, out = Path(folder) / "texts.json", Path(folder) / "vectors"
        place.write_text(json.dumps(texts), encoding="utf-8")
        threads = str(llm.report.num_threads)
        arguments = (
            "--model",
            config.model,
            "--texts",
            f"{place}",
            "--out",
            f"{out}",
            "--threads",
            threads,
            "--length",
            length,
        )
        llm.embed(texts[:2], use_tqdm=False, truncate=True)
        for index in range(repeat):
            tell(f"sentence-transformers: run {index + 1} of {repeat}")
            started = time.perf_counter()
            outputs = llm.embed(texts, use_tqdm=False, truncate=True)
            seconds["quire"].append(time.perf_counter() - started)
            ours = np.array([output.embedding for output in outputs])
            lengths = [len(output.prompt_token_ids) for output in outputs]
            for kind, dtype in KINDS.items():
                chosen = (*arguments, "--dtype", dtype) if dtype else arguments
                notes[kind] = Peer(python, f"{SCRIPT}", chosen).run_script()
                seconds[kind].append(notes[kind]["seconds"])
                theirs = np.frombuffer(out.read_bytes(), "<f4").reshape(ours.shape)
                least[kind] = float(np.min(_cosines(ours, theirs)))
    return _section(seconds, lengths, notes, least)


def _cosines(ours: NDArray[np.float64], theirs: NDArray[np.float32]) -> NDArray[np.float64]:
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    cosines: NDArray[np.float64] = (ours * theirs).sum(axis=1) / lengths
    return cosines


def _section(
    seconds: dict[str, list[float]], lengths: Sequence[int], notes: dict[str, Any], least: dict[str, float]
) -> Section:
    total = sum(lengths)
    rows = [("quire", "", cell(summarize([total / each for each in seconds["quire"]])), "", "")]
    goals = []
    for kind in KINDS:
        speed = summarize(ratios(seconds[kind], seconds["quire"]))
        rate = cell(summarize([total / each for each in seconds[kind]]))
        dtype = notes[kind]["dtype"].removeprefix("torch.")
        rows.append((f"sentence-transformers, {kind}", dtype, rate, cell(speed, "×"), f"{least[kind]:.4f}"))
        if not KINDS[kind]:
            goals.append(Goal("vectors, speed to sentence-transformers", speed.median, LEAST_SPEED, at_least=True))
    versions = ", ".join(f"{name} {version}" for name, version in next(iter(notes.values()))["versions"].items())
    text = (
        f"{len(lengths)} paragraphs of {min(lengths)} to {max(lengths)} tokens, {total:,} in total, one call each, "
        f"tokenized and pooled as the folder says; the peer uses batches of 32. {versions}. Median of "
        f"{len(seconds['quire'])} runs (min–max); the cosine is the least of any text."
    )
    header = ("engine", "computes in", "tok/s", "quire's speed to it", "cosine to quire's")
    return Section("Vectors of real texts next to sentence-transformers", text, header, rows, {"s": seconds}, goals)
