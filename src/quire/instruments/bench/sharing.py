"""`quire bench sharing`: the blocks that several texts for one prompt save by sharing.

Prompts and lengths are drawn once, and are the same for samples and beams. A prompt is a piece of a text that the model
itself has written, so that its continuations are realistic. Requests share no blocks: the prefix cache is off. In every
step the ledger counts the blocks in use, and the blocks needed without sharing. The saved share is over all steps, so a
long request counts for as long as it runs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import dataclass

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.llm import LLM
from quire.instruments.bench.flags import add_count, add_model
from quire.reporting.report import Section
from quire.reporting.results import Tell, run_benchmark
from quire.simulate.workload.lengths import ALPACA, SHAREGPT, SPREAD, LognormalLengths

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Trace:
    """Lengths like those of a trace, and the paper's ranges of the saved share for 2 to 6 sequences of OPT-13B."""

    lengths: LognormalLengths
    samples: str
    beams: str


TRACES = (
    Trace(ALPACA, "6.1–9.8 %", "37.6–55.2 %"),
    Trace(SHAREGPT, "16.2–30.5 %", "44.3–66.3 %"),
)
NUM_SEQUENCES = (2, 4, 6)
WHERE_IT_DIFFERS = (
    "Why shares can lie above the paper's range: a small model that knows its text is sure of nearly every token, so "
    "its beams diverge late and share all except their last blocks, and samples sometimes write the same text for a "
    "while, whose full blocks are merged. Also, a short prompt's partly filled block is shared until it is written. "
    "With such lengths six sequences could share up to 5/6 of all blocks; beams of a less certain model diverge "
    "earlier."
)


DESCRIPTION = (
    "Measure the share of blocks that samples and beams of one prompt save by sharing them, for lengths like those of "
    "the traces in the paper."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_model(parser)
    add_count(parser, "requests", 100, "requests for each of the lengths")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    return run_benchmark(
        options, "Sharing", lambda tell: [measure_sharing(options.model, options.requests, tell)], timed=False
    )


def measure_sharing(model: str, num_requests: int, tell: Tell) -> Section:
    """Measure both traces, for samples and for beams."""
    config = EngineConfig(model=model, kv_memory="512MiB", block_size=BLOCK_SIZE, enable_prefix_caching=False)
    rows: list[tuple[str, ...]] = []
    shares: dict[str, float] = {}
    with LLM(config) as llm:
        text = _text_of(llm)
        for trace in TRACES:
            jobs = list(_jobs(trace, num_requests, text, llm.engine.scheduler.limits.max_model_len))
            for kind, papers in (("samples", trace.samples), ("beams", trace.beams)):
                found = []
                for count in NUM_SEQUENCES:
                    tell(f"sharing: {trace.lengths.name}, {count} {kind}")
                    found.append(_share_saved(llm, jobs, count, beam_search=kind == "beams"))
                    shares[f"{trace.lengths.name}, {count} {kind}"] = found[-1]
                prompt, output = (sum(lengths) / len(jobs) for lengths in zip(*_sizes(jobs), strict=True))
                lengths = f"{prompt:.0f} + {output:.0f}"
                rows.append((trace.lengths.name, lengths, kind, *(f"{100 * share:.1f} %" for share in found), papers))
    header = ("lengths like", "mean tokens", "side by side", *map(str, NUM_SEQUENCES), "the paper's range")
    title = "Blocks saved"
    about = (
        f"Share of blocks that {num_requests} requests save because the sequences of a request share blocks, from the "
        f"ledger, over all steps; blocks of {BLOCK_SIZE}, model `{model}`. Lengths are log-normal with the paper's "
        f"means and a standard deviation of {SPREAD} of their logarithm (the traces themselves are not "
        "available); samples at temperature 1, no end before the drawn length. The paper's figures are for 2 to 6 "
        f"sequences of OPT-13B on the traces.\n\n{WHERE_IT_DIFFERS}"
    )
    return Section(title, about, header, rows, {"share_saved": shares})


def _text_of(llm: LLM) -> list[int]:
    """Return a long text written by the model."""
    length = llm.engine.scheduler.limits.max_model_len - 1
    sampling = SamplingParams(seed=0, max_tokens=length, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [1]}], sampling, use_tqdm=False)
    return output.outputs[0].token_ids


def _jobs(trace: Trace, num_requests: int, text: list[int], longest: int) -> Iterator[tuple[list[int], int]]:
    rng = random.Random(trace.lengths.name)
    for _ in range(num_requests):
        prompt, output = trace.lengths.draw(rng, min(longest, len(text)))
        start = rng.randrange(len(text) - prompt + 1)
        yield text[start : start + prompt], output


def _sizes(jobs: list[tuple[list[int], int]]) -> list[tuple[int, int]]:
    return [(len(prompt), output) for prompt, output in jobs]


def _share_saved(llm: LLM, jobs: list[tuple[list[int], int]], count: int, *, beam_search: bool) -> float:
    engine = llm.engine
    for number, (prompt, output) in enumerate(jobs):
        sampling = SamplingParams(
            n=count,
            beam_search=beam_search,
            temperature=0.0 if beam_search else 1.0,
            seed=1000 * number,
            max_tokens=output,
            ignore_eos=True,
        )
        engine.add_request(Request(f"{number}", prompt, sampling))
    saved = total = 0
    while engine.step() is not None:
        ledger = engine.scheduler.memory.ledger()
        saved += ledger.blocks_saved_by_sharing
        total += ledger.blocks_saved_by_sharing + ledger.used_blocks
    return saved / total
