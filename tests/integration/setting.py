"""What the tests share: a pipeline with its full run, plans, policies and observers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ertacache.core.gram import Schedule, Trajectory, profile_run
from ertacache.core.paper import adjusted_sigmas
from ertacache.core.plans import PaperPlan, TrajectoryPlan
from ertacache.formats.fingerprint import Fingerprint
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.attach import attach
from ertacache.integration.identity import fingerprint
from ertacache.integration.record import record
from ertacache.integration.tracker import NetworkCall, StepCall
from tests.integration.tiny import CASES, STEPS, Case, call_arguments, generate

COMPUTED = (0, 1, 3, 6, 7)
METHODS = ("trajectory", "paper")


@dataclass(frozen=True, eq=False)
class Setting:
    """A pipeline, its full run, and what a policy for it needs."""

    pipe: Any
    case: Case
    run: Trajectory
    schedule: Schedule
    facts: Fingerprint

    @property
    def sigmas(self) -> Tensor:
        return self.schedule.sigmas

    @property
    def nominal(self) -> Tensor:
        return self.schedule.nominal

    def generate(self, **changes: Any) -> Tensor:
        return generate(self.pipe, self.case, **changes)

    def another(self) -> Setting:
        """The same with a pipeline of its own, of equal weights."""
        return replace(self, pipe=self.case.build())

    @cached_property
    def attached(self) -> Tensor:
        """The result under ``trajectory_policy``."""
        return self._result(self.trajectory_policy())

    @cached_property
    def attached_paper(self) -> Tensor:
        """The result under ``paper_policy``."""
        return self._result(self.paper_policy())

    def _result(self, policy: Policy) -> Tensor:
        other = self.another()  # a policy may be attached to this one
        with attach(other.pipe, policy):
            return other.generate()

    def policy_of(self, method: str) -> tuple[Policy, Tensor]:
        """A policy of either method, and the result under it."""
        if method == "trajectory":
            return self.trajectory_policy(), self.attached
        return self.paper_policy(), self.attached_paper

    @property
    def branches(self) -> int:
        """Calls of the network per step: Wan has its guidance in a call of its own."""
        return 2 if self.case is CASES["wan"] else 1

    def policy(self, *plans: TrajectoryPlan | PaperPlan, **changes: Any) -> Policy:
        return Policy(
            self.facts, plans=tuple(fitted_plan(plan, self.schedule) for plan in plans), **changes
        )

    def profile(self) -> Profile:
        prompts = [ProfiledPrompt("a red circle", seed) for seed in range(len(self.run.latents[0]))]
        return Profile(self.schedule, profile_run(self.run), tuple(prompts))

    def trajectory_policy(self, compute_steps: Sequence[int] = COMPUTED) -> Policy:
        return self.policy(trajectory_plan(self.nominal, compute_steps))

    def paper_policy(self, compute_steps: Sequence[int] = COMPUTED, **changes: Any) -> Policy:
        return self.policy(paper_plan(self.sigmas, compute_steps, **changes))


def make_setting(name: str, **changes: Any) -> Setting:
    """A pipeline of one kind and its full run, with changes to the arguments of its calls."""
    case = CASES[name]
    if changes:
        case = replace(case, arguments=case.arguments | changes)
    pipe = case.build()
    full = record(pipe, **call_arguments(case))
    shape = full.run.latents[0].shape[1:]
    facts = fingerprint(pipe, latent_shape=shape, guidance=full.guidance)
    return Setting(pipe, case, full.run, full.schedule, facts)


def fitted_plan(plan: TrajectoryPlan | PaperPlan, schedule: Schedule) -> FittedPlan:
    """A plan for runs on a schedule; the paper's method does with any scheduler's steps."""
    target = schedule.target if isinstance(plan, TrajectoryPlan) else None
    return FittedPlan(plan, schedule.sigmas, target=target)


def trajectory_plan(update: Tensor, compute_steps: Sequence[int]) -> TrajectoryPlan:
    """Three outputs of history with weights that mean nothing, but are all different."""
    generator = torch.Generator().manual_seed(1)
    T = len(update)
    share = torch.rand(T, 3, generator=generator, dtype=torch.float64)
    latent = update[:, :1] * (1 + 0.01 * torch.rand(T, 1, generator=generator, dtype=torch.float64))
    coefficients = torch.cat([latent, update[:, 1:] * share], dim=1)
    return TrajectoryPlan(tuple(compute_steps), coefficients[:, None])


def paper_plan(
    sigmas: Tensor,
    compute_steps: Sequence[int],
    *,
    reuse: Any = "residual",
    scale: float = 0.4,
    rectified: bool = True,
) -> PaperPlan:
    """Intervals of reused steps shrunk by ``scale``, and a small rectification."""
    T = len(sigmas) - 1
    phi = torch.tensor([1.0 if k in compute_steps else scale for k in range(T)])
    adjusted = sigmas if scale == 1 else adjusted_sigmas(sigmas, phi)
    gain = torch.linspace(-0.1, 0.2, T, dtype=torch.float64) if rectified else None
    bias = torch.linspace(-2.1, -1.9, T, dtype=torch.float64) if rectified else None
    return PaperPlan(tuple(compute_steps), reuse, adjusted, gain, bias)


@dataclass
class Seen:
    """What passed a scheduler: the latents before and after each step, the combined outputs."""

    samples: list[Tensor]
    outputs: list[Tensor]
    results: list[Any]


@contextmanager
def watch_steps(pipe: Any) -> Iterator[Seen]:
    """Observe from above the attached step."""
    seen, below = Seen([], [], []), pipe.scheduler.step

    def step(model_output: Tensor, timestep: Any, sample: Tensor, **kwargs: Any) -> Any:
        result = below(model_output, timestep, sample, **kwargs)
        seen.outputs.append(model_output)
        seen.samples.append(sample)
        seen.results.append(result)
        return result

    pipe.scheduler.step = step
    try:
        yield seen
    finally:
        pipe.scheduler.step = below


class Observer:
    """A follower that changes nothing, and notes what is reported to it."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.events: list[Any] = []

    def call(self, call: NetworkCall) -> Any:
        self.events.append(("call", call.step, call.index))
        return call.compute()

    def step(self, call: StepCall) -> Any:
        self.events.append(("step", call.step, call.calls))
        return call.original_step()

    def end(self, *, failed: bool, restarted: bool) -> None:
        self.events.append(("end", failed, restarted))

    def loop_left(self, *, failed: bool) -> None:
        self.events.append(("loop left", failed))


@contextmanager
def count_calls(*networks: Any) -> Iterator[list[Any]]:
    """Note every evaluation of a network: its last layer is reached."""
    calls: list[Any] = []
    hooks = [n.proj_out.register_forward_hook(lambda *_, n=n: calls.append(n)) for n in networks]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


__all__ = [
    "COMPUTED",
    "METHODS",
    "STEPS",
    "Observer",
    "Seen",
    "Setting",
    "count_calls",
    "fitted_plan",
    "make_setting",
    "paper_plan",
    "trajectory_plan",
    "watch_steps",
]
