"""What attached runs did: counts, seconds, memory, and their summary in words."""

from __future__ import annotations

from dataclasses import dataclass

from ertacache.core.plans import step_strip
from ertacache.formats.fitted import FittedPlan

__all__ = ["RunStats", "Stats", "summarize"]


@dataclass(frozen=True)
class RunStats:
    """What one run, or all of them together, did.

    Attributes:
        computed_steps: steps on which the network was evaluated, for all calls of the step.
        reused_steps: the others.
        denoiser_calls: evaluations of the network, several per step with sequential guidance.
        denoiser_seconds: host time in the network; on an accelerator that runs asynchronously, the
            time it took to hand the work over.
        cached_bytes: memory held for reuse; of all runs, the most.
        reused_calls: calls of the network that returned a cached output.

    Example:
        >>> total = RunStats(10, 20, 10, 1.5, 4096, 20) + RunStats(10, 20, 10, 1.25, 1024, 20)
        >>> total.computed_steps, total.cached_bytes, total.speedup
        (20, 4096, 3.0)
    """

    computed_steps: int = 0
    reused_steps: int = 0
    denoiser_calls: int = 0
    denoiser_seconds: float = 0.0
    cached_bytes: int = 0
    reused_calls: int = 0

    def __add__(self, other: RunStats) -> RunStats:
        """Add up counts and seconds, and keep the larger memory."""
        return RunStats(
            self.computed_steps + other.computed_steps,
            self.reused_steps + other.reused_steps,
            self.denoiser_calls + other.denoiser_calls,
            self.denoiser_seconds + other.denoiser_seconds,
            max(self.cached_bytes, other.cached_bytes),
            self.reused_calls + other.reused_calls,
        )

    @property
    def speedup(self) -> float:
        """Calls of the network over its evaluations: the speed-up of the denoising loop."""
        return (self.denoiser_calls + self.reused_calls) / max(1, self.denoiser_calls)


@dataclass(frozen=True)
class Stats:
    """What an attached pipeline did.

    Attributes:
        runs: number of runs, the present one included.
        last: the present or last run.
        total: all runs together.
    """

    runs: int
    last: RunStats
    total: RunStats


def summarize(stats: Stats, *, plan: FittedPlan | None) -> str:
    """The last plan, steps, network evaluations saved, seconds and memory, in a few lines.

    Example:
        >>> total = RunStats(15, 15, 30, 1.5, 2_000_000, 30)
        >>> print(summarize(Stats(1, total, total), plan=None))
        last run: every step computed
        1 run: 15 steps computed, 15 reused
        network evaluations (NFE): 30 instead of 60, 2.00x fewer
        seconds in the network: 1.50, about 1.50 saved
        cache: 2.0 MB
    """
    total = stats.total
    full = total.denoiser_calls + total.reused_calls
    saved = total.denoiser_seconds / max(1, total.denoiser_calls) * total.reused_calls
    return "\n".join(
        [
            _describe(stats, plan),
            f"{stats.runs} {'run' if stats.runs == 1 else 'runs'}: "
            f"{total.computed_steps} steps computed, {total.reused_steps} reused",
            f"network evaluations (NFE): {total.denoiser_calls} instead of {full}, "
            f"{total.speedup:.2f}x fewer",
            f"seconds in the network: {total.denoiser_seconds:.2f}, about {saved:.2f} saved",
            f"cache: {total.cached_bytes / 1e6:.1f} MB",
        ]
    )


def _describe(stats: Stats, plan: FittedPlan | None) -> str:
    if stats.runs == 0:
        return "no run yet"
    if plan is None:
        return "last run: every step computed"
    computed = f"{len(plan.compute_steps)} of {plan.num_steps} steps computed"
    return f"last run: {computed}: {step_strip(plan.compute_steps, plan.num_steps)}"
