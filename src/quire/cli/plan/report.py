"""The output of `quire plan`: a few lines about the model and the requests, then a column for each machine; or JSON."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from quire.cli.plan.here import HERE
from quire.cli.plan.sizing import MIB, EngineSizer
from quire.cli.plan.study import Study
from quire.cli.tables import NOTHING, show_table
from quire.core.byte_sizes import format_bytes
from quire.core.kv_spec import DTYPE_BYTES
from quire.engine.records.report import LABEL_COLUMNS
from quire.simulate.capacity import Concurrency
from quire.simulate.estimate import Estimate
from quire.simulate.lengths import RequestLengths
from quire.simulate.planner import Recommendation

Row = tuple[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Studies of one model and one kind of requests. `requests` describes them; `given`: the flags that were set."""

    sizer: EngineSizer
    given: str
    requests: str
    lengths: RequestLengths
    studies: tuple[Study, ...]

    def __str__(self) -> str:
        """Return the text."""
        blocks = [self._facts(), show_table([(label, *cells) for label, cells in self._rows()])]
        command = f"quire serve {shlex.quote(self.sizer.config.model)} {self.given}".rstrip()
        blocks.extend(_advice(command, study) for study in self.studies)
        return "\n\n".join(block for block in blocks if block)

    def _facts(self) -> str:
        config, model = self.sizer.config, self.sizer.model
        lengths = self.lengths
        cut = f"; {lengths.num_cut} of {len(lengths.pairs)} cut to the context" if lengths.num_cut else ""
        facts = [
            ("model", f"{config.model}: {model.architecture}, {len(model.spec.layers)} layers, {model.dtype}"),
            ("context", f"{model.spec.context_length:,} tokens"),
        ]
        draft = self.sizer.model_of(config).draft
        if draft is not None:
            own = "the model's own layer" if draft.spec.joins_states else ""
            size = own or f"{draft.architecture}, {len(draft.spec.layers)} layers"
            facts.append(("guesses", f"{config.speculation}: {size}"))
        engine = next((study.engine for study in self.studies if study.engine is not None), None)
        if engine is not None:
            spec = engine.facts.kv_spec
            block = f"{spec.bytes_per_block:,} ({format_bytes(spec.bytes_per_block)}) a block of {spec.block_size}"
            facts.append(("KV", f"{spec.dtype}, {spec.bytes_per_token:,} bytes a token, {block} tokens"))
            attention = model.spec.attention if spec.latent_dim else None
            if attention is not None and attention.latent is not None:
                numbers = attention.num_heads * (attention.latent.query_dim + attention.latent.value_dim)
                apart = len(model.spec.layers) * numbers * DTYPE_BYTES[spec.dtype]
                latent = f"one for all {attention.num_heads} heads of a layer; their keys and values would be"
                facts.append(("latents", f"{latent} {apart:,} bytes a token, {apart / spec.bytes_per_token:.1f} times"))
        totals = ", ".join(
            f"{name} {lengths.total(share):,}" for name, share in (("p50", 0.5), ("p95", 0.95), ("longest", 1.0))
        )
        facts.append(("requests", f"{self.requests}; both together: {totals}{cut}"))
        return "\n".join(f"{label:<{LABEL_COLUMNS}}{text}" for label, text in facts)

    def _rows(self) -> list[Row]:
        studies = self.studies
        rows: list[Row] = [("", [study.hardware.name for study in studies])]
        rows.append(("memory", [format_bytes(study.memory_bytes) for study in studies]))
        for index, name in enumerate(("weights", "KV blocks", "swap", "activations")):
            cells = [NOTHING if s.engine is None else format_bytes(s.engine.plan.parts[index][1]) for s in studies]
            rows.append((f"  {name}", cells))
        rows.append(("blocks", [NOTHING if s.engine is None else f"{s.engine.plan.num_blocks:,}" for s in studies]))
        rows.append(("longest sequence", [_longest(study) for study in studies]))
        rows.extend(self._capacity_rows())
        rows.extend(self._speed_rows())
        return rows

    def _capacity_rows(self) -> list[Row]:
        def held(label: str, read: Callable[[Concurrency], str]) -> Row:
            return label, [NOTHING if study.held is None else read(study.held) for study in self.studies]

        rows = [
            held("concurrent requests, on average", lambda each: f"{each.average:,.1f}"),
            held("  all as long as the p50", lambda each: f"{each.p50:,}"),
            held("  all as long as the p95", lambda each: f"{each.p95:,}"),
            held("  all as long as the longest", lambda each: f"{each.longest:,}"),
            held("  if each reserved the context", lambda each: f"{each.reserved:,}"),
            held("empty slots in blocks taken", lambda each: f"{100 * each.waste:.1f} %"),
        ]
        for dtype in dict.fromkeys(narrow.dtype for study in self.studies for narrow in study.narrow):
            rows.append((f"on average with {dtype} KV", [_narrow(study, dtype) for study in self.studies]))
        return rows

    def _speed_rows(self) -> list[Row]:
        def speed(label: str, read: Callable[[Estimate], str]) -> Row:
            return label, [NOTHING if study.estimate is None else read(study.estimate) for study in self.studies]

        streams = [study.stream_tokens_per_s for study in self.studies]
        prompts = [study.prompt_s for study in self.studies]
        return [
            ("one stream, tok/s at most", [NOTHING if rate is None else _rate(rate) for rate in streams]),
            ("its first token, ms at least", [NOTHING if each is None else _ms(each) for each in prompts]),
            ("a disk cache pays above, GB/s", [self._disk_speed(study) for study in self.studies]),
            *self._link_rows(),
            speed("busy: decodes side by side", lambda each: f"{each.num_decodes:,.0f}"),
            speed("  tok/s at most", lambda each: _rate(each.tokens_per_s)),
            speed("  requests/s at most", lambda each: _rate(each.requests_per_s)),
            speed("  between tokens, ms at least", lambda each: _ms(each.tpot_s)),
            speed("  first token, p50, ms at least", lambda each: _ms(each.ttft_s)),
            speed("  first token, p95, ms at least", lambda each: _ms(each.ttft_p95_s)),
        ]

    def _link_rows(self) -> list[Row]:
        """Return the row of the link speed that a host cache uses, for comparison; no row without a host cache."""
        if not self.sizer.config.host_cache:
            return []
        speeds = [_rate(study.hardware.host_link_bandwidth / 1e9) for study in self.studies]
        return [("  a host cache has, GB/s", speeds)]

    def _disk_speed(self, study: Study) -> str:
        """Return the disk speed above which loading a prefix is faster than computing it."""
        if study.prompt_s is None or study.engine is None:
            return NOTHING
        num_bytes = self.lengths.prompt(0.5) * study.engine.facts.kv_spec.bytes_per_token
        return _rate(num_bytes / study.prompt_s / 1e9)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        model = self.sizer.model
        return {
            "model": self.sizer.config.model,
            "architecture": model.architecture,
            "num_layers": len(model.spec.layers),
            "dtype": model.dtype,
            "context_length": model.spec.context_length,
            "requests": {
                "text": self.requests,
                "num_cut": self.lengths.num_cut,
                "total_tokens": {str(share): self.lengths.total(share) for share in (0.5, 0.95, 1.0)},
            },
            "machines": [_study_json(study) for study in self.studies],
        }


def _advice(command: str, study: Study) -> str:
    """Return the best settings on a machine, or why there are none."""
    name = study.hardware.name
    if study.problem is not None:
        return f"{name}: {study.problem}"
    if study.best is None:
        nearest = "" if study.nearest is None else f"; the closest: {nearest_text(study.nearest)}"
        return f"{name}: no settings meet the targets{nearest}"
    estimate, where = study.best.estimate, name if name == HERE else f"on {name}"
    return (
        f"best settings {where}: up to {_rate(estimate.tokens_per_s)} tok/s with {estimate.num_sequences} concurrent "
        f"requests; {_ms(estimate.tpot_s)} ms between tokens, first token (p95) {_ms(estimate.ttft_p95_s)} ms\n"
        f"  {command} {flags_of(study.best, study.hardware.num_ranks)}"
    )


def flags_of(best: Recommendation, num_ranks: int = 1) -> str:
    """Return a recommendation as flags of an engine; --kv-memory is per rank."""
    size = best.pool.num_blocks * best.pool.spec.bytes_per_block // num_ranks
    kv_memory = f"{size // MIB}MiB" if size >= 1 << 30 and size % MIB == 0 else str(size)
    return (
        f"--block-size {best.block_size} --max-num-seqs {best.max_num_seqs} "
        f"--max-num-batched-tokens {best.estimate.budget} --kv-memory {kv_memory}"
    )


def nearest_text(nearest: Estimate) -> str:
    """Return an estimate as a value of --slo, rounded up so that a plan with this value succeeds."""
    return f"ttft={_ms_up(nearest.ttft_p95_s)}ms,tpot={_ms_up(nearest.tpot_s)}ms"


def _longest(study: Study) -> str:
    return NOTHING if study.engine is None else f"{study.engine.plan.max_model_len:,}"


def _narrow(study: Study, dtype: str) -> str:
    for narrow in study.narrow:
        if narrow.dtype == dtype:
            return f"{narrow.average:,.1f}"
    return NOTHING


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}" if per_s >= 10 else f"{per_s:.2g}"


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:,.1f}"


def _ms_up(seconds: float) -> str:
    return f"{math.ceil(1e4 * seconds) / 10:.1f}".removesuffix(".0")


def _study_json(study: Study) -> dict[str, Any]:
    hardware = study.hardware
    found: dict[str, Any] = {
        "name": hardware.name,
        "read_bandwidth": hardware.read_bandwidth,
        "matrix_rate": dict(hardware.matrix_rate),
        "notes": hardware.notes,
        "memory_bytes": study.memory_bytes,
        "problem": None if study.problem is None else str(study.problem),
    }
    if study.engine is None or study.held is None:
        return found
    plan, spec = study.engine.plan, study.engine.facts.kv_spec
    return found | {
        "parts_bytes": dict(plan.parts[:-1]),
        "kv_dtype": spec.dtype,
        "block_size": spec.block_size,
        "bytes_per_token": spec.bytes_per_token,
        "bytes_per_block": spec.bytes_per_block,
        "num_blocks": plan.num_blocks,
        "max_model_len": plan.max_model_len,
        "concurrency": asdict(study.held),
        "narrow_kv": [asdict(narrow) for narrow in study.narrow],
        "one_stream": {"tokens_per_s": study.stream_tokens_per_s, "ttft_s": study.prompt_s},
        "busy": None if study.estimate is None else asdict(study.estimate),
        "best": None if study.best is None else _best_json(study.best),
        "nearest": None if study.nearest is None else asdict(study.nearest),
    }


def _best_json(best: Recommendation) -> dict[str, Any]:
    return {
        "block_size": best.block_size,
        "max_num_seqs": best.max_num_seqs,
        "max_num_batched_tokens": best.estimate.budget,
        "kv_memory": best.pool.num_blocks * best.pool.spec.bytes_per_block,
        "num_blocks": best.pool.num_blocks,
        "concurrency": asdict(best.held),
        "busy": asdict(best.estimate),
    }
