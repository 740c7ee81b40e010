"""`quire bench quality`: how narrower number types change a model's output.

    every prompt ──► float32 (the reference) ──► logits of each position ──┐
                 └─► each other setting       ──► logits of each position ─┴─► perplexity, KL divergence, agreement

Texts are token ids, preferably of texts that the model was not trained on. They are computed like prompts; nothing is
generated. The perplexity shows how well the model predicts the text. The divergence of a setting's distribution from
the reference shows the change, whatever the text. To add a setting, add a line to SETTINGS.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.compute.backend import WorkerParts
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.model_runner import ModelRunner, StepInputs, StepOutputs
from quire.compute.worker.worker import Worker
from quire.core.byte_sizes import format_bytes
from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.core.request import FinishReason, Request
from quire.core.sampling_params import SamplingParams
from quire.engine.factory import plan_engine
from quire.instruments.bench.flags import add_model, count
from quire.instruments.bench.workload_file import WorkloadError, read_workload
from quire.reporting.report import Section
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import show

Numbers: TypeAlias = NDArray[np.float64]

SETTINGS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("float32", "float32"): {"dtype": "float32", "weights": "widened"},
    ("bfloat16", "bfloat16"): {"dtype": "bfloat16", "weights": "widened"},
    ("int8", "bfloat16"): {"dtype": "bfloat16", "weights": "int8"},
    ("int4", "bfloat16"): {"dtype": "bfloat16", "weights": "int4"},
    ("bfloat16", "int8"): {"dtype": "bfloat16", "weights": "widened", "kv_dtype": "int8"},
    ("bfloat16", "k8v4"): {"dtype": "bfloat16", "weights": "widened", "kv_dtype": "k8v4"},
    ("bfloat16", "int4"): {"dtype": "bfloat16", "weights": "widened", "kv_dtype": "int4"},
    ("int8", "int8"): {"dtype": "bfloat16", "weights": "int8", "kv_dtype": "int8"},
}
"""The number types of weights and of keys and values, with their settings. The first is the reference."""


class EveryLogit:
    """A model runner that computes the logits of every token, and keeps them as log-probabilities."""

    def __init__(self, runner: ModelRunner[Any]) -> None:
        self._runner = runner
        self.found: list[Numbers] = []

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the model."""
        return self._runner.vocab_size

    def run(self, inputs: StepInputs, cache: CacheEngine) -> StepOutputs:
        """Compute one step, and add its logits to `found`."""
        outputs = self._runner.run(replace(inputs, logit_indices=np.arange(len(inputs.token_ids))), cache)
        logits = outputs.logits[:, : self.vocab_size].astype(np.float64)
        self.found.append(log_probabilities(logits))
        wanted = inputs.logit_indices
        return replace(outputs, logits=outputs.logits[wanted], finite_logits=outputs.finite_logits[wanted])


class ReadingEngine:
    """An engine that reads prompts, one at a time, and returns its predictions at each position."""

    def __init__(self, config: EngineConfig) -> None:
        blueprint = plan_engine(config).measured()
        self.weight_bytes = blueprint.backend.facts.weight_bytes
        self._core = blueprint.build(SystemClock(), make_executor=self._make_worker)

    def read(self, prompt: Sequence[int]) -> Numbers:
        """Return the log-probabilities of all next tokens after each token of the prompt: `[length, vocab_size]`."""
        self._watched.found.clear()
        self._core.add_request(Request("text", list(prompt), SamplingParams(temperature=0.0, max_tokens=1)))
        for request in self._core.run():
            if request.finish_reason is FinishReason.ERROR:
                raise ExecutionError(f"a text cannot be read: {request.error}")
        return np.concatenate(self._watched.found)

    def _make_worker(self, parts: WorkerParts) -> Worker:
        self._watched = EveryLogit(parts.runner)
        return Worker(parts.with_runner(self._watched))

    def __enter__(self) -> ReadingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._core.close()


@dataclass(slots=True)
class Quality:
    """The results of a setting, position by position. Grows with `note`."""

    surprises: list[float] = field(default_factory=list)  # -log of the probability of the text's next token
    divergences: list[float] = field(default_factory=list)
    agreements: list[bool] = field(default_factory=list)

    def note(self, prompt: Sequence[int], expected: Numbers, reference: Numbers) -> None:
        """Add the predictions after each token of a prompt. Mutates."""
        self.surprises += (-expected[np.arange(len(prompt) - 1), prompt[1:]]).tolist()
        self.divergences += divergences(reference, expected).tolist()
        self.agreements += (reference.argmax(axis=1) == expected.argmax(axis=1)).tolist()

    @property
    def perplexity(self) -> float:
        """The exponential of the mean surprise."""
        return math.exp(math.fsum(self.surprises) / len(self.surprises))

    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        return (
            f"{self.perplexity:.4f}",
            show(1e3 * float(np.mean(self.divergences))),
            show(1e3 * float(np.percentile(self.divergences, 99))),
            f"{100 * float(np.mean(self.agreements)):.2f} %",
        )


def log_probabilities(logits: Numbers) -> Numbers:
    """Return the logarithms of the softmax of each row.

    >>> np.exp(log_probabilities(np.log([[1.0, 3.0]]))).round(6).tolist()
    [[0.25, 0.75]]
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: Numbers = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


def divergences(reference: Numbers, other: Numbers) -> Numbers:
    """Return the KL divergence of each row of `other` from the reference, in nats.

    >>> one, other = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    >>> divergences(one, other).round(4).tolist(), divergences(one, one).tolist()
    ([0.1438], [0.0])
    """
    found: Numbers = (np.exp(reference) * (reference - other)).sum(axis=1)
    return found


DESCRIPTION = (
    "Read texts with narrower weights, keys and values, and measure perplexity, the divergence of the next-token "
    "distribution from float32's, and how often the likeliest token is the same."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_model(parser)
    parser.add_argument("--workload", metavar="FILE", required=True, help="workload file whose prompts to read")
    parser.add_argument("--limit", metavar="N", type=count, default=0, help="only the first N texts")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    workload = read_workload(options.workload, options.limit)
    prompts = [request.prompt_token_ids for request in workload.requests]
    if all(len(prompt) < 2 for prompt in prompts):
        raise WorkloadError("workload", options.workload, "a file with a prompt of two tokens or more")
    return run_benchmark(options, "Quality", lambda tell: [measure_quality(options.model, prompts, tell)], timed=False)


def measure_quality(model: str, prompts: Sequence[Sequence[int]], tell: Tell) -> Section:
    """Read every prompt with all settings, which are all loaded at once."""
    found = {names: Quality() for names in SETTINGS}
    common = EngineConfig(
        model=model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_model_len=max(map(len, prompts)) + 1,
    )
    with ExitStack() as stack:
        engines = {}
        for names, settings in SETTINGS.items():
            tell(f"loading weights of {names[0]}, keys and values of {names[1]}")
            engines[names] = stack.enter_context(ReadingEngine(replace(common, **settings)))
        for index, prompt in enumerate(prompts):
            if index % 20 == 0:
                tell(f"text {index + 1} of {len(prompts)}")
            expected = {names: engine.read(prompt) for names, engine in engines.items()}
            reference = expected[next(iter(SETTINGS))]
            for names, quality in found.items():
                quality.note(prompt, expected[names], reference)
        rows = [(*names, format_bytes(engines[names].weight_bytes), *found[names].row()) for names in SETTINGS]
    text = (
        f"`{model}` reads {len(prompts)} texts, {sum(map(len, prompts)):,} tokens. The "
        "perplexity is that of the texts. The divergence is from the first row's distribution of the next token to the "
        "setting's, in thousandths of a nat: its mean, and the value below which 99 of 100 positions lie. "
        "The last column is how often the likeliest token is the same."
    )
    header = ("weights", "keys and values", "bytes of weights", "perplexity", "mean KL", "99 % of KL", "same token")
    samples: dict[str, object] = {" + ".join(names): asdict(quality) for names, quality in found.items()}
    return Section("Narrower numbers", text, header, rows, samples)
