"""The blocks that samples and beams of one prompt share, and the gain from sharing."""

from __future__ import annotations

from quire.reporting.document.content import Axis, Chart, Series, Table
from quire.simulate.paper.figure import Figure, make_figure
from quire.simulate.paper.runs import LONGEST, SHORT_FULL, SHORT_REQUESTS, Laboratory, Run
from quire.simulate.workload.drawn import DrawnPrompts
from quire.simulate.workload.lengths import ALPACA, SHAREGPT, LognormalLengths

SAMPLES, BEAMS = "samples", "beams"
NUM_SEQUENCES = (2, 4, 6)
RATES = ((ALPACA, 8.0), (SHAREGPT, 0.5))


def _prompts(lengths: LognormalLengths, kind: str, count: int) -> DrawnPrompts:
    return DrawnPrompts(lengths, LONGEST, num_sequences=count, beam_search=kind == BEAMS)


def sharing(laboratory: Laboratory) -> Figure:
    """Return the blocks that samples and beams of one prompt save."""
    rows, found, series = [], {}, []
    for lengths, rate in RATES:
        for kind in (SAMPLES, BEAMS):
            runs = [Run("vllm", rate, _prompts(lengths, kind, count)) for count in NUM_SEQUENCES]
            shares = tuple(100 * laboratory.run(run).saved for run in runs)
            name = f"{lengths.name}, {kind}"
            rows.append((name, *(f"{share:.1f} %" for share in shares)))
            series.append(Series(name, shares))
            found.update({f"{name}: {count}": share for count, share in zip(NUM_SEQUENCES, shares, strict=True)})
    places = tuple(map(float, NUM_SEQUENCES))
    chart = Chart("Blocks saved", places, tuple(series), Axis("sequences of a prompt"), Axis("share", "%"))
    table = Table(("lengths", *(f"{count} sequences" for count in NUM_SEQUENCES)), tuple(rows))
    return make_figure("sharing", [table], found, [chart])


def gain(laboratory: Laboratory) -> Figure:
    """Return the gain in throughput from sharing."""
    rows, ratios = [], {}
    for kind, counts in ((SAMPLES, (1, *NUM_SEQUENCES)), (BEAMS, NUM_SEQUENCES)):
        for count in counts:
            prompts = _prompts(ALPACA, kind, count)
            runs = [Run(system, SHORT_FULL, prompts, SHORT_REQUESTS) for system in ("vllm", "orca_oracle")]
            paged, alone = map(laboratory.run, runs)
            ratio = paged.requests_per_s / alone.requests_per_s
            name = f"{count} {kind}" if count > 1 else "one text"
            ratios[f"vllm / orca_oracle: {name}"] = ratio
            cells = paged.mean_running, alone.mean_running, paged.requests_per_s, alone.requests_per_s
            rows.append((name, *(f"{cell:.1f}" for cell in cells), f"{ratio:.2f}×"))
    header = ("side by side", "vllm runs", "oracle runs", "vllm /s", "oracle /s", "vllm / oracle")
    more = paged.mean_running / alone.mean_running
    return make_figure("gain", [Table(header, tuple(rows))], ratios, more=more)
