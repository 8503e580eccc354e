"""The closed-loop refit: of a budget, and of policies that get one more plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxImg2ImgPipeline
from torch import Tensor

from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.lockstep import run_plan
from ertacache.calibration.profile import profile, profile_runs
from ertacache.calibration.reference import Reference
from ertacache.calibration.refit import refit, refit_budget
from ertacache.calibration.session import Session, number_runs
from ertacache.calibration.solve import solve
from ertacache.core.distance import typical_distance
from ertacache.core.frontier import MeasuredFit
from ertacache.core.gram import Schedule
from ertacache.core.groups import ONE_GROUP, Groups
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.simulate import Fit, fit_plans
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.attach import attach
from ertacache.integration.solve import PlanSolver, profile_of
from tests.calibration.conftest import (
    HELDOUT,
    RUNS,
    STEPS,
    TINY_HELDOUT,
    TINY_PROMPTS,
    TINY_RUNS,
    TINY_STEPS,
    counting_rows,
    tiny_call,
)
from tests.integration.tiny import CASES, quiet

Steps = tuple[int, ...]
POOR, SEARCHED, PAPER, UNIFORM = (0, 1, 2), (0, 1, 3), (0, 1, 4), (0, 4, 7)
FINEST = Groups(channels=4, bands=3)
UNSEEN = number_runs(HELDOUT, seed=50)


def heldout_error(session: Session, known: Policy, fitted: FittedPlan | None) -> float:
    assert fitted is not None
    assert isinstance(fitted.plan, TrajectoryPlan)
    reference = session.reference(UNSEEN)
    found = run_plan(session, reference, fitted.plan, fingerprint=known.fingerprint)
    return typical_distance(found)


def test_the_refit_is_kept_only_if_it_helps(session: Session, known: Policy) -> None:
    solved = PlanSolver(known).solve(profile_of(known).schedule, STEPS // 4)
    refitted = refit_budget(session, known, session.reference(RUNS), STEPS // 4)
    assert len(refitted.compute_steps) == STEPS // 4
    error = heldout_error(session, known, refitted)
    assert error <= 1.02 * heldout_error(session, known, solved)
    assert refitted.measured_error is not None
    assert refitted.measured_error / 2 < error < refitted.measured_error * 2
    assert solved is not None
    assert refitted.predicted_error == solved.predicted_error


EVERY = [0, 1, 2, 3]


class Poor(PlanSolver):
    """Finds nothing better than to compute the first steps."""

    def searched(self, schedule: Schedule, budget: int) -> list[Steps]:
        return [SEARCHED] if budget == len(SEARCHED) else []

    def solve(self, schedule: Schedule, budget: int) -> FittedPlan:
        gram, steps = self.profile.statistics.gram, tuple(range(budget))
        (plan,) = fit_plans(gram, schedule.nominal, schedules=[steps], fit=Fit())
        return FittedPlan(plan, schedule.sigmas, target=schedule.target, predicted_error=1.0)


def test_a_poor_schedule_is_replaced(
    session: Session, known: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = Poor(known).solve(profile_of(known).schedule, 4)
    monkeypatch.setattr("ertacache.calibration.refit.PlanSolver", Poor)
    refitted = refit_budget(session, known, session.reference(RUNS), 4)
    assert refitted.compute_steps == (0, 4, 7, 11)  # the uniform one
    assert heldout_error(session, known, refitted) < 0.5 * heldout_error(session, known, poor)


@dataclass
class Script:
    """Refits whose errors are scripted; no network is evaluated.

    Attributes:
        error: of a compute schedule and a fit.
        solved: error of the plan as solved.
        tried: all refits, in order.
        fitted: places of the runs that each is fitted on.
    """

    error: Callable[[Steps, Fit], float]
    solved: float = 100.0
    tried: list[tuple[Steps, Fit]] = field(default_factory=list)
    fitted: list[list[int]] = field(default_factory=list)

    def refit(
        self,
        session: Session,
        reference: Reference,
        steps: Steps,
        *,
        fit: Fit,
        weights: Tensor,
        **_: Any,
    ) -> tuple[list[TrajectoryPlan], Tensor]:
        self.tried.append((steps, fit))
        self.fitted.append(weights[0].nonzero().flatten().tolist())
        z = torch.zeros(reference.schedule.num_steps, fit.groups.count, 1 + fit.history)
        z = torch.cat([z, z[..., 1:]], dim=-1).double() if fit.branch else z.double()
        plan = TrajectoryPlan(steps, z, fit.groups, branch=fit.branch)
        return [plan], errors(reference, self.error(steps, fit))

    def run(self, session: Session, reference: Reference, plan: object, **_: Any) -> Tensor:
        assert isinstance(plan, TrajectoryPlan)
        return errors(reference, self.solved)

    @property
    def fits(self) -> list[Fit]:
        return [fit for _, fit in self.tried]


def errors(reference: Reference, error: float) -> Tensor:
    return torch.full((len(reference.runs),), error, dtype=torch.float64)


@pytest.fixture
def scripted(
    tiny: Any, tiny_known: Policy, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., FittedPlan]:
    """Refit three computed steps, by a script; the solved ones are 0, 1 and 2."""
    session = Session(tiny, tiny_call(), batch_size=4)
    found = session.reference(TINY_RUNS[:4])
    reference = replace(found, facts=replace(found.facts, branch=True))
    monkeypatch.setattr("ertacache.calibration.refit.PlanSolver", Poor)
    monkeypatch.setattr("ertacache.calibration.refit._paper_schedule", lambda *_: [PAPER])

    def refit_three(script: Script, policy: Policy = tiny_known, **changes: Any) -> FittedPlan:
        monkeypatch.setattr("ertacache.calibration.refit.refit_plans", script.refit)
        monkeypatch.setattr("ertacache.calibration.refit.run_plan", script.run)
        facts = replace(reference.facts, **changes)
        return refit_budget(session, policy, replace(reference, facts=facts), 3)

    return refit_three


def test_all_parts_of_a_fit_are_tried(scripted: Callable[..., FittedPlan]) -> None:
    """Where the first is best, one part at a time is another one."""
    first = (POOR, Fit(ridge=1e-2))
    script = Script(lambda *tried: 1.0 if tried == first else 2.0)
    found = scripted(script)
    assert script.tried == [
        first,
        (POOR, Fit(ridge=1e-1)),
        (POOR, Fit(ridge=1e-3)),
        (SEARCHED, Fit(ridge=1e-2)),
        (PAPER, Fit(ridge=1e-2)),
        (UNIFORM, Fit(ridge=1e-2)),
        (POOR, Fit(ridge=1e-2, history=5)),
        (POOR, Fit(ridge=1e-2, history=3)),
        (POOR, Fit(ridge=1e-2, groups=Groups(bands=FINEST.bands))),
        (POOR, Fit(ridge=1e-2, groups=Groups(channels=FINEST.channels))),
        (POOR, Fit(ridge=1e-2, groups=FINEST)),
        (POOR, Fit(ridge=1e-2, branch=True)),
        (POOR, Fit(ridge=1e-3, branch=True)),
        first,
        first,
    ]
    # One half; the best with the halves exchanged, and on all.
    assert script.fitted == [[0, 2]] * 13 + [[1, 3], EVERY]
    assert (found.compute_steps, found.measured_error) == (POOR, pytest.approx(1.0))
    assert found.predicted_error == 1.0  # as solved


def test_all_parts_may_be_better(scripted: Callable[..., FittedPlan]) -> None:
    best = Fit(ridge=1e-1, history=3, groups=Groups(bands=3), branch=True)

    def error(steps: Steps, fit: Fit) -> float:
        ahead = [steps == UNIFORM, fit.history == 3, fit.groups.bands == 3, fit.branch]
        return (2.0 - (fit.ridge == 1e-1)) / 2 ** sum(ahead)

    script = Script(error)
    found = scripted(script)
    assert script.tried[-1] == (UNIFORM, best)
    assert script.fitted[-1] == EVERY
    assert found.measured_error == pytest.approx(1 / 16)
    assert isinstance(found.plan, TrajectoryPlan)
    assert found.compute_steps == UNIFORM
    assert (found.plan.groups, found.plan.history, found.plan.branch) == (best.groups, 3, True)


@pytest.mark.parametrize(("solved", "kept"), [(1.01, False), (1.0, True), (0.5, True)])
def test_the_plan_as_solved_is_kept_if_no_refit_is_better(
    scripted: Callable[..., FittedPlan], tiny_known: Policy, solved: float, kept: bool
) -> None:
    script = Script(lambda steps, fit: 1.0, solved)
    found = scripted(script)
    expected = Poor(tiny_known).solve(profile_of(tiny_known).schedule, 3)
    assert torch.equal(coefficients(found), coefficients(expected)) == kept
    assert (EVERY in script.fitted) == (not kept)
    assert found.measured_error == pytest.approx(min(solved, 1.0))


@pytest.mark.parametrize(("gain", "kept"), [(0.29, False), (0.31, True)])
def test_a_second_history_must_be_better_by_a_margin(
    scripted: Callable[..., FittedPlan], gain: float, kept: bool
) -> None:
    script = Script(lambda steps, fit: 10 ** (-gain / 20) if fit.branch else 1.0)
    assert plan_of(scripted(script)).branch == kept
    script = Script(script.error)
    assert not plan_of(scripted(script, branch=False)).branch
    assert not any(fit.branch for fit in script.fits)  # there is no guidance


def test_what_a_refit_begins_with(scripted: Callable[..., FittedPlan], tiny_known: Policy) -> None:
    """The order that was measured for the budget; no groups if the layout is not known."""
    fits = (MeasuredFit(2, Fit(order=2), 1.0), MeasuredFit(5, Fit(order=1), 1.0))
    script = Script(lambda steps, fit: 1.0)
    scripted(script, replace(tiny_known, fits=fits), layout=None)
    assert {fit.order for fit in script.fits} == {2}
    assert {fit.groups for fit in script.fits} == {ONE_GROUP}


def plan_of(fitted: FittedPlan) -> TrajectoryPlan:
    assert isinstance(fitted.plan, TrajectoryPlan)
    return fitted.plan


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_a_refit_with_guidance(name: str) -> None:
    """Groups and a second history, if the search keeps them, are in the plan and in its runs."""
    session = Session(CASES[name].build(), tiny_call(name), batch_size=4)
    known = profile_runs(session, TINY_RUNS[:4], keep=TINY_RUNS[:4])
    reference = session.reference(TINY_RUNS[:4])
    found = refit_budget(session, known, reference, 4)
    distances = run_plan(session, reference, plan_of(found), fingerprint=known.fingerprint)
    plain = PlanSolver(known).plain(reference.schedule, 4)
    before = run_plan(session, reference, plan_of(plain), fingerprint=known.fingerprint)
    assert typical_distance(distances) < typical_distance(before)


def test_one_prompt_is_not_refitted(session: Session, known: Policy) -> None:
    reference, before = session.reference(RUNS[:1]), session.evaluations.total
    found = refit_budget(session, known, reference, STEPS // 4)
    assert session.evaluations.total == before  # no other to evaluate it on
    solved = solve(known, compute_steps=STEPS // 4).default
    assert coefficients(found).equal(coefficients(solved))
    assert found.measured_error is None


def coefficients(fitted: FittedPlan) -> torch.Tensor:
    assert isinstance(fitted.plan, TrajectoryPlan)
    return fitted.plan.coefficients


def test_a_budget_without_a_plan(
    session: Session, known: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is predicted to help, plain reuse is what a refit has to beat."""
    monkeypatch.setattr(PlanSolver, "solve", lambda *_: None)
    found = refit_budget(session, known, session.reference(RUNS), 3)
    assert len(found.compute_steps) == 3
    assert found.measured_error is not None
    plain = PlanSolver(known).plain(profile_of(known).schedule, 3)
    assert found.measured_error < (plain.predicted_error or 0)


def test_a_saved_policy_is_refitted_for_another_budget(
    tiny: Any, tiny_known: Policy, tmp_path: Path
) -> None:
    policy = solve(tiny_known, compute_steps=4)
    policy.save(tmp_path / "policy.safetensors")
    tiny_known.save(tmp_path / "profile.safetensors")
    call, stages = tiny_call() | {"batch_size": 5}, list[str]()
    again = refit(
        tiny,
        tmp_path / "policy.safetensors",
        compute_steps=3,
        heldout=TINY_HELDOUT,
        stage=lambda name: stages.append(name),
        **call,
    )
    four, three = again.plans
    assert len(three.compute_steps) == 3
    assert torch.equal(coefficients(four), coefficients(policy.default))
    assert stages == ["refit", "validate"]
    assert [row.method for row in three.validation] == ["policy", "plain reuse", "fewer steps"]
    assert three.validation[0].prompts == len(TINY_HELDOUT)
    assert profile_of(again).runs == profile_of(tiny_known).runs
    halved = refit(tiny, str(tmp_path / "profile.safetensors"), speedup=8 / 3, **call)
    assert torch.equal(coefficients(halved.default), coefficients(three))
    assert halved.default.validation == ()


def test_the_budget_of_a_policy_is_its_own(tiny: Any, tiny_known: Policy) -> None:
    solved = solve(tiny_known, compute_steps=5)
    call = {name: value for name, value in tiny_call().items() if name != "num_inference_steps"}
    refitted = refit(tiny, solved, refit_prompts=2, **call)  # the steps are the profile's
    (plan,) = refitted.plans  # in place of the solved one
    assert len(plan.compute_steps) == 5
    assert plan.num_steps == TINY_STEPS
    assert plan is not solved.default


def test_another_number_of_steps_adds_a_plan(tiny: Any, tiny_known: Policy) -> None:
    """From the profile of eight steps; the others stay, and a run of six steps follows it."""
    policy = solve(solve(tiny_known, compute_steps=4), compute_steps=3)
    call = tiny_call() | {"num_inference_steps": 6}
    found = refit(tiny, policy, compute_steps=3, refit_prompts=2, heldout=TINY_HELDOUT[:1], **call)
    assert found.plans[:2] == policy.plans
    plan = found.plans[2]
    assert (plan.num_steps, len(plan.compute_steps)) == (6, 3)
    assert [row.computed_steps for row in plan.validation] == [3, 3, 3]
    assert found.profile is policy.profile
    again = refit(tiny, found, compute_steps=3, refit_prompts=2, **call)
    assert again.plans[:2] == policy.plans
    assert len(again.plans) == 3
    assert torch.equal(coefficients(again.plans[2]), coefficients(plan))
    with attach(tiny, found, compute_steps=3) as handle:
        tiny("a circle", output_type="latent", **call)
        assert handle.plan is plan
        tiny("a circle", output_type="latent", **tiny_call())
        assert handle.plan is policy.plans[1]


def test_another_size_adds_a_plan(tiny: Any, tiny_known: Policy) -> None:
    """Of the same schedule, for which it replaces the plan of the profiled size."""
    call = tiny_call() | {"height": 48}
    policy = solve(tiny_known, compute_steps=4)
    (plan,) = refit(tiny, policy, compute_steps=4, refit_prompts=2, **call).plans
    assert plan.fits(profile_of(tiny_known).schedule)
    assert not torch.equal(coefficients(plan), coefficients(policy.default))


def test_what_cannot_be_refitted(tiny: Any, tiny_known: Policy) -> None:
    solved = solve(tiny_known, compute_steps=5)
    bare = Policy(solved.fingerprint, plans=solved.plans)
    with counting_rows(tiny.transformer) as rows:
        with pytest.raises(PolicyError, match="the policy has no profile"):
            refit(tiny, bare, **tiny_call())
        with pytest.raises(PolicyError, match="no plan yet: give a speed-up"):
            refit(tiny, tiny_known, **tiny_call())
        with pytest.raises(ValueError, match="give one target, not speedup and compute_steps"):
            refit(tiny, tiny_known, compute_steps=3, speedup=2.0, **tiny_call())
        with pytest.raises(ValueError, match="refit_prompts must be at least 1"):
            refit(tiny, tiny_known, compute_steps=3, refit_prompts=0, **tiny_call())
    assert rows == []
    for budget in (1, TINY_STEPS):
        with pytest.raises(ValueError, match=f"cannot compute {budget} of 8 steps: 2 to 7 are"):
            refit(tiny, tiny_known, compute_steps=budget, refit_prompts=1, **tiny_call())


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> list[Reference]:
    """The full runs that are refitted on."""
    seen: list[Reference] = []

    def spy(session: Session, policy: Policy, reference: Reference, budget: int) -> FittedPlan:
        seen.append(reference)
        return refit_budget(session, policy, reference, budget)

    monkeypatch.setattr("ertacache.calibration.refit.refit_budget", spy)
    return seen


def test_refit_with_heldout_prompts_of_the_profile(
    tiny: Any,
    tiny_known: Policy,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They leave the fit, not the policy; where nothing else is there, the rows say so."""
    fitted: list[tuple[str, ...]] = []

    def spy(session: Session, policy: Policy, reference: Reference, budget: int) -> FittedPlan:
        assert set(reference.runs) == set(profile_of(policy).runs)
        fitted.append(tuple(run.prompt for run in profile_of(policy).runs))
        return PlanSolver(policy).plain(reference.schedule, budget)

    monkeypatch.setattr("ertacache.calibration.refit.refit_budget", spy)
    call = tiny_call() | {"compute_steps": 3, "batch_size": 5}
    with caplog.at_level("INFO", logger="ertacache"):
        found = refit(tiny, tiny_known, heldout=TINY_PROMPTS[3:], **call)
    assert "2 of 5 profiled runs are of prompts to validate on" in caplog.text
    assert [row.heldout for row in found.default.validation] == [True] * 3
    assert found.profile is tiny_known.profile
    with pytest.warns(UserWarning, match="marked as not held out"):
        found = refit(tiny, tiny_known, heldout=TINY_PROMPTS, **call)
    assert [row.heldout for row in found.default.validation] == [False] * 3
    assert fitted == [tuple(TINY_PROMPTS[:3]), tuple(TINY_PROMPTS)]


def test_runs_keep_the_arguments_that_differ_between_them(
    tiny: Any, references: list[Reference]
) -> None:
    """Also held-out ones; and each half of them, fitted on and evaluated on, has all values."""
    short = tiny_call() | {"num_inference_steps": 4}
    varied = short | {"guidance_scale": [2.0, 5.0]}
    known = profile(tiny, TINY_PROMPTS[:4], **varied)
    theirs = r"but the profiled runs have 2\.0, 5\.0, and a refit runs them as they are: leave"
    with pytest.raises(ValueError, match=rf"guidance_scale is \[2\.0, 7\.0\], {theirs}"):
        refit(tiny, known, compute_steps=2, **(short | {"guidance_scale": [2.0, 7.0]}))
    with pytest.raises(ValueError, match=rf"guidance_scale is 9, {theirs}"):
        refit(tiny, known, compute_steps=2, **(short | {"guidance_scale": 9}))
    plain = profile(tiny, TINY_PROMPTS[:1], **short)
    with pytest.raises(ValueError, match=r"5\.0\], but the profiled runs have one value"):
        refit(tiny, plain, compute_steps=2, **varied)
    scales: list[float] = []

    def read(_: Any, given: Any, arguments: dict[str, Any]) -> None:
        scales.append(float(arguments["guidance"][0]))

    hook = tiny.transformer.register_forward_pre_hook(read, with_kwargs=True)
    del short["guidance_scale"]
    refit(tiny, known, compute_steps=2, heldout=TINY_HELDOUT, **short)
    hook.remove()
    (reference,) = references
    values = [dict(run.arguments)["guidance_scale"] for run in reference.runs]
    assert values == [2.0, 5.0, 2.0, 5.0]
    for half in profile_of(known).halves(reference.runs):
        assert [dict(run.arguments)["guidance_scale"] for run in half] == [2.0, 5.0]
    assert set(scales) == {2.0, 5.0}  # never the pipeline's own


def test_a_second_history_may_need_a_weaker_ridge(scripted: Callable[..., FittedPlan]) -> None:
    best = Fit(ridge=1e-3, branch=True)
    script = Script(
        lambda steps, fit: 0.5 if (steps, fit) == (POOR, best) else 2.0 - (fit.ridge == 1e-2)
    )
    found = scripted(script)
    assert plan_of(found).branch
    assert script.tried[-1] == (POOR, best)


def test_every_value_of_guidance_has_its_own_coefficients(tiny: Any) -> None:
    """Fitted side by side; a run takes those of its value, interpolated."""
    call = tiny_call() | {"num_inference_steps": 6}
    session = Session(tiny, call | {"guidance_scale": [1.0, 30.0]}, batch_size=2)
    runs = session.number_runs([*TINY_PROMPTS, *TINY_HELDOUT][:8])
    known = profile_runs(session, runs, keep=runs)
    reference = session.reference(runs)
    fitted = refit_budget(session, known, reference, 3)
    guided = fitted.guided
    assert guided is not None
    assert (guided.argument, guided.values) == ("guidance_scale", (1.0, 30.0))
    policy = Policy(known.fingerprint, profile=known.profile, plans=(fitted,))
    joint, own = [], []
    for value, z in zip(guided.values, guided.coefficients, strict=True):
        part = reference.select(
            [k for k, run in enumerate(runs) if value in dict(run.arguments).values()]
        )
        facts, plan = known.fingerprint, plan_of(fitted)
        joint.append(run_plan(session, part, plan, fingerprint=facts))
        own.append(run_plan(session, part, replace(plan, coefficients=z), fingerprint=facts))
    assert typical_distance(torch.cat(own)) < typical_distance(torch.cat(joint))
    for value in (1.0, 7.0, 30.0):
        with attach(tiny, policy) as handle:
            tiny(TINY_PROMPTS[0], output_type="pt", **(call | {"guidance_scale": value}))
            assert handle.plan is not None
            assert torch.equal(plan_of(handle.plan).coefficients, guided.at(value))


@pytest.mark.parametrize("best", [0.0, 0.1, 0.3, 1.0])
def test_prompts_of_other_guidance_count_as_much_as_helps(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, best: float
) -> None:
    """In the coefficients of a value; 1: all count alike, and the plan serves all values."""
    values = [1.0, 30.0]
    session = Session(tiny, tiny_call() | {"guidance_scale": values}, batch_size=2)
    runs = session.number_runs([*TINY_PROMPTS, *TINY_HELDOUT][:8])
    known = profile_runs(session, runs, keep=runs)
    profile = profile_of(known)
    usual = dict(zip(profile.runs, profile.weights.tolist(), strict=True))
    shares: list[float] = []

    def share(weights: Tensor, follows: list[int]) -> float:
        """How much runs of other values count; in each fit the runs that follow it count fully."""
        counted = weights / torch.tensor([usual[run] for run in runs]).double()
        fitted = (weights > 0).any(0)
        if len(weights) == 1:
            assert follows == [0] * len(runs)
            assert counted[0, fitted].tolist() == pytest.approx([1.0] * int(fitted.sum()))
            return 1.0
        assert follows == [values.index(dict(run.arguments)["guidance_scale"]) for run in runs]
        own = torch.eye(2).bool()[:, follows]
        assert counted[own & fitted].tolist() == pytest.approx([1.0] * int(fitted.sum()))
        (found,) = {round(one, 6) for one in counted[~own & fitted].tolist()}
        return found

    def refit_scripted(
        _: Any,
        reference: Reference,
        steps: Steps,
        *,
        weights: Tensor,
        follows: list[int],
        fit: Fit,
        **__: Any,
    ) -> tuple[list[TrajectoryPlan], Tensor]:
        shares.append(share(weights, follows))
        z = torch.full((TINY_STEPS, fit.groups.count, 1 + fit.history), len(shares)).double()
        plans = [TrajectoryPlan(steps, z + k, fit.groups) for k in range(len(weights))]
        return plans, errors(reference, 1.0 if shares[-1] == best else 2.0)

    monkeypatch.setattr("ertacache.calibration.refit.refit_plans", refit_scripted)
    monkeypatch.setattr(
        "ertacache.calibration.refit.run_plan", lambda _, found, *__, **___: errors(found, 9.0)
    )
    fitted = refit_budget(session, known, session.reference(runs), 3)
    # The search, the other shares, the exchanged halves, and all prompts: alike, then by value.
    end = [0.3, 0.0, 1.0, best, 1.0] + [best] * (best < 1.0)
    assert shares[-len(end) :] == end
    assert set(shares[: -len(end)]) == {0.1}
    assert plan_of(fitted).coefficients[0, 0, 0] == len(shares) - (best < 1.0)
    if best == 1.0:
        assert fitted.guided is None
    else:
        assert fitted.guided is not None
        assert fitted.guided.values == (1.0, 30.0)
        assert fitted.guided.coefficients[:, 0, 0, 0].tolist() == [len(shares), len(shares) + 1]


def test_other_arguments_than_guidance_share_their_coefficients(tiny: Any) -> None:
    call = tiny_call() | {"num_inference_steps": 4, "negative_prompt": ["black", "red"]}
    session = Session(tiny, call)
    runs = session.number_runs(TINY_PROMPTS[:4])
    known = profile_runs(session, runs, keep=runs)
    assert refit_budget(session, known, session.reference(runs), 2).guided is None


def test_a_refit_of_later_runs_is_called_as_they_were() -> None:
    """Of eight steps five are run: naming five would run three, for which no user has a use."""
    flux = CASES["flux"].build()
    pipe = quiet(FluxImg2ImgPipeline(**flux.components))
    image = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    call = tiny_call() | {"image": image, "strength": 0.6}
    known = calibrate(pipe, TINY_PROMPTS[:3], compute_steps=2, refit_prompts=2, **call)
    steps = known.default.num_steps
    assert steps < TINY_STEPS
    assert {row.method for row in known.default.validation} >= {"policy", "fewer steps"}
    assert refit(pipe, known, compute_steps=3, **call).plans[-1].num_steps == steps
    (found,) = known.check(pipe, TINY_HELDOUT[:1], **call).plans
    assert found.num_steps == steps
    del call["num_inference_steps"]
    assert known.check(pipe, TINY_HELDOUT[:1], **call).plans[0].num_steps > steps  # its default
