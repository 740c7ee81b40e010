"""Metrics: the server's counts of its requests, and all values that it reports to Prometheus.

    endpoints, frame ──► Metrics ──┐
    Gate ──────────────────────────┼──► families ──► render ──► GET /metrics
    EngineStats ───────────────────┘

Names begin with quire_. With `metrics_compat` vllm, the numbers that vLLM also has are repeated under its names and
labels, so that its dashboards and gateways keep working. Labels have few values: the path of a route, not of a
request; never the name of a client.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import quire
from quire.core.granted import resident_bytes
from quire.engine.records.stats import EngineStats, ModelState, ReplicaStats
from quire.engine.text.tenant_pool import TenantPool
from quire.serve.gate import Gate, Refusal
from quire.serve.prometheus import (
    Family,
    Histogram,
    Kind,
    Labels,
    Sample,
    by_label,
    by_outcome,
    counter,
    gauge,
    histogram,
)
from quire.serve.read.body_budget import BodyBudget

SHORT_S: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
LONG_S: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
LENGTHS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Tokens: 1, 2, 5, 10 … 500,000."""

VLLM_NAMES: Final = {
    "quire_requests_running": "vllm:num_requests_running",
    "quire_requests_waiting": "vllm:num_requests_waiting",
    "quire_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "quire_prefix_cache_queried_tokens_total": "vllm:prefix_cache_queries_total",
    "quire_prefix_cache_hit_tokens_total": "vllm:prefix_cache_hits_total",
    "quire_preemptions_total": "vllm:num_preemptions_total",
    "quire_drafts_total": "vllm:spec_decode_num_drafts_total",
    "quire_draft_tokens_total": "vllm:spec_decode_num_draft_tokens_total",
    "quire_accepted_draft_tokens_total": "vllm:spec_decode_num_accepted_tokens_total",
    "quire_accepted_draft_tokens_per_pos_total": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "quire_prompt_tokens_total": "vllm:prompt_tokens_total",
    "quire_generated_tokens_total": "vllm:generation_tokens_total",
    "quire_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "quire_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "quire_request_prompt_tokens": "vllm:request_prompt_tokens",
    "quire_request_generated_tokens": "vllm:request_generation_tokens",
    "quire_request_duration_seconds": "vllm:e2e_request_latency_seconds",
    "quire_admission_rejections_total": "vllm:admission_rejections_total",
    "quire_corrupted_requests_total": "vllm:corrupted_requests_total",
}
FINISHED_WELL: Final = frozenset({"stop", "length", "tool_calls"})


class CallMetrics:
    """The counters of all requests, for any model. Use it in one event loop."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._num_calls = 0

    def note_call(self, change: int) -> None:
        """Count a request that begins (1) or ends (-1). Mutates."""
        self._num_calls += change

    def note_request(self, endpoint: str, status: int) -> None:
        """Count an answered request; `endpoint` is the path of its route. Mutates."""
        self._requests[endpoint, status] += 1

    def families(self) -> list[Family]:
        """Return the metrics of requests and of the process. Does not mutate."""
        requests = [
            Sample(count, (("endpoint", endpoint), ("status", str(status))))
            for (endpoint, status), count in sorted(self._requests.items())
        ]
        return [
            Family("quire_http_requests_total", "counter", "Requests answered, by route and status.", requests),
            gauge("quire_http_requests_active", "Requests being answered.", self._num_calls),
            *_process_families(),
            Family("quire_build_info", "gauge", "The version.", [Sample(1, (("version", quire.__version__),))]),
        ]


class Metrics:
    """The counters of one model's requests. Use it in one event loop."""

    def __init__(self, compat: str = "none") -> None:
        self._compat = compat
        self._finished: Counter[str] = Counter()
        self.num_prompt_tokens = self.num_generated_tokens = self.num_cached_tokens = 0
        self._first_token = Histogram(SHORT_S)
        self._gap = Histogram(SHORT_S)
        self._duration = Histogram(LONG_S)
        self._prompt_length = Histogram(LENGTHS)
        self._generated_length = Histogram(LENGTHS)

    def note_first_token(self, seconds: float) -> None:
        """Add a time to first token. Mutates."""
        self._first_token.observe(seconds)

    def note_gap(self, seconds: float) -> None:
        """Add the time between two pieces of a text. Mutates."""
        self._gap.observe(seconds)

    def note_tokens(self, num_prompt: int, num_generated: int, num_cached: int) -> None:
        """Add prompt tokens, generated tokens, and prompt tokens that came from the cache. Mutates."""
        self.num_prompt_tokens += num_prompt
        self.num_generated_tokens += num_generated
        self.num_cached_tokens += num_cached

    def note_finish(self, reason: str, seconds: float) -> None:
        """Count a finished text, with its reason and the seconds since its request arrived. Mutates."""
        self._finished[reason] += 1
        self._duration.observe(seconds)

    def note_lengths(self, num_prompt: int, num_generated: int) -> None:
        """Add an ended request's numbers of prompt tokens and generated tokens. Mutates."""
        self._prompt_length.observe(num_prompt)
        self._generated_length.observe(num_generated)

    def families(self, gate: Gate, state: ModelState, stats: EngineStats, model_name: str) -> list[Family]:
        """Return all metrics of the model. Does not mutate."""
        own = [*self._text_families(), *_gate_families(gate), *_engine_families(state, stats)]
        if self._compat == "vllm":
            own += self._vllm_families(own, (("engine", "0"), ("model_name", model_name)))
        return own

    def _text_families(self) -> list[Family]:
        return [
            by_label("quire_texts_finished_total", "counter", "Finished texts, by reason.", "reason", self._finished),
            counter("quire_prompt_tokens_total", "Prompt tokens.", self.num_prompt_tokens),
            counter(
                "quire_cached_prompt_tokens_total",
                "Prompt tokens served from the prefix cache.",
                self.num_cached_tokens,
            ),
            counter("quire_generated_tokens_total", "Generated tokens.", self.num_generated_tokens),
            histogram("quire_time_to_first_token_seconds", "Time to first token.", self._first_token),
            histogram("quire_inter_token_latency_seconds", "Time between two pieces of a text.", self._gap),
            histogram("quire_request_duration_seconds", "Time from a request to its end.", self._duration),
            histogram("quire_request_prompt_tokens", "Prompt tokens of a request.", self._prompt_length),
            histogram("quire_request_generated_tokens", "Generated tokens of a request.", self._generated_length),
        ]

    def _vllm_families(self, own: list[Family], labels: Labels) -> list[Family]:
        same = [family.labelled(VLLM_NAMES[family.name], labels) for family in own if family.name in VLLM_NAMES]
        well = {reason: count for reason, count in self._finished.items() if reason in FINISHED_WELL}
        success = by_label("", "counter", "Texts that finished without error, by reason.", "finished_reason", well)
        return [*same, success.labelled("vllm:request_success_total", labels)]


def _gate_families(gate: Gate) -> list[Family]:
    refusals = {refusal.value: float(gate.refusals[refusal]) for refusal in Refusal}
    return [
        gauge("quire_queue_sequences", "Sequences waiting for their first token.", gate.num_waiting_sequences),
        gauge("quire_queue_tokens", "Prompt tokens in the queue.", gate.num_waiting_tokens),
        gauge("quire_sequences_admitted", "Admitted sequences that have not ended.", gate.num_sequences),
        gauge("quire_ready", "1 if requests are admitted.", gate.is_ready),
        by_label("quire_admission_rejections_total", "counter", "Requests refused, by reason.", "reason", refusals),
        gauge("quire_queue_sequences_max", "Maximum queued sequences.", gate.limits.max_queued_sequences),
        gauge("quire_queue_tokens_max", "Maximum queued prompt tokens.", gate.limits.max_queued_tokens),
    ]


def joined_families(each: Mapping[str, Sequence[Family]]) -> list[Family]:
    """Return the families of several models, given by name, as one list whose samples are labelled by model.

    Does not mutate.
    """
    joined: dict[str, Family] = {}
    for model_name, families in each.items():
        for family in families:
            own = family
            if not any(label == "model_name" for sample in family.samples for label, _ in sample.labels):
                own = family.labelled(family.name, (("model_name", model_name),))
            known = joined.get(family.name)
            joined[family.name] = own if known is None else replace(own, samples=[*known.samples, *own.samples])
    return list(joined.values())


def body_families(name: str, held: BodyBudget) -> list[Family]:
    """Return the metrics of request bodies, or of images, named "body" or "image". Does not mutate."""
    kind = f"request {held.kind}"
    return [
        gauge(f"quire_{name}_bytes", f"Bytes held by {kind}.", held.held_bytes),
        gauge(f"quire_{name}_bytes_max", f"Maximum bytes held by {kind}.", held.max_bytes),
        counter(
            f"quire_{name}_rejections_total",
            f"Requests refused because {kind} already held too many bytes.",
            held.num_refused,
        ),
    ]


def _by_place(guesses: Mapping[str, tuple[int, ...]]) -> list[Sample]:
    """Return the guesses of all proposers, by their place in the draft, from 0."""
    places = zip(*guesses.values(), strict=True)
    return [Sample(sum(counts), (("position", str(place)),)) for place, counts in enumerate(places)]


def _engine_families(state: ModelState, stats: EngineStats) -> list[Family]:
    states = {known.value: float(known is state) for known in ModelState}
    return [
        by_label("quire_engine_state", "gauge", "1 for the current state of the engine.", "state", states),
        gauge("quire_requests_running", "Sequences running in the engine.", stats.num_running),
        gauge("quire_requests_waiting", "Requests waiting in the engine.", stats.num_waiting),
        gauge("quire_kv_blocks", "Blocks of KV memory.", stats.num_blocks),
        gauge("quire_kv_blocks_used", "KV blocks held by requests.", stats.num_used_blocks),
        gauge(
            "quire_kv_blocks_cached", "KV blocks that no request holds, kept as prefix cache.", stats.num_cached_blocks
        ),
        gauge("quire_kv_usage_ratio", "Share of KV blocks held by requests.", stats.kv_usage),
        counter(
            "quire_prefix_cache_queried_tokens_total",
            "Prompt tokens looked up in the prefix cache.",
            stats.queried_tokens_total,
        ),
        counter(
            "quire_prefix_cache_hit_tokens_total",
            "Prompt tokens found in the prefix cache.",
            stats.hit_tokens_total,
        ),
        *_host_families(stats),
        *_disk_families(stats),
        counter("quire_evictions_total", "Cached blocks evicted.", stats.evictions_total),
        counter("quire_preemptions_total", "Preemptions of sequences.", stats.preemptions_total),
        counter("quire_drafts_total", "Sequences of steps that verified guessed tokens.", stats.drafts_total),
        counter("quire_draft_tokens_total", "Guessed tokens verified.", stats.num_verified_guesses),
        counter("quire_accepted_draft_tokens_total", "Guessed tokens that were right.", stats.num_right_guesses),
        Family(
            "quire_accepted_draft_tokens_per_pos_total",
            "counter",
            "Guessed tokens that were right, by their place in the draft.",
            _by_place(stats.right_guesses),
        ),
        by_label(
            "quire_proposed_tokens_total",
            "counter",
            "Guessed tokens verified, by their proposer.",
            "proposer",
            {name: sum(counts) for name, counts in stats.verified_guesses.items()},
        ),
        by_label(
            "quire_accepted_proposed_tokens_total",
            "counter",
            "Guessed tokens that were right, by their proposer.",
            "proposer",
            {name: sum(counts) for name, counts in stats.right_guesses.items()},
        ),
        counter("quire_steps_total", "Steps of the engine.", stats.steps_total),
        counter("quire_failed_steps_total", "Steps that failed.", stats.failed_steps_total),
        counter("quire_memory_failures_total", "Steps that ran out of memory.", stats.memory_failures_total),
        counter("quire_culprits_total", "Requests ended because their steps failed.", stats.culprits_total),
        counter(
            "quire_corrupted_requests_total",
            "Requests ended because their own computation failed.",
            stats.corrupted_requests_total,
        ),
        counter("quire_engine_restarts_total", "Restarts of the engine.", stats.restarts_total),
        *_replica_families(stats),
        gauge("quire_suspects", "Requests run apart from others after a failed step.", stats.num_suspects),
        gauge("quire_step_tokens_max", "Maximum tokens per step.", stats.max_step_tokens),
        gauge("quire_step_prompt_tokens_max", "Maximum prompt tokens per step; 0: no limit.", stats.prompt_limit),
        counter("quire_engine_busy_seconds_total", "Time spent in steps.", stats.busy_s_total),
    ]


def _host_families(stats: EngineStats) -> list[Family]:
    """Return the metrics of the host tier, if there is one."""
    if not stats.num_host_blocks:
        return []
    return [
        gauge("quire_host_blocks", "KV blocks that fit in host memory.", stats.num_host_blocks),
        gauge("quire_host_blocks_cached", "KV blocks cached in host memory.", stats.num_cached_host_blocks),
        counter("quire_host_hit_tokens_total", "Prompt tokens from host memory.", stats.host_hit_tokens_total),
    ]


def _replica_families(stats: EngineStats) -> list[Family]:
    """Return the metrics of a model's engines, each labelled by its number."""

    def by_replica(name: str, kind: Kind, text: str, value: Callable[[ReplicaStats], float]) -> Family:
        values = {str(index): value(replica) for index, replica in enumerate(stats.replicas)}
        return by_label(name, kind, text, "replica", values)

    routes = [
        Sample(count, (("replica", str(index)), ("reason", reason)))
        for index, replica in enumerate(stats.replicas)
        for reason, count in replica.routes.items()
    ]

    return [
        by_replica(
            "quire_replica_ready",
            "gauge",
            "1 if the replica takes requests.",
            lambda each: each.state is ModelState.READY,
        ),
        by_replica("quire_replica_texts", "gauge", "Texts that the replica computes.", lambda each: each.num_texts),
        by_replica(
            "quire_replica_kv_usage_ratio",
            "gauge",
            "Share of KV blocks of the replica held by requests.",
            lambda each: each.engine.kv_usage,
        ),
        by_replica(
            "quire_replica_restarts_total", "counter", "Restarts of the replica.", lambda each: each.restarts_total
        ),
        Family(
            "quire_replica_routes_total", "counter", "Requests that the router sent to the replica, by reason.", routes
        ),
        counter(
            "quire_texts_continued_total",
            "Texts continued by another engine because theirs died.",
            stats.continued_total,
        ),
        counter("quire_texts_moved_total", "Texts moved from an engine to be restarted.", stats.moved_total),
        counter(
            "quire_requests_at_fault_total",
            "Requests ended because engines died while computing them.",
            stats.at_fault_total,
        ),
        by_outcome(
            "quire_prefix_fetches_total", "Attempts to fetch a prefix from another engine, by outcome.", stats.fetches
        ),
        counter(
            "quire_prefix_fetched_blocks_total", "KV blocks fetched from other engines.", stats.fetched_blocks_total
        ),
        counter("quire_prefix_fetched_bytes_total", "Bytes of these blocks.", stats.fetched_bytes_total),
        counter("quire_prefix_fetch_seconds_total", "Time spent fetching them.", stats.fetch_s_total),
    ]


def _disk_families(stats: EngineStats) -> list[Family]:
    """Return the metrics of the disk cache, if there is one."""
    if not stats.num_disk_slots:
        return []
    return [
        gauge("quire_disk_slots", "Blocks that fit in the disk cache.", stats.num_disk_slots),
        gauge("quire_disk_blocks_kept", "Blocks in the disk cache.", stats.num_kept_blocks),
        gauge("quire_disk_blocks_landing", "KV blocks that wait for the disk.", stats.num_landing_blocks),
        gauge("quire_disk_off", "1 if the disk cache failed too often and is not used.", stats.disk_is_off),
        counter("quire_disk_hit_tokens_total", "Prompt tokens from disk.", stats.disk_hit_tokens_total),
        by_outcome("quire_disk_blocks_total", "Blocks read from or written to disk, by outcome.", stats.disk_blocks),
    ]


def text_families(pool: TenantPool) -> list[Family]:
    """Return the metrics of work on long texts. Does not mutate."""
    return [
        gauge("quire_texts_running", "Long texts being rendered, tokenized or written.", pool.num_running),
        gauge("quire_texts_waiting", "Long texts waiting for their tenant's turn.", pool.num_waiting),
    ]


def _process_families() -> list[Family]:
    """Return the process's metrics, with the names that Prometheus client libraries use."""
    families = [counter("process_cpu_seconds_total", "CPU time of this process.", time.process_time())]
    resident = resident_bytes()
    if resident is not None:
        families.append(gauge("process_resident_memory_bytes", "Memory of this process.", resident))
    try:
        num_open = len(os.listdir("/proc/self/fd"))
    except OSError:
        return families
    return [*families, gauge("process_open_fds", "Open files and sockets of this process.", num_open)]
