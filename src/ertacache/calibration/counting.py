"""How often calibration asked the network. Counts only; knows no stage's work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Count", "NetworkCalls", "Stages"]

Count = Callable[[int], None]
"""Told how often the network was asked since the last time."""

Stages = Literal["profile", "refit", "validation"]


@dataclass
class NetworkCalls:
    """Calls of the network by stage, one for each prompt and step on which it ran.

    A batch of eight prompts counts as eight; the branches of guidance, in one call of the network
    or in several, count as one. So the number does not depend on batches.

    Attributes:
        profile: the untouched runs of the calibration prompts.
        refit: the closed-loop refit, or the paper's calibration runs.
        validation: the held-out prompts, all ways of sampling them; for a wished PSNR also the
            trial runs.

    Example:
        >>> calls = NetworkCalls(profile=60)
        >>> calls.of("validation")(25)
        >>> str(calls)
        'profile 60 + refit 0 + validation 25 = 85'
    """

    profile: int = 0
    refit: int = 0
    validation: int = 0

    def of(self, stage: Stages) -> Count:
        """What the calls of a stage are told to."""

        def count(calls: int) -> None:
            setattr(self, stage, getattr(self, stage) + calls)

        return count

    @property
    def total(self) -> int:
        """All of them."""
        return self.profile + self.refit + self.validation

    def __str__(self) -> str:
        """The sum in one line."""
        return (
            f"profile {self.profile} + refit {self.refit} + validation {self.validation} "
            f"= {self.total}"
        )
