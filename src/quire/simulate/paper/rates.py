"""Throughput: latency over the rate of requests, and the highest rate that a system serves."""

from __future__ import annotations

from quire.reporting.document.content import LOG, Axis, Chart, Series, Table
from quire.simulate.baselines import SYSTEMS
from quire.simulate.lengths import Length
from quire.simulate.paper.figure import Figure, make_figure
from quire.simulate.paper.runs import (
    FULL,
    LONGEST,
    OPT_13B,
    OPT_175B,
    SHORT_FULL,
    SHORT_REQUESTS,
    Laboratory,
    Run,
    long_run,
    short_run,
)
from quire.simulate.workload.drawn import DrawnPrompts, SharedPrefixes
from quire.simulate.workload.lengths import LognormalLengths, SaidLengths

RATES = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)
SHORT_RATES = (5.0, 10.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0)
TRACES = (("ShareGPT", long_run, RATES), ("Alpaca", short_run, SHORT_RATES))
CONTEXT = 330
TRANSLATION = LognormalLengths("WMT16", 30.0, 35.0, 0.5)
PREFIXES = (("one example", 80), ("five examples", 341))
CHAT = DrawnPrompts(SaidLengths(Length.parse("1024"), Length.parse("338±269")), LONGEST)
ITERATING = ("vllm", "orca_oracle", "orca_pow2", "orca_max")


def latency(laboratory: Laboratory) -> Figure:
    """Return normalised latency over the rate of requests."""
    tables, charts, ratios = [], [], {}
    for name, run, rates in TRACES:
        lines = {
            system: tuple(laboratory.run(run(system, rate)).normalised_latency_s for rate in rates)
            for system in SYSTEMS
        }
        most = {system: laboratory.run(run(system)).requests_per_s for system in SYSTEMS}
        ratios.update({f"{name}: vllm / {system}": most["vllm"] / most[system] for system in SYSTEMS})
        cells = ((f"{1000 * mean:,.0f}" for mean in means) for means in lines.values())
        rows = tuple((system, *row, f"{most[system]:.2f}") for system, row in zip(SYSTEMS, cells, strict=True))
        header = ("system", *(f"{rate:g} /s" for rate in rates), "most /s")
        tables.append(Table(header, rows, f"{name}: milliseconds a token"))
        series = tuple(
            Series(system, lines[system], "accent" if system == "quire" else "") for system in reversed(SYSTEMS)
        )
        axis = Axis("latency / output tokens, mean", "s", LOG)
        charts.append(Chart(f"Normalised latency, {name}", rates, series, Axis("requests a second"), axis))
    roofline, running = laboratory.sites[OPT_13B].roofline(), round(laboratory.run(long_run("vllm")).mean_running)
    attention = roofline.attention_s([CONTEXT] * running, [1] * running) / roofline.decode_s(running, CONTEXT)
    return make_figure(
        "latency",
        tables,
        ratios,
        charts,
        num_requests=laboratory.num_requests,
        num_short=SHORT_REQUESTS * laboratory.num_requests,
        attention=100 * attention,
        running=running,
        context=CONTEXT,
        least=20 * attention,
        most=26 * attention,
    )


def ample(laboratory: Laboratory) -> Figure:
    """Return the throughput with ample memory."""
    found = {system: laboratory.run(short_run(system, site=OPT_175B)) for system in ITERATING}
    most = found["vllm"].requests_per_s
    rows = (
        (
            system,
            f"{outcome.mean_running:.1f}",
            f"{outcome.requests_per_s:.2f}",
            f"{most / outcome.requests_per_s:.2f}×",
        )
        for system, outcome in found.items()
    )
    table = Table(("system", "sequences running", "requests a second", "vllm / system"), tuple(rows))
    return make_figure("ample", [table], {})


def prefix(laboratory: Laboratory) -> Figure:
    """Return the gain from a prefix that all prompts share."""
    rows, ratios = [], {}
    for text, num_tokens in PREFIXES:
        prompts = DrawnPrompts(TRANSLATION, LONGEST, SharedPrefixes(1, num_tokens))
        runs = [Run(system, SHORT_FULL, prompts, SHORT_REQUESTS) for system in ("quire", "vllm", "orca_oracle")]
        rates = [laboratory.run(run).requests_per_s for run in runs]
        name = f"{text}, {num_tokens} tokens"
        rows.append((name, *(f"{rate:.1f}" for rate in rates)))
        ratios[f"{name}: quire / orca_oracle"] = rates[0] / rates[2]
    table = Table(("prefix", "quire", "vllm, no cache", "orca_oracle"), tuple(rows))
    return make_figure("prefix", [table], ratios)


def chat(laboratory: Laboratory) -> Figure:
    """Return the throughput of chats: long prompts, cut to half the context."""
    found = {system: laboratory.run(Run(system, FULL, CHAT)) for system in ITERATING}
    rows = ((name, f"{outcome.mean_running:.1f}", f"{outcome.requests_per_s:.2f}") for name, outcome in found.items())
    paged = found["vllm"]
    ratios = {f"chats: vllm / {name}": paged.requests_per_s / outcome.requests_per_s for name, outcome in found.items()}
    table = Table(("system", "sequences running", "requests a second"), tuple(rows))
    return make_figure("chat", [table], ratios, more=paged.mean_running / found["orca_oracle"].mean_running)
