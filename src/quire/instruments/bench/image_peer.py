"""Images encoded by quire and by transformers: the same folder and pixels, in the same number of threads.

Their runs alternate, each engine in a process of its own. The rows are compared, too: both must compute the same.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import quire
from quire.core.images import Image
from quire.instruments.bench.peer import Peer
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell
from quire.reporting.samples import ratios, summarize

SCRIPT: Final = Path(quire.__file__).parents[2] / "benchmarks" / "bench_image_encoders.py"
LEAST_SPEED: Final = 1.5
DTYPES: Final = ("float32", "bfloat16")

Encoded = tuple[tuple[NDArray[np.float32], list[float]], Image]


def measure_peer(folder: Path, python: str, encoded: Sequence[Encoded], threads: int, tell: Tell) -> Section:
    """Measure the peer in each type with the images that quire encoded; returns the speed of each."""
    own = [sum(parts) for (_, parts), _ in encoded]
    seconds: dict[str, list[float]] = {"quire": own}
    rows, goals, versions = [("quire", cell(summarize(own)), "", "")], [], ""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as place:
        images = [{"height": image.height, "width": image.width, "pixels": image.pixels.hex()} for _, image in encoded]
        (Path(place) / "images.json").write_text(json.dumps(images), encoding="utf-8")
        for dtype in DTYPES:
            tell(f"transformers: {dtype}")
            out = Path(place) / dtype
            arguments = ["--model", f"{folder}", "--images", f"{place}/images.json", "--out", f"{out}"]
            found: dict[str, Any] = Peer(
                python, f"{SCRIPT}", (*arguments, "--dtype", dtype, "--threads", f"{threads}")
            ).run_script()
            seconds[dtype] = found["seconds"]
            versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
            speed = summarize(ratios(seconds[dtype], own))
            theirs = np.frombuffer(out.read_bytes(), "<f4")
            cosine = _least_cosine([each for (each, _), _ in encoded], theirs)
            rows.append((f"transformers, {dtype}", cell(summarize(seconds[dtype])), cell(speed, "×"), f"{cosine:.4f}"))
        goals.append(Goal("images, speed to transformers in bfloat16", speed.median, LEAST_SPEED, at_least=True))
    text = (
        f"{len(encoded)} images of random pixels, one call each. {versions}. Median (min–max); the cosine is the least "
        "of any row."
    )
    header = ("engine", "s", "quire's speed to it", "cosine to quire's")
    return Section("Encoding next to transformers", text, header, rows, {"s": seconds}, goals)


def _least_cosine(ours: Sequence[NDArray[np.float32]], theirs: NDArray[np.float32]) -> float:
    rows = np.concatenate(ours)
    others = theirs.reshape(rows.shape)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(others, axis=1)
    return float(np.min((rows * others).sum(axis=1) / lengths))
