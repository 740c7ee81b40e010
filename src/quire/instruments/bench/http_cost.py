"""The cost of HTTP: the same requests through the engine alone and through a server, in turn.

    engine alone     ids ──► scheduler, decoder ──► ids                       in this process
    over HTTP        JSON ──► server ──► engine's process ──► text ──► SSE    in other processes; this is the client

The order changes from run to run, and ratios are within each run. Unlike a real client, this one shares the processors
with the server. So a second ratio subtracts the client's processor time, as if spread over all processors.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from quire.core.granted import usable_cores
from quire.instruments.bench.load_run import LoadResult, run_batch
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.measured_server import MeasuredServer
from quire.instruments.bench.offered_load import DrawnShape, drawn_requests
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell
from quire.reporting.samples import ratios, summarize

MIN_RATIO = 0.97
MAX_FIRST_TOKEN_MS = 10.0
NUM_FIRST_TOKENS = 5


@dataclass(frozen=True, slots=True)
class OneWay:
    """The result of one way: seconds to the last token of all requests, and to the first token of a single prompt.

    `client_s` and `front_s`: processor time of the client, and of the server's front process.
    """

    wall_s: float
    first_token_s: float
    client_s: float = 0.0
    front_s: float | None = None

    def without_client(self, num_processors: int) -> float:
        """Return the seconds without the client's share of the processors."""
        return self.wall_s - self.client_s / num_processors


def measure_http_cost(server: MeasuredServer, options: argparse.Namespace, tell: Tell) -> Section:
    """Measure throughput at this many streams, and the time to the first token of a prompt, both ways in turn."""
    assert server.config is not None
    source = drawn_requests(
        DrawnShape(options.prompt_tokens, options.output_tokens), server.vocab_size, options.load_seed
    )
    runs: list[tuple[OneWay, OneWay]] = []
    with MeasuredEngine(server.config) as engine:
        engine.warm_up()
        run_batch(server.target, [next(source)])
        for index in range(options.repeat):
            tell(f"cost of HTTP: run {index + 1} of {options.repeat}")
            mine, others = ([next(source) for _ in range(options.streams)] for _ in range(2))
            if index % 2:
                over_http = _over_http(server, others)
                runs.append((_alone(engine, mine), over_http))
            else:
                runs.append((_alone(engine, mine), _over_http(server, others)))
    return _section(runs, options)


def _alone(engine: MeasuredEngine, requests: list[WorkloadRequest]) -> OneWay:
    wall_s = engine.run(requests).wall_s
    first_s = [engine.run([each]).first_token_s["0"] for each in _first_tokens(requests)]
    return OneWay(wall_s, summarize(first_s).median)


def _over_http(server: MeasuredServer, requests: list[WorkloadRequest]) -> OneWay:
    assert server.process is not None
    before_s = server.process.processor_s()
    result = _run(server, requests)
    after_s = server.process.processor_s()
    alone = [_run(server, [each]).outcomes[0] for each in _first_tokens(requests)]
    first_s = [outcome.first_s for outcome in alone]
    front_s = None if before_s is None or after_s is None else after_s - before_s
    return OneWay(result.wall_s, summarize(first_s).median, result.processor_s, front_s)


def _first_tokens(requests: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    """Return prompts of the same length with different first tokens, for one output token each."""
    return [WorkloadRequest(tuple(reversed(each.prompt_token_ids)), 1) for each in requests[:NUM_FIRST_TOKENS]]


def _run(server: MeasuredServer, requests: list[WorkloadRequest]) -> LoadResult:
    result = run_batch(server.target, requests)
    result.require_done(requests[0].max_tokens)
    return result


def _section(runs: Sequence[tuple[OneWay, OneWay]], options: argparse.Namespace) -> Section:
    num_tokens, processors = options.streams * options.output_tokens, usable_cores()
    alone_s, http_s = [alone.wall_s for alone, _ in runs], [http.wall_s for _, http in runs]
    ratio = ratios(alone_s, http_s)
    ratio_without = ratios(alone_s, [http.without_client(processors) for _, http in runs])
    more_ms = [1e3 * (http.first_token_s - alone.first_token_s) for alone, http in runs]
    front_share = [100 * http.front_s / http.wall_s for _, http in runs if http.front_s is not None]
    measures = {
        "the engine alone, tok/s": [num_tokens / seconds for seconds in alone_s],
        "over HTTP, tok/s": [num_tokens / seconds for seconds in http_s],
        "over HTTP to the engine alone": ratio,
        "… with the client's processor time aside": ratio_without,
        "processor time of the client, % of one": [100 * http.client_s / http.wall_s for _, http in runs],
        "… of the process that listens, % of one": front_share,
        "first token, the engine alone, ms": [1e3 * alone.first_token_s for alone, _ in runs],
        "first token, over HTTP, ms": [1e3 * http.first_token_s for _, http in runs],
        "… more than the engine alone, ms": more_ms,
    }
    rows = [(name, cell(summarize(values) if values else None)) for name, values in measures.items()]
    without, more = summarize(ratio_without).median, summarize(more_ms).median
    goals = [
        Goal("over HTTP to the engine alone, the client aside", without, MIN_RATIO, at_least=True),
        Goal("first token over HTTP, more than the engine alone, ms", more, MAX_FIRST_TOKEN_MS),
    ]
    text = (
        f"{options.streams} requests at once, {options.prompt_tokens} tokens of prompt and {options.output_tokens} of "
        f"output each, streamed; then {NUM_FIRST_TOKENS} prompts, one after another. Both ways in turn, median of "
        f"{len(runs)} runs (min–max). The client's time is subtracted as if spread over {processors} processors."
    )
    samples: dict[str, object] = {"alone": [asdict(a) for a, _ in runs], "over HTTP": [asdict(h) for _, h in runs]}
    return Section("What HTTP costs", text, ("what", "value"), rows, samples, goals)
