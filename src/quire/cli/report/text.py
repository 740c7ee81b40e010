"""Report: the analysis of a log, as text for a terminal and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from quire.cli.report.advice import HITS, Finding
from quire.cli.report.recorded import RecordedRun
from quire.cli.report.units import show_bytes, show_count, show_seconds, show_share
from quire.cli.tables import NOTHING, show_table
from quire.simulate.histogram import Histogram
from quire.simulate.meter import Latencies

MAX_TENANTS: Final = 12
Rows = list[list[str]]
LATENCIES: Final = {
    "first token": "ttft_s",
    "between tokens": "itl_s",
    "per token of a request": "tpot_s",
    "latency": "latency_s",
}


@dataclass(frozen=True, slots=True)
class Report:
    """The analysis of a log. `simulated`: its requests, simulated with the same settings; None: see `untried`."""

    name: str
    recorded: RecordedRun
    simulated: RecordedRun | None
    findings: tuple[Finding, ...]
    untried: str = ""

    def __str__(self) -> str:
        """Return the text."""
        return "\n\n".join([*self.head(), *map(show_table, self.tables()), self._advice()])

    def tables(self) -> list[Rows]:
        """Return the figures as tables, each with its header."""
        run = self.recorded
        tables = [_memory(run), _events(run), _cache(run), self._times()]
        return tables + [_tenants(run)] * (len(run.tenants) > 1)

    def as_json(self) -> str:
        """Return all figures, including the timeline."""
        content = {
            "log": self.name,
            "settings": _settings_as_json(self.recorded),
            "recorded": _run_as_json(self.recorded),
            "simulated": None if self.simulated is None else _run_as_json(self.simulated),
            "untried": self.untried,
            "findings": [asdict(finding) for finding in self.findings],
        }
        return json.dumps(content, indent=1)

    def head(self) -> list[str]:
        """Return a description of the log."""
        run, memory, config = self.recorded, self.recorded.scheduler.memory, self.recorded.scheduler.config
        counts = {"aborted": run.num_aborted, "failed": run.num_failed, "steps lost": run.num_lost_steps}
        others = "".join(f", {count:,} {name}" for name, count in counts.items() if count)
        num_blocks = memory.config.num_blocks
        size = show_bytes(num_blocks * memory.spec.bytes_per_block)
        lines = (
            f"{self.name}: {run.num_requests:,} requests in {show_seconds(run.duration_s)}{others}",
            f"{run.num_plans:,} steps, all replanned, identical byte for byte",
            f"{num_blocks:,} blocks of {memory.spec.block_size} tokens ({size}), policy {config.policy}, "
            f"prefix index {memory.config.prefix_index}, eviction {memory.config.eviction}",
        )
        return ["\n".join(lines)] + [f"note: {run.torn}; everything before that was read"] * bool(run.torn)

    def _times(self) -> Rows:
        runs = [("as recorded", self.recorded)]
        runs += [] if self.simulated is None else [("simulated", self.simulated)]
        rows = [["p50 / p95 / p99", *(name for name, _ in runs)]]
        rows.append(["waiting", *(_percentiles(run.wait_s) for _, run in runs)])
        for label, name in LATENCIES.items():
            rows.append([label, *(_percentiles(getattr(run.latencies, name)) for _, run in runs)])
        return rows

    def _advice(self) -> str:
        if self.simulated is None:
            return f"what to change: tried nothing ({self.untried})"
        lines = [f"what to change, from simulating {self.simulated.num_requests:,} requests again:"]
        for finding in self.findings:
            lines += [f"  {finding.setting}: {finding.verdict}", f"      because {finding.evidence}"]
            lines.append(f"      {', '.join([finding.goal, *finding.others])}")
            lines += [f"      but {', '.join(finding.prices)}"] * bool(finding.prices)
            lines += [f"      note: {finding.caveat}"] * bool(finding.caveat)
        return "\n".join(lines)


def _memory(run: RecordedRun) -> Rows:
    num_blocks, used = run.scheduler.memory.config.num_blocks, run.mean("used_blocks")
    slots = used * run.scheduler.memory.spec.block_size or 1.0
    most = run.most_used_blocks / num_blocks
    return [
        ["memory", "mean", "most"],
        ["in use", show_share(used / num_blocks), show_share(most)],
        ["  of that, holding tokens", show_share(run.mean("stored_slots") / slots), ""],
        ["  of that, reserved for a step", show_share(run.mean("reserved_slots") / slots), ""],
        ["  of that, empty: waste", show_share(run.waste), ""],
        ["only cached", *(show_share(value("cached_blocks") / num_blocks) for value in (run.mean, run.most))],
        ["never in use", "", show_share(1.0 - most)],
        ["blocks saved by sharing", *(f"{value('saved_blocks'):,.1f}" for value in (run.mean, run.most))],
        ["sequences running", f"{run.mean('running'):,.1f}", show_count(run.most_running)],
        ["requests waiting", f"{run.mean('waiting'):,.1f}", show_count(run.most_waiting)],
    ]


def _events(run: RecordedRun) -> Rows:
    ledger, num_preemptions = run.scheduler.memory.ledger(), run.scheduler.num_preemptions
    return [
        ["what happened", "times"],
        ["evictions", show_count(ledger.evictions)],
        ["preemptions by recompute", show_count(num_preemptions - run.num_swapped)],
        ["preemptions by swap", show_count(run.num_swapped)],
        ["tokens computed again", show_count(run.recomputed_tokens)],
        ["blocks copied on write", show_count(ledger.copied_blocks)],
        ["blocks merged", show_count(ledger.merged_blocks)],
    ]


def _cache(run: RecordedRun) -> Rows:
    ledger = run.scheduler.memory.ledger()
    rows = [["cache", "requests", "tokens of prompts"]]
    rows.append(["found", "", f"{ledger.hit_tokens:,} of {ledger.queried_tokens:,} ({show_share(HITS.of(run))})"])
    for reason, count in run.missed_requests.most_common():
        label = "all found" if reason.value == "none" else f"not found: {reason.value}"
        rows.append([label, show_count(count), show_count(run.missed_tokens[reason])])
    return rows


def _tenants(run: RecordedRun) -> Rows:
    """Return a table of the tenants with the most tokens."""
    head = ["tenant", "requests", "prompts", "found", "outputs", "preempted", "blocks mean / most"]
    rows = [[*head, "waiting p50 / p95 / p99"]]
    tenants = sorted(run.tenants.items(), key=lambda each: -each[1].prompt_tokens - each[1].output_tokens)
    for name, tenant in tenants[:MAX_TENANTS]:
        counts = tenant.num_requests, tenant.prompt_tokens, tenant.output_tokens, tenant.num_preemptions
        requests, prompts, outputs, preempted = map(show_count, counts)
        blocks = f"{tenant.block_seconds / (run.busy_s or 1.0):,.1f} / {tenant.most_blocks:,}"
        cells = requests, prompts, show_share(tenant.hit_rate), outputs, preempted, blocks
        rows.append([_one_line(name) or "(none)", *cells, _percentiles(tenant.wait_s)])
    num_others = len(tenants) - MAX_TENANTS
    return rows + [[f"and {num_others:,} others", *[""] * len(head)]] * (num_others > 0)


def _one_line(name: str) -> str:
    """Return a client's name in a form that is safe to print on a terminal."""
    return "".join(character if character.isprintable() else "?" for character in name)[:40]


def _percentiles(times: Histogram) -> str:
    return " / ".join(show_seconds(times.percentile(at)) for at in (50.0, 95.0, 99.0)) if times.count else NOTHING


def _settings_as_json(run: RecordedRun) -> dict[str, Any]:
    memory = asdict(run.scheduler.memory.config)
    del memory["hash_key"]  # logs do not contain it
    return {"spec": asdict(run.scheduler.memory.spec), "memory": memory, "scheduler": asdict(run.scheduler.config)}


def _run_as_json(run: RecordedRun) -> dict[str, Any]:
    plain = {each.name: getattr(run, each.name) for each in fields(run) if each.type in ("int", "float", "str")}
    ledger = asdict(run.scheduler.memory.ledger())
    del ledger["misses"]  # reported below, with their tokens
    tenants = {}
    for name, tenant in run.tenants.items():
        own = {each.name: getattr(tenant, each.name) for each in fields(tenant)}
        tenants[name] = {**own, "hit_rate": tenant.hit_rate, "wait_s": asdict(tenant.wait_s.distribution())}
    return {
        **plain,
        "waste": run.waste,
        "hit_rate": HITS.of(run),
        "num_preemptions": run.scheduler.num_preemptions,
        "wait_s": asdict(run.wait_s.distribution()),
        **{name: asdict(getattr(run.latencies, name).distribution()) for name in Latencies.NAMES},
        "misses": {
            reason.value: {"num_requests": count, "num_tokens": run.missed_tokens[reason]}
            for reason, count in run.missed_requests.items()
        },
        "tenants": tenants,
        "ledger": ledger,
        "timeline": [asdict(point) for point in run.timeline.points],
    }
