"""One log line on the recent load, for operators without a dashboard."""

from __future__ import annotations

from quire.serve.gate import Refusal
from quire.serve.services import Services


class StatsLine:
    """Tells what has happened since it was last asked."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._seen_s = services.clock.now()
        self._seen = self._totals()

    def take(self) -> dict[str, float] | None:
        """Return the fields of a line; None where nothing has happened and nothing is under way. Mutates."""
        services = self._services
        now, totals = services.clock.now(), self._totals()
        seconds = max(now - self._seen_s, 1e-9)
        # An engine that was started again counts from 0.
        prompt, generated, queried, hit, refused = (
            new - old if new >= old else new for new, old in zip(totals, self._seen, strict=True)
        )
        self._seen_s, self._seen = now, totals
        gate, stats = services.gate, services.model.stats()
        if not (prompt or generated or refused or gate.num_sequences):
            return None
        return {
            "running": stats.num_running,
            "waiting": gate.num_waiting_sequences,
            "refused": refused,
            "prompt_tokens_per_s": round(prompt / seconds, 1),
            "output_tokens_per_s": round(generated / seconds, 1),
            "kv_usage": round(stats.kv_usage, 3),
            "cache_hits": round(hit / queried, 3) if queried else 0,
        }

    def _totals(self) -> tuple[int, ...]:
        metrics, stats = self._services.metrics, self._services.model.stats()
        return (
            metrics.num_prompt_tokens,
            metrics.num_generated_tokens,
            stats.queried_tokens_total,
            stats.hit_tokens_total,
            sum(self._services.gate.refusals[why] for why in (Refusal.QUEUE_FULL, Refusal.WAIT, Refusal.KEY_LIMIT)),
        )
