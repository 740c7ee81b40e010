"""A step of many decodes in quire, compared with the peer's.

Runs of quire and of the peer alternate, and ratios are between neighbouring runs. The peer's script runs unchanged for
the numbers that it prints, and through `peer_probe` for other numbers (means, staggered borders, adding a prompt
without drawing it).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from quire.instruments.bench.peer import Peer
from quire.instruments.bench.workload import (
    BLOCK_SIZE,
    Sizes,
    draw_prompts,
    hash_prompts,
    make_scheduler,
    prompt_lengths,
    run_decode,
)
from quire.reporting.report import Goal, Section, cell
from quire.reporting.samples import mean_of_last_periods, percentile, ratios, summarize

MAX_STEP_US = 400.0
AIM_STEP_US = 150.0
MIN_RATIO = 5.0


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """The number of running requests, tokens per prompt, blocks and steps."""

    running: int
    prompt: int
    blocks: int
    steps: int
    repeat: int


@dataclass(slots=True)
class _Runs:
    """The same measurement of quire and of the peer, one entry per run; `peer` is empty without a peer."""

    ours: list[float] = field(default_factory=list)
    peer: list[float] = field(default_factory=list)


def measure_decode(options: DecodeOptions, peer: Peer | None, tell: Callable[[str], None]) -> Section:
    """Measure steps with `options.running` decodes, in turn with the peer's."""
    runs: list[dict[str, Any]] = []
    for index in range(options.repeat):
        tell(f"decode: run {index + 1} of {options.repeat}")
        found: dict[str, Any] = {"ours_lockstep": _run_ours(options, staggered=False)}
        if peer is not None:
            found["peer_script"] = peer.run_script()
            found["peer_lockstep"] = peer.run_probe()
        found["ours_staggered"] = _run_ours(options, staggered=True)
        if peer is not None:
            found["peer_staggered"] = peer.run_probe(stagger=BLOCK_SIZE)
        runs.append(found)
    table = {name: _collect(runs, options, measurement) for name, measurement in _MEASUREMENTS.items()}
    text = (
        f"{options.running} running requests, prompts of {options.prompt} tokens, {options.blocks:,} blocks of "
        f"{BLOCK_SIZE}, {options.steps} steps a run. Lockstep: all prompts have the same length, so all requests reach "
        f"the border of a block in the same step and a median hides those steps. Staggered: the lengths are spread "
        f"over {BLOCK_SIZE} tokens, so every step has its share of borders. Median of {options.repeat} runs (min–max); "
        "the ratio is taken within each run. Rows marked † are from the peer's unchanged script. vLLM hashes a prompt "
        "when it is added, quire when it is admitted."
    )
    rows = [(name, cell(summarize(found.ours)), *_beside(found)) for name, found in table.items()]
    return Section(
        "A step of decodes", text, ("what", "ours", "vLLM", "ratio"), rows, {"runs": runs}, _decode_goals(table)
    )


def _run_ours(options: DecodeOptions, *, staggered: bool) -> dict[str, Any]:
    """Return one run, in the form of the peer's probe. In lockstep, `add_s` includes drawing, as in the script."""
    gc.collect()
    scheduler = make_scheduler(Sizes(options.running, options.blocks))
    drawn = draw_prompts(prompt_lengths(options.running, options.prompt, staggered=staggered))
    if not staggered:
        return asdict(run_decode(scheduler, drawn, options.steps))
    prompts = list(drawn)
    return {"hash_s": hash_prompts(prompts), **asdict(run_decode(scheduler, prompts, options.steps))}


_Measurement = Callable[[dict[str, Any], DecodeOptions, str], "float | None"]


def _of_steps(mode: str, statistic: Callable[[list[float]], float], script_key: str = "") -> _Measurement:
    """Return a statistic of a run's steps, in µs; with `script_key`, the peer's value is from its script."""

    def measure(run: dict[str, Any], options: DecodeOptions, who: str) -> float | None:
        if who == "peer" and script_key:
            return float(run["peer_script"][script_key]) if "peer_script" in run else None
        found = run.get(f"{who}_{mode}")
        return None if found is None else 1e6 * statistic(found["step_s"])

    return measure


def _of_prompts(mode: str, keys: tuple[str, ...], script_key: str = "") -> _Measurement:
    """Return the sum of some times of a run, in nanoseconds per prompt token."""

    def measure(run: dict[str, Any], options: DecodeOptions, who: str) -> float | None:
        if who == "peer" and script_key:
            return float(run["peer_script"][script_key]) if "peer_script" in run else None
        found = run.get(f"{who}_{mode}")
        num_tokens = sum(prompt_lengths(options.running, options.prompt, staggered=mode == "staggered"))
        return None if found is None else 1e9 * sum(found[key] for key in keys) / num_tokens

    return measure


def _median(samples: list[float]) -> float:
    return summarize(samples).median


def _mean(samples: list[float]) -> float:
    return mean_of_last_periods(samples, BLOCK_SIZE)


def _p90(samples: list[float]) -> float:
    return percentile(samples, 0.9)


LOCKSTEP_MEDIAN = "lockstep: median, µs †"
LOCKSTEP_MEAN = "lockstep: mean over whole block periods, µs"
STAGGERED_MEDIAN = "staggered: median, µs"
STAGGERED_MEAN = "staggered: mean, µs"

_MEASUREMENTS: dict[str, _Measurement] = {
    LOCKSTEP_MEDIAN: _of_steps("lockstep", _median, "step_us_median"),
    "lockstep: p90, µs †": _of_steps("lockstep", _p90, "step_us_p90"),
    LOCKSTEP_MEAN: _of_steps("lockstep", _mean),
    STAGGERED_MEDIAN: _of_steps("staggered", _median),
    STAGGERED_MEAN: _of_steps("staggered", _mean),
    "staggered: p90, µs": _of_steps("staggered", _p90),
    "add, drawing the prompt included, ns per prompt token †": _of_prompts("lockstep", ("add_s",), "add_ns_per_token"),
    "hash, ns per prompt token": _of_prompts("staggered", ("hash_s",)),
    "add, ns per prompt token": _of_prompts("staggered", ("add_s",)),
    "admit and prefill, ns per prompt token": _of_prompts("staggered", ("admit_s",)),
    "add, admit and prefill, ns per prompt token": _of_prompts("staggered", ("add_s", "admit_s")),
}


def _collect(runs: list[dict[str, Any]], options: DecodeOptions, measurement: _Measurement) -> _Runs:
    found = _Runs()
    for run in runs:
        for who, values in (("ours", found.ours), ("peer", found.peer)):
            value = measurement(run, options, who)
            if value is not None:
                values.append(value)
    return found


def _beside(found: _Runs) -> tuple[str, str]:
    if not found.peer:
        return cell(None), cell(None)
    return cell(summarize(found.peer)), cell(summarize(ratios(found.peer, found.ours)), "×")


def _decode_goals(table: dict[str, _Runs]) -> list[Goal]:
    goals = []
    for name in (LOCKSTEP_MEDIAN, LOCKSTEP_MEAN, STAGGERED_MEDIAN, STAGGERED_MEAN):
        short, measured = name.removesuffix(" †"), _median(table[name].ours)
        goals.append(Goal(short, measured, MAX_STEP_US))
        goals.append(Goal(f"{short} (aim)", measured, AIM_STEP_US))
    for name in (LOCKSTEP_MEDIAN, LOCKSTEP_MEAN, STAGGERED_MEAN):
        if table[name].peer:
            measured = _median(ratios(table[name].peer, table[name].ours))
            what = name.removesuffix(" †").removesuffix(", µs")
            goals.append(Goal(f"{what}: vLLM's to ours", measured, MIN_RATIO, at_least=True))
    return goals
