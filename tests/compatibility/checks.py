"""The checks of every row of the matrix, one function per sentence of the page.

The command and the tests run the same functions; a row is green if none of them raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry
from torch import Tensor

from ertacache.core.gram import Schedule, Trajectory, profile_run
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.sampler import run
from ertacache.core.steppers import TrajectoryStepper, combine
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.attach import attach
from ertacache.integration.identity import find_denoisers, fingerprint
from ertacache.integration.private_api import keeps_history
from ertacache.integration.record import Recording, record
from tests.compatibility.rows import COMPUTED, STEPS, Row
from tests.compatibility.watching import Calls, KeptOutput, Seen, counted, led, watched
from tests.integration.setting import fitted_plan, paper_plan, trajectory_plan

# Relative to the largest value: ``add(v, alpha=a)`` rounds once, a product and a sum twice.
ROUNDING = 1e-4


@dataclass(frozen=True, eq=False)
class Subject:
    """A pipeline and its full run."""

    row: Row
    pipe: Any
    full: Recording
    result: Tensor
    calls: Calls
    attributes: list[set[str]]

    @property
    def run(self) -> Trajectory:
        return self.full.run

    @property
    def schedule(self) -> Schedule:
        return self.full.schedule

    @cached_property
    def plan(self) -> TrajectoryPlan:
        return trajectory_plan(self.schedule.nominal, COMPUTED)

    @cached_property
    def attached(self) -> tuple[Tensor, Seen]:
        return self.follow(self.plan)

    def follow(self, plan: Any) -> tuple[Tensor, Seen]:
        """The output of a run with a policy attached, and what was observed."""
        policy, seen = self.policy(plans=(fitted_plan(plan, self.schedule),)), Seen()
        with (
            counted(self.pipe, seen),
            attach(self.pipe, policy),
            watched(self.pipe, seen),
        ):
            return self.row.generate(self.pipe), seen

    def policy(self, **parts: Any) -> Policy:
        shape = self.run.latents[0].shape[1:]
        facts = fingerprint(self.pipe, latent_shape=shape, guidance=self.full.guidance)
        return Policy(facts, **parts)


def make_subject(row: Row) -> Subject:
    pipe, seen = row.build(), Seen()
    kept = KeptOutput(pipe)
    with counted(pipe, seen), watched(pipe, seen):
        found = record(kept, **row.arguments())
    result = torch.as_tensor(kept.output[0])
    return Subject(row, pipe, found, result, seen.calls, attributes(pipe))


def attributes(pipe: Any) -> list[set[str]]:
    """The attributes of all objects that a policy touches; a first run adds some of its own.

    An empty registry of hooks is what diffusers itself leaves on a network with caches.
    """
    parts = (pipe, pipe.scheduler, *find_denoisers(pipe).values())
    return [
        {name for name, value in vars(part).items() if not _is_empty_registry(value)}
        for part in parts
    ]


def _is_empty_registry(value: object) -> bool:
    return isinstance(value, HookRegistry) and not value.hooks


def check_calls(subject: Subject) -> None:
    """Each network runs on the computed steps only, there as often as in the full run."""
    _, seen = subject.attached
    assert seen.calls == [call for call in subject.calls if call[0] in COMPUTED]
    for name in find_denoisers(subject.pipe):
        first = next(call for call in subject.calls if call[1] == name)
        assert first in seen.calls, "an expert begins with a reused step"


def check_result(subject: Subject) -> None:
    """The result is finite, not that of the full run, and reproducible."""
    result, _ = subject.attached
    assert bool(torch.isfinite(result).all())
    assert not torch.equal(result, subject.result)
    assert torch.equal(subject.follow(subject.plan)[0], result)


def check_definition(subject: Subject) -> None:
    """Every latent is that of ``core.sampler`` over the uncached pipeline, bit for bit."""
    _, seen = subject.attached
    full = led(subject.pipe, seen, lambda: subject.row.generate(subject.pipe))
    computed = {k: full.outputs[k] for k in COMPUTED}
    assert all(torch.equal(seen.outputs[k], v) for k, v in computed.items())
    if subject.row.blends:
        check_steps(subject, seen, computed)
        return
    outputs = iter(computed.values())
    reference = run(
        lambda x, sigma: next(outputs),
        subject.run.latents[0],
        TrajectoryStepper(subject.plan),
        sigmas=subject.schedule.sigmas,
    )
    reached = [*seen.samples, seen.results[-1]]
    assert len(reached) == len(reference)
    assert all(map(torch.equal, reached, reference))


def check_steps(subject: Subject, seen: Seen, computed: dict[int, Tensor]) -> None:
    """Step by step, for a pipeline that changes the latent between steps."""
    plan, past = subject.plan, list[Tensor]()
    rows = plan.coefficients[:, 0].tolist()
    assert torch.equal(seen.samples[0], subject.run.latents[0])
    for k, x in enumerate(seen.samples):
        past = [computed[k], *past][: plan.history] if k in computed else past
        assert torch.equal(seen.results[k], combine(x, past, rows[k]))


def check_all_computed(subject: Subject) -> None:
    """With every step computed the result is that of the full run."""
    every = range(STEPS)
    original = paper_plan(subject.schedule.sigmas, every, scale=1.0, rectified=False)
    result, seen = subject.follow(original)
    assert torch.equal(result, subject.result)
    assert seen.calls == subject.calls
    if not keeps_history(subject.pipe.scheduler):
        own = TrajectoryPlan(tuple(every), subject.schedule.nominal[:, None])
        result, _ = subject.follow(own)
        size = max(1.0, float(subject.result.abs().max()))
        torch.testing.assert_close(result, subject.result, rtol=0, atol=ROUNDING * size)


def check_other_steps(subject: Subject) -> None:
    """A run of more steps follows a plan that is solved for it from the profile of this one."""
    full, steps, seen = subject.full, STEPS + 2, Seen()
    prompts = tuple(ProfiledPrompt("", seed) for seed in range(len(full.run.latents[0])))
    profile = Profile(full.schedule, profile_run(full.run), prompts, full.expert_steps)
    with (
        attach(subject.pipe, subject.policy(profile=profile), compute_steps=4) as handle,
        counted(subject.pipe, seen),
        watched(subject.pipe, seen),
    ):
        result = subject.row.generate(subject.pipe, **longer_arguments(subject.row, steps))
    assert handle.plan is not None
    assert (handle.plan.num_steps, len(handle.plan.compute_steps)) == (steps, 4)
    assert (len(seen.outputs), handle.stats.last.computed_steps) == (steps, 4)
    assert bool(torch.isfinite(result).all())
    past: list[Tensor] = []
    assert isinstance(handle.plan.plan, TrajectoryPlan)
    rows = handle.plan.plan.coefficients[:, 0].tolist()
    for k, (x, v) in enumerate(zip(seen.samples, seen.outputs, strict=True)):
        past = [v, *past][: len(rows[k]) - 1] if k in handle.plan.compute_steps else past
        assert torch.equal(seen.results[k], combine(x, past, rows[k]))


def longer_arguments(row: Row, steps: int) -> dict[str, Any]:
    """A number of steps, and the arguments that have one entry per step."""
    lists = {name: value for name, value in row.call.items() if isinstance(value, list)}
    longer = {
        name: value + value[-1:] * (steps - STEPS)
        for name, value in lists.items()
        if len(value) == STEPS
    }
    return {"num_inference_steps": steps} | longer


def check_detached(subject: Subject) -> None:
    """After ``detach`` nothing is left, and the result is that of the full run, bit for bit."""
    assert subject.attached
    assert attributes(subject.pipe) == subject.attributes
    assert torch.equal(subject.row.generate(subject.pipe), subject.result)


CHECKS: tuple[Callable[[Subject], None], ...] = (
    check_calls,
    check_result,
    check_definition,
    check_all_computed,
    check_other_steps,
    check_detached,
)


def refusal(row: Row) -> str:
    """The error message with which a pipeline is refused."""
    with pytest.raises(PolicyError, match=row.refused) as caught:
        record(row.build(), **row.arguments())
    return str(caught.value)
