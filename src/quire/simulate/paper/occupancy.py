"""The KV memory on the paper's machines: its size, the share that tokens fill, and the number of running requests."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.reporting.document.content import BARS, Axis, Chart, Series, Table
from quire.simulate.baselines import SYSTEMS
from quire.simulate.paper.figure import Figure, make_figure, published_numbers
from quire.simulate.paper.runs import FULL, LONGEST, OPT_13B, Laboratory, Run, long_run, short_run
from quire.simulate.workload.drawn import DrawnPrompts
from quire.simulate.workload.lengths import ALPACA, SHAREGPT, SPREAD, LognormalLengths

MACHINES = (("OPT-13B", 40, 5120, 12), ("OPT-66B", 64, 9216, 21), ("OPT-175B", 96, 12288, 264))
RATE, SHORT_RATE = 2.0, 30.0
SPREADS = (0.5, SPREAD, 1.0, 1.3)
COMPARED = ("vllm", "orca_oracle", "orca_max")


def setup(laboratory: Laboratory) -> Figure:
    """Return the sizes before any request runs, from the shapes of the models."""
    rows, found = [], {}
    for model, layers, hidden, gigabytes in MACHINES:
        token_bytes = 2 * layers * hidden * 2
        slots = (gigabytes << 30) / token_bytes
        cells = f"{token_bytes / 1024:,.0f} KiB", f"{gigabytes} GiB", f"{slots:,.0f}", f"{slots / LONGEST:.1f}"
        rows.append((model, *cells))
        found[f"{model}: slots, thousands"] = slots / 1000
    token_bytes = laboratory.sites[OPT_13B].setup().spec.bytes_per_token
    found["OPT-13B: keys and values of a token"] = token_bytes / 1024
    found["OPT-13B: a sequence of 2,048"] = LONGEST * token_bytes / (1 << 30)
    found["prompts of ShareGPT / Alpaca"] = SHAREGPT.prompt / ALPACA.prompt
    found["outputs of ShareGPT / Alpaca"] = SHAREGPT.output / ALPACA.output
    table = Table(("model", "a token", "KV memory", "slots", "sequences of 2,048"), tuple(rows))
    return make_figure("setup", [table], found)


def memory(laboratory: Laboratory) -> Figure:
    """Return the use of the KV memory while requests wait for it."""
    outcomes = [laboratory.run(long_run(system)) for system in SYSTEMS]
    shares = {
        "token states": tuple(100 * outcome.stored for outcome in outcomes),
        "reserved": tuple(100 * outcome.reserved for outcome in outcomes),
        "cached": tuple(100 * outcome.cached for outcome in outcomes),
        "never used or free": tuple(100 * outcome.lost for outcome in outcomes),
    }
    found = {
        f"{system}: {name}": share
        for name, values in shares.items()
        for system, share in zip(SYSTEMS, values, strict=True)
    }
    filled = 100 * laboratory.run(long_run("vllm")).filled
    found["vllm: waste in blocks in use"] = 100 - filled
    rows = ((system, *map(_percent, row)) for system, *row in zip(SYSTEMS, *shares.values(), strict=True))
    published = published_numbers("memory")
    series = [Series(name, values) for name, values in shares.items()]
    series.append(Series("token states, published", tuple(published.get(f"{name}: token states") for name in SYSTEMS)))
    chart = Chart("Shares of KV memory", SYSTEMS, tuple(series), Axis("system"), Axis("share", "%"), BARS)
    table = Table(("system", *shares), tuple(rows))
    return make_figure("memory", [table], found, [chart], filled=filled, spread=SPREAD)


def _percent(share: float) -> str:
    return f"{share:.1f} %"


def batches(laboratory: Laboratory) -> Figure:
    """Return the number of sequences that run at once."""
    running = {
        "ShareGPT, 2 /s": [laboratory.run(long_run(system, RATE)).mean_running for system in SYSTEMS],
        "ShareGPT, full": [laboratory.run(long_run(system)).mean_running for system in SYSTEMS],
        "Alpaca, 30 /s": [laboratory.run(short_run(system, SHORT_RATE)).mean_running for system in SYSTEMS],
        "Alpaca, full": [laboratory.run(short_run(system)).mean_running for system in SYSTEMS],
    }
    found = {
        f"{name}: {system}": count
        for name, counts in running.items()
        for system, count in zip(SYSTEMS, counts, strict=True)
    }
    for system in COMPARED[1:]:
        ratio = found["ShareGPT, full: vllm"] / found[f"ShareGPT, full: {system}"]
        found[f"ShareGPT, full: vllm / {system}"] = ratio
    columns = [[f"{count:.1f}" for count in counts] for counts in running.values()]
    published = published_numbers("batches")
    series = []
    for name in ("ShareGPT, full", "Alpaca, full"):
        series.append(Series(name, tuple(running[name])))
        series.append(Series(f"{name}, published", tuple(published.get(f"{name}: {system}") for system in SYSTEMS)))
    chart = Chart("Sequences at once", SYSTEMS, tuple(series), Axis("system"), Axis("sequences"), BARS)
    rows = tuple(zip(SYSTEMS, *columns, strict=True))
    tables = Table(("system", *running), rows), _table_of_spreads(laboratory)
    paged = published["ShareGPT, full: vllm"]
    held = published_numbers("memory")["vllm: token states"] / 100 * (12 << 30) / 819_200 / paged
    return make_figure(
        "batches",
        tables,
        found,
        [chart],
        theirs=_step_ms(paged, RATE, SHAREGPT),
        theirs_short=_step_ms(published["Alpaca, full: vllm"], SHORT_RATE, ALPACA),
        ours=_step_ms(found["ShareGPT, 2 /s: vllm"], RATE, SHAREGPT),
        ours_short=_step_ms(found["Alpaca, 30 /s: vllm"], SHORT_RATE, ALPACA),
        published=paged,
        inferred=math.sqrt(math.log((held - SHAREGPT.prompt) / (SHAREGPT.output / 2))),
        spread=SPREAD,
    )


def _step_ms(running: float, rate: float, lengths: LognormalLengths) -> float:
    """Return the time of a step in milliseconds, by Little's law."""
    return 1000 * running / (rate * lengths.output)


def _table_of_spreads(laboratory: Laboratory) -> Table:
    rows = []
    for spread in SPREADS:
        prompts = DrawnPrompts(replace(SHAREGPT, spread=spread), LONGEST)
        paged, *others = (laboratory.run(Run(system, FULL, prompts)).mean_running for system in COMPARED)
        rows.append((f"{spread:g}", f"{paged:.1f}", *(f"{paged / other:.2f}×" for other in others)))
    header = ("spread of lengths", "vllm", "vllm / orca_oracle", "vllm / orca_max")
    return Table(header, tuple(rows), "Another spread, ShareGPT, full")
