"""A million GGUF files that are broken on purpose: each is a model, or is refused by one typed error of one line.

`make test` tries a few, `make test-long` all, in processes with little memory. To run one again, in tests/:
`python -m support.gguf_trials FOLDER SEED`.
"""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core.errors import CheckpointError
from support.gguf_drafts import U32, Pair, whole_model
from support.gguf_trials import MAX_PEAK_BYTES, Meter, read_whole, run

TESTS = Path(__file__).parents[1]
SOURCE = Path(quire.__file__).parent
NUM_SHARDS, SHARD = 40, 25_000
RARE = (1404, 1587, 1748, 1934, 2045, 3153, 3470, 3510, 3653, 4528, 6196, 7357)
"""Seeds of files that are refused for reasons that no earlier seed has."""

QUIET = {"PYTHONHASHSEED": "0", "RUST_BACKTRACE": "0"}  # a trace of a panic maps the symbols of the library
HANG_S = 300  # without a step from one seed to the next
NOT_REACHED = {
    "a smaller one": "a header of more than 64 MiB",
    "the file has been made shorter": "a file that changes while it is read",
    "raise unreadable": "a file that the system does not let us read",
    "without what {file} says": "a mistake of ours",
    "{len(text)} bytes": "a vocabulary that is larger than its file",
    "scales that do not fit into float16": "weights, which the trials do not read",
    "or the option --weights widened": "the same",
    "scales below 0 or no numbers": "the same",
    "tensor {scale!r}": "a matrix in NVFP4, whose blocks are longer than the rows of the trials",
    "pieces of at most {MAX_CHARACTERS}": "a vocabulary of 4 MiB",
    "pieces whose merges fit": "a vocabulary with more merges than a tokenizer.json may have",
    "tensors up to here": "a quarter of a million tensors in several files",
    "each expert as one": "as many experts, each with tensors",
    "a model of no parts": "a mistake of ours",
    "one size, or twice as much": "a model of several layers",
}
"""Words of a refusal that no small file that stays as it is can bring about → what would."""


def refusals() -> Iterator[tuple[str, set[str], str]]:
    """Yield each place in quire.compute.gguf that refuses a file: what it says, its lines, and its source."""
    for path in sorted((SOURCE / "compute" / "gguf").glob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise) and node.end_lineno is not None:
                name = path.relative_to(SOURCE).as_posix()
                lines = {f"{name}:{line}" for line in range(node.lineno, node.end_lineno + 1)}
                yield f"{name}:{node.lineno}", lines, ast.get_source_segment(text, node) or ""


def not_reached(seen: Counter[str]) -> list[str]:
    """Return the refusals that no mutant brought about, of those that one can."""
    return [
        f"{place} {source}"
        for place, lines, source in refusals()
        if not any(seen[line] for line in lines) and not any(words in source for words in NOT_REACHED)
    ]


def test_each_exception_is_a_refusal() -> None:
    sources = [source for _, _, source in refusals()]
    assert [words for words in NOT_REACHED if not any(words in source for source in sources)] == []


def test_broken_files_are_models_or_are_refused_in_one_line(tmp_path: Path) -> None:
    seen = Counter[str]()
    for seed in (*range(1300), *RARE):
        run(tmp_path, seed, seen, measured=seed % 50 == 0)
    assert seen["a model"] > 80 and seen["a model with images"] > 8 and seen["a chat template that fails"] > 5
    assert len(not_reached(seen)) < 6, not_reached(seen)


def test_experts_that_no_tensor_has_cost_nothing(tmp_path: Path) -> None:
    """They took 90 MB and four million calls, of a file of 5 kB."""
    draws = map(whole_model, map(random.Random, range(100)))
    draft = next(each for each in draws if Pair(b"qwen3moe.expert_count", U32, 3) in each.pairs)
    pair = next(pair for pair in draft.pairs if pair.key == b"qwen3moe.expert_count")
    pair.value = 1 << 16
    path = tmp_path / "m.gguf"
    path.write_bytes(draft.encoded())
    with (
        Meter() as meter,
        pytest.raises(CheckpointError, match="number of experts is 65536; allowed: at most"),
    ):
        read_whole(path)
    assert meter.num_calls < 20_000 and meter.peak_bytes < MAX_PEAK_BYTES


@pytest.mark.long
@pytest.mark.parametrize("shard", range(NUM_SHARDS))
def test_a_million_broken_files(shard: int, tmp_path: Path) -> None:
    """Each shard draws files of its own; `seed` in its folder is the one under way."""
    command = [sys.executable, "-m", "support.gguf_trials", str(tmp_path), str(shard * SHARD), str(SHARD)]
    output, errors = tmp_path / "output", tmp_path / "errors"
    with output.open("wb") as out, errors.open("wb") as err:
        child = subprocess.Popen(command, cwd=TESTS, stdout=out, stderr=err, env=os.environ | QUIET)
    seed, since = "", time.monotonic()
    try:
        while child.poll() is None:
            time.sleep(1)
            now = (tmp_path / "seed").read_text() if (tmp_path / "seed").exists() else ""
            if now != seed:
                seed, since = now, time.monotonic()
            assert time.monotonic() - since < HANG_S, f"seed {seed} hangs"
    finally:
        child.kill()
        child.wait()
    last = (tmp_path / "seed").read_text()
    assert child.returncode == 0, f"seed {last}: exit status {child.returncode}: {errors.read_text()[-2000:]}"
    seen = Counter[str](json.loads(output.read_text()))
    assert not_reached(seen) == []
    print(json.dumps(seen))
