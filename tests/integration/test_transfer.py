"""A profile of one scheduler serves another, other steps and other sigmas: flows known exactly."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from ertacache.core.frontier import solve_frontier
from ertacache.core.gram import profile_run
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.search import spread_schedule
from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from ertacache.integration.record import record
from tests.integration.rings import RingSampling, with_frontier
from tests.integration.sampling import make
from tests.integration.setting import fitted_plan

# Some schedulers make an array of a tensor in a way that numpy is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:__array:DeprecationWarning")

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
TRAILING = {"timestep_spacing": "trailing", "steps_offset": 0, "set_alpha_to_one": True}
SCHEDULERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "sized Euler": ("FlowMatchEulerDiscreteScheduler", {"use_dynamic_shifting": True}),
    "UniPC": ("UniPCMultistepScheduler", {}),
    "DPM++ of a flow": ("DPMSolverMultistepScheduler", FLOW),
    "DDIM": ("DDIMScheduler", TRAILING),
    "DDIM, v": ("DDIMScheduler", TRAILING | {"prediction_type": "v_prediction"}),
    "DDIM, data": ("DDIMScheduler", TRAILING | {"prediction_type": "sample"}),
    "CogVideoX": ("CogVideoXDDIMScheduler", {}),
    "DPM++": ("DPMSolverMultistepScheduler", {}),
    "DPM++, v": ("DPMSolverMultistepScheduler", {"prediction_type": "v_prediction"}),
    "DEIS": ("DEISMultistepScheduler", {}),
    "scaled Euler": ("EulerDiscreteScheduler", {}),
    "scaled Euler, v": ("EulerDiscreteScheduler", {"prediction_type": "v_prediction"}),
}
STEPS = 20


def levels_of(size: float) -> dict[str, Any]:
    """Sigmas that follow the size of the image, as those of Flux do."""
    return {"num_inference_steps": STEPS, "mu": size}


def sampling_of(name: str) -> RingSampling:
    kind, config = SCHEDULERS[name]
    return RingSampling(make(kind, **config))


@cache
def profiled(name: str) -> Policy:
    """The profile of 20 steps, with its frontier."""
    sampling, levels = sampling_of(name), levels_of(1.0) if name == "sized Euler" else None
    profile = sampling.profile(num_inference_steps=STEPS, levels=levels)
    return with_frontier(sampling.policy(profile=profile))


def follow(sampling: RingSampling, policy: Policy, *, target: Any = None, **call: Any) -> float:
    """The error of a run under a policy, on noise that was not profiled."""
    full = sampling(seed=5, **call)
    with attach(sampling, policy, **target or {}) as handle:
        fast = sampling(seed=5, **call)
        assert handle.plan is not None
        assert handle.stats.last.computed_steps == len(handle.plan.compute_steps)
    assert torch.equal(sampling(seed=5, **call), full)
    return float((fast - full).square().mean().sqrt())


def check_transfer(policy: Policy, name: str, budget: int, **call: Any) -> None:
    """Against a plan from a profile of the run itself, and against plain reuse."""
    sampling = sampling_of(name)
    own = record(sampling, **call)
    schedule, gram = own.schedule, profile_run(own.run).gram
    point = solve_frontier(gram, schedule.nominal, budgets=[budget]).points[0]
    uniform = spread_schedule(schedule.num_steps, budget, {0})
    plain = TrajectoryPlan(uniform, schedule.nominal[:, None])
    bounds = [
        follow(sampling, replace(policy, plans=(fitted_plan(plan, schedule),)), **call)
        for plan in (point.plan, plain)
    ]
    error = follow(sampling, policy, target={"compute_steps": budget}, **call)
    assert error < 8 * bounds[0]
    assert error < bounds[1] / 4


@pytest.mark.parametrize(
    ("profile", "run", "num_steps"),
    [
        ("Euler", "UniPC", STEPS),
        ("UniPC", "Euler", 14),
        ("Euler", "DPM++ of a flow", 14),
        ("CogVideoX", "CogVideoX", 14),
        ("DDIM, data", "DDIM, data", 14),
        ("DDIM", "DPM++", STEPS),
        ("DDIM", "DPM++", 14),
        ("DDIM", "DEIS", STEPS),
        ("DDIM, v", "DPM++, v", 14),
        ("DDIM", "scaled Euler", STEPS),
        ("DDIM", "scaled Euler", 14),
        ("scaled Euler", "DDIM", 14),
        ("DDIM, v", "scaled Euler, v", STEPS),
    ],
)
def test_from_one_scheduler_to_another(profile: str, run: str, num_steps: int) -> None:
    check_transfer(profiled(profile), run, num_steps // 2, num_inference_steps=num_steps)


LEVELS: list[tuple[str, dict[str, Any]]] = [
    ("Euler", {"sigmas": [0.99 * 0.82**k for k in range(16)]}),
    ("Euler", {"sigmas": torch.linspace(1, 0.1, 12).tolist()}),
    ("sized Euler", levels_of(0.5)),
    ("sized Euler", levels_of(1.5)),
    ("DPM++", {"timesteps": [999, 960, 900, 830, 750, 660, 560, 460, 360, 260, 160, 60]}),
    ("scaled Euler", {"timesteps": [980, 900, 800, 700, 600, 500, 400, 300, 200, 100]}),
]


@pytest.mark.parametrize(("name", "levels"), LEVELS)
def test_sigmas_and_timesteps_of_the_caller(name: str, levels: dict[str, Any]) -> None:
    given = levels.get("sigmas") or levels.get("timesteps") or range(STEPS)
    check_transfer(profiled(name), name, len(given) // 2, levels=levels)
