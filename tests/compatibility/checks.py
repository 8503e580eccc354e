"""What every row of the matrix has to hold, one function per sentence of the page.

The command and the tests run the same functions; a row is green when none of them raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.plan import TrajectoryPlan
from ertacache.core.sampler import combine, run_trajectory
from ertacache.core.solver import Trajectory
from ertacache.formats.policy import Policy
from ertacache.integration import SchedulerError, attach, fingerprint, nominal, record_run
from ertacache.integration.compat import keeps_history
from ertacache.integration.fingerprints import find_denoisers
from tests.compatibility.rows import COMPUTED, STEPS, Row
from tests.compatibility.watching import Calls, Seen, counted, led, watched
from tests.integration.setting import paper_plan, trajectory_plan

ROUNDING = 1e-4
"""``add(v, alpha=a)`` rounds once, the schedulers' product and sum twice."""


@dataclass(frozen=True, eq=False)
class Subject:
    """A pipeline and its untouched run."""

    row: Row
    pipe: Any
    run: Trajectory
    sigmas: Tensor
    update: Tensor
    result: Tensor
    calls: Calls
    attributes: list[set[str]]

    @property
    def plan(self) -> TrajectoryPlan:
        return trajectory_plan(self.update, COMPUTED)

    def policy(self, plan: Any) -> Policy:
        shape = self.run.latents[0].shape[1:]
        facts = fingerprint(self.pipe, sigmas=self.sigmas, latent_shape=shape)
        return Policy(plan, self.sigmas, fingerprint=facts)

    def follow(self, plan: Any) -> tuple[Tensor, Seen]:
        """What a run with a policy attached returns, and what was seen of it."""
        seen = Seen()
        with (
            counted(self.pipe, seen),
            attach(self.pipe, self.policy(plan)),
            watched(self.pipe, seen),
        ):
            return self.row.generate(self.pipe), seen


def make_subject(row: Row) -> Subject:
    pipe, seen = row.build(), Seen()
    run, sigmas = record_run(pipe, **row.arguments())
    update = nominal(pipe.scheduler)
    with counted(pipe, seen), watched(pipe, seen):
        result = row.generate(pipe)
    return Subject(row, pipe, run, sigmas, update, result, seen.calls, attributes(pipe))


def attributes(pipe: Any) -> list[set[str]]:
    """The names on everything that a policy touches; a first run adds some of its own."""
    return [set(vars(part)) for part in (pipe, pipe.scheduler, *find_denoisers(pipe).values())]


def check_reuse(subject: Subject) -> None:
    """The networks run on the computed steps only, as often as they do untouched."""
    result, seen = subject.follow(subject.plan)
    planned = [(step, name) for step, name in subject.calls if step in COMPUTED]
    assert seen.calls == planned
    assert 0 < len(planned) < len(subject.calls)
    assert bool(torch.isfinite(result).all())
    assert not torch.equal(result, subject.result)
    again, _ = subject.follow(subject.plan)
    assert torch.equal(again, result)
    check_definition(subject, seen)


def check_definition(subject: Subject, seen: Seen) -> None:
    """Every latent is that of ``core.sampler`` over the untouched pipeline, to the bit."""
    untouched = led(subject.pipe, seen, lambda: subject.row.generate(subject.pipe))
    for k in COMPUTED:
        assert torch.equal(seen.outputs[k], untouched.outputs[k])
    if not subject.row.blends:
        outputs = iter([untouched.outputs[k] for k in COMPUTED])
        reference = run_trajectory(
            lambda x, sigma: next(outputs),
            subject.run.latents[0],
            sigmas=subject.sigmas,
            plan=subject.plan,
        )
        assert all(map(torch.equal, seen.samples, reference.latents))
        assert torch.equal(seen.results[-1], reference.latents[-1])
        return
    rows = torch.cat([subject.plan.latent[:, None], subject.plan.outputs], dim=1).tolist()
    past: list[Tensor] = []
    for k, x in enumerate(seen.samples):
        past = [untouched.outputs[k], *past][: subject.plan.history] if k in COMPUTED else past
        assert torch.equal(seen.results[k], combine(x, past, rows[k]))


def check_all_computed(subject: Subject) -> None:
    """With every step computed the result is the untouched one."""
    every = range(STEPS)
    result, seen = subject.follow(
        paper_plan(subject.sigmas, every, scale=1.0, rectified=False)
    )
    assert torch.equal(result, subject.result)
    assert seen.calls == subject.calls
    if not keeps_history(subject.pipe.scheduler):
        plan = TrajectoryPlan(tuple(every), subject.update[:, 0], subject.update[:, 1:])
        result, _ = subject.follow(plan)
        size = float(subject.result.abs().max())
        torch.testing.assert_close(result, subject.result, rtol=0, atol=ROUNDING * max(1.0, size))


def check_detached(subject: Subject) -> None:
    """After ``detach`` nothing is left, and the result is that of a pipeline never touched."""
    assert attributes(subject.pipe) == subject.attributes
    assert torch.equal(subject.row.generate(subject.pipe), subject.result)


def check_refused(row: Row) -> str:
    """No policy is made for the pipeline, and the sentence says why."""
    with pytest.raises(SchedulerError) as caught:
        record_run(row.build(), **row.arguments())
    return str(caught.value)


CHECKS: tuple[Callable[[Subject], None], ...] = (check_reuse, check_all_computed, check_detached)
