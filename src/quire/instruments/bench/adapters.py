"""`quire bench adapters`: the slowdown of steps by adapters.

none      no row has an adapter
one       all rows have the same adapter
each      every row has a different adapter
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from quire.compute.adapters.folder import WEIGHTS_FILE
from quire.compute.adapters.places import modules_of
from quire.compute.adapters.settings import SETTINGS_FILE
from quire.compute.models.base import DecoderSpec
from quire.core.byte_sizes import format_bytes
from quire.core.config import EngineConfig
from quire.engine.factory import plan_engine
from quire.instruments.bench.flags import add_count, add_model_options
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.shapes import measured_config
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import percentile, ratios, summarize

KINDS: Final = ("none", "one", "each")
LEAST_SPEED: Final = {"one": 0.93, "each": 0.80}
CONTEXT: Final = 256
OUTPUT: Final = 48

DESCRIPTION = "Measure decode steps and a prompt without adapters, with one adapter, and with one for each row."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_count(parser, "repeat", 5, "runs of each kind")
    add_count(parser, "rows", 8, "sequences that decode together, and adapters")
    add_count(parser, "rank", 16, "rank of the adapters, for all matrices")
    add_count(parser, "prompt", 512, "tokens of the prompt")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_config(options) as config, tempfile.TemporaryDirectory(prefix="quire-adapters-") as name:
            spec = plan_engine(replace(config, skip_tokenizer_init=True)).model.spec
            folders = {f"a{index}": Path(name) / str(index) for index in range(options.rows)}
            for index, folder in enumerate(folders.values()):
                write_random_adapter(folder, spec, options.rank, seed=index)
            named = tuple(f"{name}={folder}" for name, folder in folders.items())
            own = replace(config, adapter=named, touch_kv_memory="start", enable_prefix_caching=False)
            yield measure_steps(own, options.prompt, options.repeat, tell)

    return run_benchmark(options, "Adapters", measure)


def measure_steps(config: EngineConfig, num_tokens: int, repeat: int, tell: Tell) -> Section:
    """Measure each kind in turn, run by run, in one engine."""
    gaps: dict[str, list[float]] = {kind: [] for kind in KINDS}
    firsts: dict[str, list[float]] = {kind: [] for kind in KINDS[:2]}
    with MeasuredEngine(config) as engine:
        digests, blueprint = [each.digest for each in engine.blueprint.adapters.values()], engine.blueprint
        adapter_bytes = blueprint.backend.facts.adapter_bytes
        engine.warm_up()
        for index in range(repeat):
            tell(f"adapters: run {index + 1} of {repeat}")
            for kind in KINDS:
                rows = [_request(digest, CONTEXT, OUTPUT, engine.vocab_size) for digest in _digests(kind, digests)]
                gaps[kind].append(1e3 * percentile(engine.run(rows).gaps_s, 0.5))
            for kind in KINDS[:2]:
                (digest,) = _digests(kind, digests[:1])
                prompt = _request(digest, num_tokens, 1, engine.vocab_size)
                firsts[kind].append(1e3 * engine.run([prompt]).wall_s)
    speeds = {kind: summarize(ratios(gaps["none"], gaps[kind])) for kind in KINDS[1:]}
    prompts = summarize(ratios(firsts["none"], firsts["one"]))
    rows_of_table = [
        (kind, cell(summarize(gaps[kind])), cell(speeds.get(kind), "×"), cell(summarize(firsts[kind])), shown)
        for kind, shown in (("none", ""), ("one", cell(prompts, "×")))
    ]
    rows_of_table.append(("each", cell(summarize(gaps["each"])), cell(speeds["each"], "×"), "", ""))
    goals = [
        Goal(
            f"decode of {len(digests)} rows, adapters: {kind}; speed to none", speeds[kind].median, least, at_least=True
        )
        for kind, least in LEAST_SPEED.items()
    ]
    rank = max((adapter.rank for adapter in blueprint.model.adapters.values()), default=0)
    text = (
        f"{len(digests)} sequences decode {OUTPUT} tokens after {CONTEXT}; then a prompt of {num_tokens:,}. Adapters "
        f"of rank {rank} for all matrices, {format_bytes(adapter_bytes)} in total. Median of {repeat} runs (min–max)."
    )
    header = ("adapters", "decode step, ms", "speed to none", f"prompt of {num_tokens:,}, ms", "speed to none")
    return Section("Steps with adapters", text, header, rows_of_table, {"gap_ms": gaps, "prompt_ms": firsts}, goals)


def write_random_adapter(folder: Path, spec: DecoderSpec, rank: int, seed: int) -> None:
    """Write an adapter with random numbers for every matrix of a model that adapters support."""
    folder.mkdir()
    generator = np.random.default_rng(seed)
    tensors: dict[str, tuple[int, int]] = {}
    for name, (module, *_) in modules_of(spec).items():
        if not module.count:
            for which, shape in module.shapes(rank).items():
                tensors[f"base_model.model.{name}.lora_{which}.weight"] = shape
    header, end = dict[str, object](), 0
    for name, shape in tensors.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    numbers = generator.normal(0.0, 0.02, end // 4).astype("<f4").tobytes()
    (folder / WEIGHTS_FILE).write_bytes(len(text).to_bytes(8, "little") + text + numbers)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings), encoding="utf-8")


def _digests(kind: str, digests: list[str]) -> list[str]:
    """Return the adapter of each row."""
    if kind == "none":
        return [""] * len(digests)
    return digests[:1] * len(digests) if kind == "one" else digests


def _request(digest: str, num_tokens: int, max_tokens: int, vocab_size: int) -> WorkloadRequest:
    tokens = random.Random(num_tokens).choices(range(vocab_size), k=num_tokens)
    return WorkloadRequest(tuple(tokens), max_tokens, adapter=digest)
