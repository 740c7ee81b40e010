"""The effect of a long prompt on running requests: the time between their tokens, before the prompt and during it.

    chats     ├ token ┼ token ┼ token ┼──── token ────┼──── token ────┼ …
    prompt                             ├ chunk ────────┼ chunk ────────┤ first token

A chunk of the prompt uses the rest of a step's budget after the chats. So the result depends mainly on the settings
`max_num_batched_tokens` and `itl_slo_ms`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from quire.engine.commands import Abort
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell
from quire.reporting.samples import percentile, ratios, summarize

CHAT_TOKENS = 64
MAX_TO_MEDIAN = 2.0
LONG_PROMPT = "prompt"

DrawPrompt = Callable[[int], tuple[int, ...]]


@dataclass(slots=True)
class DisturbedRun:
    """Seconds between tokens of one chat, before the prompt and during it; and seconds to the prompt's first token."""

    quiet_s: list[float] = field(default_factory=list)
    disturbed_s: list[float] = field(default_factory=list)
    first_token_s: float = 0.0


def measure_disturbance(
    engine: MeasuredEngine, sizes: tuple[int, int, int], repeat: int, draw_prompt: DrawPrompt, tell: Tell
) -> Section:
    """Run chats, and then add a prompt; `sizes`: chats, tokens of the prompt, steps before the prompt."""
    num_chats, prompt_tokens, num_steps = sizes
    runs = []
    for index in range(repeat):
        tell(f"chats during a prompt: run {index + 1} of {repeat}")
        runs.append(disturbed_run(engine, sizes, draw_prompt))
    quiet = [summarize(run.quiet_s).median for run in runs]
    meanwhile = [summarize(run.disturbed_s).median for run in runs]
    slowest = [percentile(run.disturbed_s, 0.99) for run in runs]
    to_median = summarize(ratios(slowest, meanwhile))
    rows = [
        ("between tokens, no prompt: median, ms", cell(summarize([1e3 * seconds for seconds in quiet]))),
        ("between tokens, meanwhile: median, ms", cell(summarize([1e3 * seconds for seconds in meanwhile]))),
        ("between tokens, meanwhile: p99, ms", cell(summarize([1e3 * seconds for seconds in slowest]))),
        ("p99 to the median meanwhile", cell(to_median, "×")),
        ("p99 to the median without a prompt", cell(summarize(ratios(slowest, quiet)), "×")),
        ("first token of the prompt, s", cell(summarize([run.first_token_s for run in runs]))),
    ]
    config = engine.blueprint.config
    allowed = "" if config.itl_slo_ms is None else f"; the target is {config.itl_slo_ms:g} ms between tokens"
    text = (
        f"{num_chats} chats decode; after {num_steps} steps a prompt of {prompt_tokens:,} tokens arrives; a step "
        f"computes at most {config.max_num_batched_tokens:,} tokens{allowed}. Median of {repeat} runs (min–max)."
    )
    label = f"{num_chats} chats during a prompt of {prompt_tokens:,}: p99 to the median meanwhile"
    goals = [Goal(label, to_median.median, MAX_TO_MEDIAN)]
    samples: dict[str, object] = {"runs": [asdict(run) for run in runs]}
    return Section("Chats during a prompt", text, ("what", "value"), rows, samples, goals)


def disturbed_run(engine: MeasuredEngine, sizes: tuple[int, int, int], draw_prompt: DrawPrompt) -> DisturbedRun:
    """Run chats until a prompt that arrives after some steps has its first token. Mutates the engine."""
    num_chats, prompt_tokens, num_steps = sizes
    client, most = engine.client, engine.client.limits.max_model_len
    run, last_s = DisturbedRun(), dict[str, float]()
    for index in range(num_chats):
        engine.add(str(index), WorkloadRequest(draw_prompt(CHAT_TOKENS), most - CHAT_TOKENS), seed=index)

    def step(gaps: list[float]) -> bool:
        """Run a step; return whether the prompt has its first token."""
        updates, now = client.receive(), time.perf_counter()
        for update in updates:
            if update.request_id != LONG_PROMPT:
                if update.request_id in last_s:
                    gaps.append(now - last_s[update.request_id])
                last_s[update.request_id] = now
        return any(update.request_id == LONG_PROMPT for update in updates)

    while len(last_s) < num_chats:
        step([])
    for _ in range(num_steps):
        step(run.quiet_s)
    engine.add(LONG_PROMPT, WorkloadRequest(draw_prompt(prompt_tokens), 1))
    begun = time.perf_counter()
    while not step(run.disturbed_s):
        pass
    run.first_token_s = time.perf_counter() - begun
    for index in range(num_chats):
        client.send(Abort(str(index)))
    return run
