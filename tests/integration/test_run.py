"""What a step does to tensors: no more than its equation says."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ertacache.core.plan import TrajectoryPlan
from ertacache.integration import attach
from tests.integration.setting import COMPUTED, STEPS, Setting


class CountOperations(TorchDispatchMode):
    """Names of the operations that read or write numbers; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.seen[function.overloadpacket.__name__] += 1
        return result


def operations(setting: Setting) -> list[Counter[str]]:
    """Of every step of a run, from the end of the step before to its own."""
    counts: list[Counter[str]] = []
    with CountOperations() as mode:

        def look(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
            counts.append(mode.seen)
            mode.seen = Counter()
            return values

        setting.generate(callback_on_step_end=look)
    return counts


def test_a_reused_step_is_one_sum(flux: Setting) -> None:
    """One product and a sum per kept output; the time divided by 1000 is the pipeline's."""
    policy = flux.trajectory_policy()
    assert isinstance(policy.plan, TrajectoryPlan)
    with attach(flux.pipe, policy):
        counts = operations(flux)
    kept = 0
    for k in range(1, STEPS):
        kept = min(policy.plan.history, sum(c <= k for c in COMPUTED))
        if k not in COMPUTED:
            assert counts[k] == {"mul": 1, "add": kept, "div": 1}
    assert kept == policy.plan.history


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_a_reused_step_of_the_paper_is_the_schedulers(flux: Setting, reuse: str) -> None:
    """On top of the scheduler's own step, the residual is added to the latent: nothing else."""
    plain = operations(flux)
    policy = flux.paper_policy(reuse=reuse, scale=1.0, rectified=False)
    with attach(flux.pipe, policy):
        counts = operations(flux)
    assert COMPUTED[2:4] == (3, 6)
    for k in (2, 4, 5):
        assert counts[k]["mul"] == 1
        assert counts[k]["add"] == (2 if reuse == "residual" else 1)
        assert sum(counts[k].values()) < sum(plain[k].values()) / 10
