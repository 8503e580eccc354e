"""The error for a scheduler that no policy can work with. Knows no scheduler by name."""

from __future__ import annotations

from ertacache.formats.policy import PolicyError

__all__ = ["SchedulerError"]


class SchedulerError(PolicyError):
    """A scheduler is not deterministic, not linear, or has no descending sigma table."""
