"""`quire bench structured`: the cost of structured output, over HTTP.

    throughput     many streams at once, without and with a schema that no text of this length can complete, in turn
    first token    one prompt at a time, without and with a schema that is new to the server, in turn

Both kinds draw tokens in the same way (temperature 1, seeds), from prompts without cache hits, and write the same
number of tokens; ratios are within each run. The schema is typical of programs: records with texts, numbers, choices
and lists. As usual, most of its strings have no maximum length: with one, a mask within the string costs several times
as much. The very first schema is reported separately, because it also builds the table of the vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from quire.core.errors import InvalidConfigError
from quire.engine.factory import plan_engine
from quire.instruments.bench.flags import add_count, add_model_options
from quire.instruments.bench.load_run import Target, run_batch
from quire.instruments.bench.measured_server import first_model
from quire.instruments.bench.offered_load import COMPLETIONS, DrawnShape, drawn_requests
from quire.instruments.bench.shapes import measured_config
from quire.instruments.bench.wide_tokenizer import write_wide_tokenizer
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.instruments.http.server_process import ServerProcess
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import ratios, summarize

MAX_COST_PERCENT = 5.0
MAX_MORE_MS = 100.0
LEAST_VOCABULARY = 512
LEAST_RECORDS = 1000
"""More records than fit into any text here, so that no text is complete."""

Schema = dict[str, Any]
TEXT: Final[Schema] = {"type": "string"}


@dataclass(frozen=True, slots=True)
class Pair:
    """One run: seconds of a batch and of first tokens, without and with a schema."""

    free_s: float
    held_s: float
    free_first_s: list[float]
    held_first_s: list[float]


def usual_schema(name: str, least_records: int = 1) -> Schema:
    """Return a schema of typical size, different for each name.

    >>> usual_schema("order")["properties"]["order_list"]["minItems"]
    1
    """
    address = {"street": TEXT, "city": TEXT, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}}
    record = {
        f"{name}_id": {"type": "integer", "minimum": 0, "maximum": 999_999},
        "status": {"enum": ["open", "paid", "shipped", "returned"]},
        "customer": {**TEXT, "description": "Who has ordered."},
        "placed_on": {"type": "string", "format": "date"},
        "total": {"type": "number", "minimum": 0, "maximum": 10_000},
        "is_gift": {"type": "boolean"},
        "tags": {"type": "array", "items": TEXT, "maxItems": 4},
        "address": _object(address),
        "note": {"anyOf": [{"type": "string", "maxLength": 80}, {"type": "null"}]},
    }
    listed = {"type": "array", "items": _object(record), "minItems": least_records}
    return _object({f"{name}_list": listed, "is_complete": {"type": "boolean"}})


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


LONG_SCHEMA: Final = usual_schema("order", LEAST_RECORDS)


DESCRIPTION = (
    "Serve a model and measure the throughput of many streams with and without a schema, and the time to first "
    "token with and without a schema that is new to the server, alternating. A --shape gets a tokenizer with the "
    "shape's number of tokens."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_count(parser, "streams", 32, "requests at once")
    add_count(parser, "prompt-tokens", 128, "tokens per generated prompt")
    add_count(parser, "output-tokens", 128, "tokens per output")
    add_count(parser, "schemas", 5, "new schemas per run")
    add_count(parser, "repeat", 5, "repetitions of each kind")
    parser.add_argument("--load-seed", metavar="N", type=int, default=0, help="random seed of the prompts; default: 0")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        with _serving(options, tell) as (target, vocab_size):
            yield StructuredBench(target, vocab_size, options).measure(tell)

    return run_benchmark(options, "Structured output", measure)


@contextmanager
def _serving(options: argparse.Namespace, tell: Tell) -> Iterator[tuple[Target, int]]:
    """Serve the model during the context; a shape gets a tokenizer with its number of tokens."""
    with measured_config(options) as config:
        vocab_size = plan_engine(replace(config, skip_tokenizer_init=True)).vocab_size
        if options.shape is not None:
            if vocab_size < LEAST_VOCABULARY:
                raise InvalidConfigError("shape", options.shape, f"one of {LEAST_VOCABULARY} tokens or more")
            tell(f"making a tokenizer with {vocab_size:,} tokens")
            write_wide_tokenizer(Path(config.model), vocab_size)
        tell(f"starting a server for {config.model}")
        with ServerProcess(config) as process:
            yield Target(process.url, first_model(process.url), COMPLETIONS), vocab_size


class StructuredBench:
    """Sends requests to one server, without and with a schema in turn; `options` are those of the command."""

    def __init__(self, target: Target, vocab_size: int, options: argparse.Namespace) -> None:
        self._target = target
        self._options = options
        shape = DrawnShape(options.prompt_tokens, options.output_tokens)
        self._source = drawn_requests(shape, vocab_size, options.load_seed)
        self._vocab_size = vocab_size
        self._num_schemas = 0

    def measure(self, tell: Tell) -> Section:
        """Run all pairs, and return the table."""
        self._first_token_s(None)
        very_first_s = self._first_token_s(self._new_schema())
        for schema in (None, LONG_SCHEMA):
            self._batch_s(schema)
        pairs = []
        for index in range(self._options.repeat):
            tell(f"run {index + 1} of {self._options.repeat}")
            pairs.append(self._pair(is_held_first=bool(index % 2)))
        return self._section(pairs, very_first_s)

    def _pair(self, *, is_held_first: bool) -> Pair:
        order = [LONG_SCHEMA, None] if is_held_first else [None, LONG_SCHEMA]
        seconds = {each is not None: self._batch_s(each) for each in order}
        free, held = [], []
        for _ in range(self._options.schemas):
            free.append(self._first_token_s(None))
            held.append(self._first_token_s(self._new_schema()))
        return Pair(seconds[False], seconds[True], free, held)

    def _new_schema(self) -> Schema:
        self._num_schemas += 1
        return usual_schema(f"order_{self._num_schemas}")

    def _batch_s(self, schema: Schema | None) -> float:
        """Run all streams at once; return the seconds to the last token."""
        return self._run([self._request(schema) for _ in range(self._options.streams)])[0]

    def _first_token_s(self, schema: Schema | None) -> float:
        """Run one prompt with two output tokens; return the seconds to the first one."""
        return self._run([replace(self._request(schema), max_tokens=2)])[1]

    def _request(self, schema: Schema | None) -> WorkloadRequest:
        form = {"ignore_eos": True} if schema is None else {"ignore_eos": False, "structured_outputs": {"json": schema}}
        return replace(next(self._source), fields={"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0, **form})

    def _run(self, requests: Sequence[WorkloadRequest]) -> tuple[float, float]:
        result = run_batch(self._target, requests)
        result.require_done(requests[0].max_tokens)
        return result.wall_s, result.outcomes[0].first_s

    def _section(self, pairs: Sequence[Pair], very_first_s: float) -> Section:
        options = self._options
        num_tokens = options.streams * options.output_tokens
        cost = [100 * (ratio - 1) for ratio in ratios([p.held_s for p in pairs], [p.free_s for p in pairs])]
        free_ms, held_ms = (
            [1e3 * summarize(first_s).median for first_s in all_s]
            for all_s in ([p.free_first_s for p in pairs], [p.held_first_s for p in pairs])
        )
        more_ms = [held - free for held, free in zip(held_ms, free_ms, strict=True)]
        measures = {
            "free, tok/s": [num_tokens / pair.free_s for pair in pairs],
            "held to a schema, tok/s": [num_tokens / pair.held_s for pair in pairs],
            "cost of the schema, %": cost,
            "first token, free, ms": free_ms,
            "first token, a new schema, ms": held_ms,
            "… more than free, ms": more_ms,
            "first token, the very first schema, ms": [1e3 * very_first_s],
        }
        goals = [
            Goal(f"cost of a schema at {options.streams} streams, %", summarize(cost).median, MAX_COST_PERCENT),
            Goal("first token with a new schema, more than free, ms", summarize(more_ms).median, MAX_MORE_MS),
        ]
        text = (
            f"{options.streams} streams at once, {options.prompt_tokens} tokens of prompt and {options.output_tokens} "
            f"of output each, over a vocabulary of {self._vocab_size:,}; then {options.schemas} prompts, one after "
            f"another, each with a new schema. Without and with a schema in turn, median of {len(pairs)} runs "
            "(min–max)."
        )
        rows = [(name, cell(summarize(values))) for name, values in measures.items()]
        samples: dict[str, object] = {"runs": [asdict(pair) for pair in pairs], "very_first_s": very_first_s}
        return Section("What a schema costs", text, ("what", "value"), rows, samples, goals)
