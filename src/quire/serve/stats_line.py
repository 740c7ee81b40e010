"""One log line on the recent load, for operators without a dashboard."""

from __future__ import annotations

from quire.serve.gate import Refusal
from quire.serve.loading.model_set import ModelSet


class StatsLine:
    """Reports the load since its last call."""

    def __init__(self, models: ModelSet) -> None:
        self._models = models
        self._seen_s = models.server.clock.now()
        self._seen = self._totals()

    def take(self) -> dict[str, float] | None:
        """Return the fields of a line, or None if the server was and is idle. Mutates."""
        now, totals = self._models.server.clock.now(), self._totals()
        seconds = max(now - self._seen_s, 1e-9)
        # A restarted engine counts from 0.
        prompt, generated, queried, hit, refused = (
            new - old if new >= old else new for new, old in zip(totals, self._seen, strict=True)
        )
        self._seen_s, self._seen = now, totals
        gates = [each.gate for each in self._models.models]
        stats = [each.model.stats() for each in self._models.models]
        if not (prompt or generated or refused or any(gate.num_sequences for gate in gates)):
            return None
        num_blocks = sum(each.num_blocks for each in stats)
        return {
            "running": sum(each.num_running for each in stats),
            "waiting": sum(gate.num_waiting_sequences for gate in gates),
            "refused": refused,
            "prompt_tokens_per_s": round(prompt / seconds, 1),
            "output_tokens_per_s": round(generated / seconds, 1),
            "kv_usage": round(sum(each.num_used_blocks for each in stats) / max(num_blocks, 1), 3),
            "cache_hits": round(hit / queried, 3) if queried else 0,
        }

    def _totals(self) -> tuple[int, ...]:
        each = [(services.metrics, services.model.stats(), services.gate) for services in self._models.models]
        reasons = (Refusal.QUEUE_FULL, Refusal.WAIT, Refusal.KEY_LIMIT)
        return (
            sum(metrics.num_prompt_tokens for metrics, _, _ in each),
            sum(metrics.num_generated_tokens for metrics, _, _ in each),
            sum(stats.queried_tokens_total for _, stats, _ in each),
            sum(stats.hit_tokens_total for _, stats, _ in each),
            sum(gate.refusals[why] for _, _, gate in each for why in reasons),
        )
