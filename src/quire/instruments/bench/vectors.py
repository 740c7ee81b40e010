"""`quire bench vectors`: the speed of embeddings, and the savings of a reranker by the prefix cache.

vectors    texts of one length, enough for many steps: tokens a second, compared with the machine's arithmetic
rerank     a long query with each of many documents: with the prefix cache, and without
peer       paragraphs of documents, compared with sentence-transformers, if an interpreter has it
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from quire.cli.machine_limits import limits_of
from quire.core.config import EngineConfig
from quire.core.pooling import Pooling
from quire.instruments.bench.flags import add_choices, add_count, add_model_options, add_size
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.model_costs import model_costs
from quire.instruments.bench.sentence_peer import complete_folder, measure_peer, paragraphs
from quire.instruments.bench.shapes import CONFIGS, measured_config
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import ratios, summarize

LEAST_ARITHMETIC: Final = 75.0
LEAST_GAIN: Final = 2.0
DOCUMENT: Final = 64
PARTS: Final = ("vectors", "rerank", "peer")
LAST: Final = Pooling("last")

DESCRIPTION = "Measure the speed of embeddings, and of a reranker with and without the prefix cache."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_count(parser, "repeat", 5, "runs of each kind")
    add_count(parser, "texts", 64, "texts per run")
    add_count(parser, "length", 128, "tokens of each text")
    add_count(parser, "documents", 50, "documents that a reranker reads")
    add_count(parser, "query", 512, "tokens of the reranker's query")
    add_count(parser, "peer-texts", 64, "paragraphs that both engines embed")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="Python interpreter with sentence-transformers; none: quire only"
    )
    parser.add_argument(
        "--prose", metavar="FOLDER", default="docs", help="folder of Markdown files with the paragraphs"
    )
    add_choices(parser, "only", PARTS, PARTS, "measure only these parts")
    add_size(parser, "read-size", "64MiB", "amount of memory to read when measuring the machine")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_config(options) as config:
            own = replace(config, touch_kv_memory="start")
            if "vectors" in options.only:
                yield measure_vectors(own, options, tell)
            if "rerank" in options.only and MeasuredEngine(own).generates:  # an encoder caches no prefix
                yield measure_rerank(own, options, tell)
            if "peer" not in options.only or options.peer_python is None:
                return
            texts = paragraphs(Path(options.prose), options.peer_texts)
            if options.shape is not None:
                complete_folder(Path(config.model), CONFIGS[options.shape])
            yield measure_peer(own, options.peer_python, texts, options.repeat, tell)

    return run_benchmark(options, "Vectors", measure)


def measure_vectors(config: EngineConfig, options: argparse.Namespace, tell: Tell) -> Section:
    """Measure texts that share nothing, and the arithmetic of the machine before each run."""
    rates, shares = list[float](), list[float]()
    count, length = options.texts, options.length
    with MeasuredEngine(replace(config, enable_prefix_caching=False)) as engine:
        facts = engine.blueprint.backend.facts
        costs, limits = model_costs(engine.blueprint.model, facts), limits_of(facts, options.read_size)
        engine.warm_up()
        for index in range(options.repeat):
            tell(f"vectors: run {index + 1} of {options.repeat}")
            arithmetic = limits.arithmetic()
            texts = [_text(index * count + each, length, engine.vocab_size) for each in range(count)]
            seconds = engine.run(texts).wall_s
            rates.append(count * length / seconds)
            if costs is not None and arithmetic is not None:
                shares.append(100 * count * costs.vector_operations(length) / seconds / arithmetic)
    share = summarize(shares) if shares else None
    goals = []
    if share is not None:
        goals.append(Goal("vectors: % of the arithmetic", share.median, LEAST_ARITHMETIC, at_least=True))
    text = (
        f"{count} texts of {length} tokens, pooled from the last token; steps of at most "
        f"{config.resolved().max_num_batched_tokens} tokens. The arithmetic is that of {limits.name} on registers, "
        f"measured right before. Median of {options.repeat} runs (min–max)."
    )
    row = (f"{count} × {length}", cell(summarize(rates)), cell(share))
    header = ("texts", "tok/s", "% of the arithmetic")
    return Section("Vectors of texts", text, header, [row], {"tok/s": rates, "%": shares}, goals)


def measure_rerank(config: EngineConfig, options: argparse.Namespace, tell: Tell) -> Section:
    """Measure one query with all documents, in turn with an initially empty cache and without a cache."""
    found: dict[str, list[float]] = {"without": [], "with": []}
    for index in range(options.repeat):
        tell(f"rerank: run {index + 1} of {options.repeat}")
        for kind, seconds in found.items():
            with MeasuredEngine(replace(config, enable_prefix_caching=kind == "with")) as engine:
                engine.warm_up()
                query = _text(10_000 + index, options.query, engine.vocab_size).prompt_token_ids
                pairs = [
                    replace(text, prompt_token_ids=query + text.prompt_token_ids)
                    for text in (_text(each, DOCUMENT, engine.vocab_size) for each in range(options.documents))
                ]
                seconds.append(engine.run(pairs).wall_s)
    gain = summarize(ratios(found["without"], found["with"]))
    rows = [
        ("without", cell(summarize(found["without"])), ""),
        ("with", cell(summarize(found["with"])), cell(gain, "×")),
    ]
    text = (
        f"A query of {options.query} tokens with each of {options.documents} documents of {DOCUMENT}; the cache is "
        f"empty at the start. Median of {options.repeat} runs (min–max)."
    )
    goals = [Goal("rerank with the cache to without, speed", gain.median, LEAST_GAIN, at_least=True)]
    return Section("A reranker and the prefix cache", text, ("prefix cache", "s", "speed"), rows, {"s": found}, goals)


def _text(seed: int, num_tokens: int, vocab_size: int) -> WorkloadRequest:
    tokens = random.Random(seed).choices(range(vocab_size), k=num_tokens)
    return WorkloadRequest(tuple(tokens), 1, pooling=LAST)
