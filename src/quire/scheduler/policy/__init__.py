"""Scheduling policies, created by name."""

from __future__ import annotations

from quire.core.config import SchedulerConfig
from quire.core.errors import InvalidConfigError
from quire.scheduler.policy.base import SchedulingPolicy, WaitingQueue

__all__ = ["SchedulingPolicy", "WaitingQueue", "create_policy"]


def create_policy(config: SchedulerConfig) -> SchedulingPolicy:
    """Return a new policy as configured; imports only its module."""
    if config.policy == "fcfs":
        from quire.scheduler.policy.fcfs import FCFSPolicy

        return FCFSPolicy()
    if config.policy == "priority":
        from quire.scheduler.policy.priority import PriorityPolicy

        return PriorityPolicy(config.priority_ageing_s)
    if config.policy == "fair_share":
        from quire.scheduler.policy.fair_share import FairSharePolicy

        return FairSharePolicy()
    raise InvalidConfigError("policy", config.policy, "fcfs, priority or fair_share")
