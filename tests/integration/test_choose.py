"""Which plan a run follows: fitted or solved, once per schedule and target, or none at all."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from ertacache.core.frontier import MeasuredFit
from ertacache.core.gram import Schedule
from ertacache.core.plans import Target, TrajectoryPlan
from ertacache.core.simulate import Fit
from ertacache.formats.fitted import FittedPlan, ValidationRow
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.attach import Handle, attach
from ertacache.integration.choose import PlanChooser
from ertacache.integration.solve import PlanSolver
from tests.integration.reference import replayed
from tests.integration.rings import RingSampling, with_frontier
from tests.integration.sampling import STEPS, make
from tests.integration.setting import Setting, paper_plan, trajectory_plan, watch_steps

COMPUTED = (0, 2, 4, 7)


@cache
def sampling() -> RingSampling:
    return RingSampling(make("FlowMatchEulerDiscreteScheduler"))


@cache
def profiled() -> Policy:
    """A profile of ten steps, and a plan with four of them computed."""
    plan = trajectory_plan(sampling().schedule().nominal, COMPUTED)
    return with_frontier(sampling().policy(plan, profile=sampling().profile(), unit_psnr=10.0))


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Number of steps and computed steps of every plan that is solved, in turn."""
    calls: list[tuple[int, int]] = []
    original = PlanSolver.solve

    def solve(self: PlanSolver, schedule: Schedule, budget: int) -> FittedPlan | None:
        calls.append((schedule.num_steps, budget))
        return original(self, schedule, budget)

    monkeypatch.setattr(PlanSolver, "solve", solve)
    return calls


def run(handle: Handle, num_steps: int = STEPS) -> tuple[int, int]:
    """The numbers of steps and of computed steps that a run has."""
    sampling().unet.calls = 0
    sampling()(num_inference_steps=num_steps)
    last = handle.stats.last
    assert sampling().unet.calls == last.computed_steps
    return last.computed_steps + last.reused_steps, last.computed_steps


def test_fitted_plan_is_taken_where_schedule_and_budget_match(
    solved: list[tuple[int, int]],
) -> None:
    policy = profiled()
    for target in ({}, {"speedup": 2.5}, {"compute_steps": 4}):
        with attach(sampling(), policy, **target) as handle:
            assert handle.plan is None  # before the first run
            assert run(handle) == (10, 4)
            assert handle.plan is policy.default
    assert solved == []
    with attach(sampling(), policy, compute_steps=5) as handle:
        assert run(handle) == (10, 5)
        assert handle.plan is not None
        assert not any(handle.plan is plan for plan in policy.plans)
        with watch_steps(sampling()) as seen:
            result = sampling()()
        assert torch.equal(result, replayed(handle.plan, seen)[-1])
    assert solved == [(10, 5)]


def test_second_run_on_a_schedule_solves_nothing(solved: list[tuple[int, int]]) -> None:
    with attach(sampling(), profiled(), speedup=2.0) as handle:
        counts = [run(handle, num_steps) for num_steps in (10, 14, 7, 14, 10, 7)]
    assert counts == [(10, 5), (14, 7), (7, 3), (14, 7), (10, 5), (7, 3)]
    assert solved == [(10, 5), (14, 7), (7, 3)]


def test_target_may_change_between_runs(solved: list[tuple[int, int]]) -> None:
    """What was chosen before is still there when the target comes back."""
    with attach(sampling(), profiled()) as handle:
        assert (handle.speedup, handle.compute_steps, handle.min_psnr) == (None, None, None)
        assert run(handle) == (10, 4)
        handle.speedup = 3.0
        assert (handle.speedup, handle.compute_steps, handle.min_psnr) == (3.0, None, None)
        assert run(handle) == (10, 3)
        handle.compute_steps = 6
        assert (handle.speedup, handle.compute_steps, handle.min_psnr) == (None, 6, None)
        assert run(handle) == (10, 6)
        handle.speedup = 3.0
        assert run(handle) == (10, 3)
        handle.min_psnr = 20.0
        assert handle.min_psnr == 20.0
        assert run(handle)[1] < 10
        handle.speedup = None  # the plan of the policy again
        assert run(handle) == (10, 4)
    assert solved[:2] == [(10, 3), (10, 6)]
    assert len(solved) <= 3


BAD: list[tuple[str, Any]] = [
    *(("speedup", value) for value in (0, 0.5, -2.0, math.nan, math.inf)),
    *(("compute_steps", value) for value in (0, -1)),
    *(("min_psnr", value) for value in (math.nan, math.inf)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_targets_out_of_range_are_refused(name: str, value: Any) -> None:
    """On attach, and between runs; the target before stays."""
    with pytest.raises(ValueError, match=f"{name} must be"):
        attach(sampling(), profiled(), **{name: value})
    with attach(sampling(), profiled(), compute_steps=3) as handle:
        with pytest.raises(ValueError, match=f"{name} must be"):
            setattr(handle, name, value)
        assert run(handle) == (10, 3)


def test_one_target_at_a_time() -> None:
    with pytest.raises(ValueError, match="give one target, not speedup and min_psnr"):
        attach(sampling(), profiled(), speedup=2.0, min_psnr=30.0)


@pytest.mark.parametrize(
    ("num_steps", "computed"), [(5, 2), (7, 3), (12, 5), (20, 8), (3, 2), (2, 2), (1, 1)]
)
def test_without_a_target_the_share_of_computed_steps_stays(num_steps: int, computed: int) -> None:
    """Four of ten, rounded up, and two at least; a run of two has nothing to reuse."""
    with attach(sampling(), profiled()) as handle:
        assert run(handle, num_steps) == (num_steps, computed)


def test_profile_alone_needs_a_target() -> None:
    policy = replace(profiled(), plans=())
    with pytest.raises(PolicyError, match="holds no plan yet: give a speed-up, or refit one"):
        attach(sampling(), policy)
    with attach(sampling(), policy, speedup=2.0) as handle:
        assert run(handle) == (10, 5)
        handle.speedup = None
        with pytest.raises(PolicyError, match="holds no plan yet"):
            run(handle)
        handle.compute_steps = 3
        assert run(handle) == (10, 3)


def test_other_targets_without_a_profile() -> None:
    policy = replace(profiled(), profile=None, frontier=())
    for target in ({"speedup": 2.0}, {"compute_steps": 3}, {"min_psnr": 30.0}):
        with (
            attach(sampling(), policy, **target) as handle,
            pytest.raises(
                PolicyError,
                match="the plan is for 4 of 10 computed steps and comes without a profile: leave ",
            ),
        ):
            run(handle)
    with attach(sampling(), policy, speedup=2.5) as handle:
        assert run(handle) == (10, 4)


@pytest.mark.parametrize(
    ("provenance", "name"),
    [
        ({"model": "emoji-flux"}, "emoji-flux"),
        ({"model": "one\ntwo"}, "RingSampling"),  # of merged profiles
        ({}, "RingSampling"),
    ],
)
def test_a_run_of_other_steps_names_the_model(provenance: dict[str, str], name: str) -> None:
    """As it was given, or its pipeline; not where its weights are."""
    policy = replace(profiled(), profile=None, frontier=(), provenance=provenance)
    with (
        attach(sampling(), policy) as handle,
        pytest.raises(PolicyError, match=f"12 steps, .* or calibrate {name} at these settings"),
    ):
        run(handle, 12)


def test_plan_of_the_papers_method_is_followed_as_the_default_only() -> None:
    """It may change the sigmas, and nobody asks for that with a number of computed steps."""
    steps, sigmas = (0, 2, 5, 9), sampling().schedule().sigmas
    paper = sampling().policy(paper_plan(sigmas, steps), profile=profiled().profile)
    with attach(sampling(), paper) as handle:
        assert run(handle) == (10, 4)
        assert handle.plan is paper.default
        with pytest.raises(PolicyError, match="for 10 and is of the paper's method: pass num_inf"):
            run(handle, 12)
        handle.compute_steps = 4
        assert run(handle) == (10, 4)
        assert handle.plan is not None
        assert handle.plan.method == "trajectory"
        assert run(handle, 12) == (12, 4)


def test_fewest_steps_that_are_predicted_to_reach_a_psnr() -> None:
    solver = PlanSolver(profiled())
    for num_steps in (STEPS, 14):
        curve = solver.curve(sampling().schedule(num_steps))
        for computed in (3, 6):
            psnr = solver.psnr(curve[computed]) - 0.01
            with attach(sampling(), profiled(), min_psnr=psnr) as handle:
                assert run(handle, num_steps) == (num_steps, computed)


def test_measured_psnr_comes_before_the_predicted_one() -> None:
    policy = profiled()
    solver = PlanSolver(policy)
    wanted = solver.psnr(solver.curve(sampling().schedule())[4]) - 0.01
    for psnr, computed in ((wanted - 10, 5), (wanted + 10, 4)):
        row = ValidationRow("policy", 4, psnr=psnr, speedup=2.0, prompts=3)
        plan = replace(policy.default, validation=(row,))
        with attach(sampling(), replace(policy, plans=(plan,)), min_psnr=wanted) as handle:
            assert run(handle) == (10, computed)


def test_psnr_out_of_reach_computes_every_step() -> None:
    full = sampling()()
    with attach(sampling(), profiled(), min_psnr=500.0) as handle:
        with pytest.warns(UserWarning, match=r"to reach 500 dB in this run of 10 steps, so every"):
            assert torch.equal(sampling()(), full)
        assert handle.plan is None
        assert handle.summary().startswith("last run: every step computed\n1 run: 10 steps comp")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(sampling()(), full)  # and it was said once
        handle.min_psnr = 1.0
        assert run(handle) == (10, 2)


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler"])
def test_where_nothing_helps_every_step_is_computed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit the run of the pipeline without a policy, after a warning with the remedy."""
    other = RingSampling(make(name))
    full = {num_steps: other(num_inference_steps=num_steps) for num_steps in (STEPS, 14)}
    monkeypatch.setattr(PlanSolver, "solve", lambda *_: None)
    with attach(other, replace(profiled(), plans=()), speedup=2.0) as handle:
        for num_steps, expected in full.items():
            report = (
                rf"no plan with {num_steps // 2} of {num_steps} steps computed is predicted to be "
                r"better than plain reuse .*: give a smaller speed-up, or calibrate at these set"
            )
            with pytest.warns(UserWarning, match=report):
                result = other(num_inference_steps=num_steps)
            assert torch.equal(result, expected)
            assert handle.stats.last.computed_steps == num_steps
            assert handle.plan is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(other(), full[STEPS])


def test_speedup_of_one_is_the_full_run(solved: list[tuple[int, int]]) -> None:
    full = sampling()()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for target in ({"speedup": 1.0}, {"compute_steps": 10}, {"compute_steps": 99}):
            with attach(sampling(), profiled(), **target) as handle:
                assert torch.equal(sampling()(), full)
                assert handle.plan is None
    assert solved == []


def test_measured_fits_are_those_of_what_is_solved() -> None:
    """A ridge this strong is plain reuse on the schedule that was found."""
    strong = MeasuredFit(5, Fit(ridge=1e5, sensitivity=0.0), 1.0, uniform=False)
    policy = replace(profiled(), plans=(), fits=(strong,))
    chosen = PlanChooser(policy, Target(compute_steps=5)).choose(scheduler_of(14))
    assert chosen is not None
    nominal = sampling().schedule(14).nominal
    torch.testing.assert_close(
        chosen.plan.coefficients[:, 0, :2],  # type: ignore[union-attr]
        nominal,
        rtol=0,
        atol=1e-4,
    )


def scheduler_of(num_steps: int) -> Any:
    scheduler = make("FlowMatchEulerDiscreteScheduler")
    scheduler.set_timesteps(num_steps)
    return scheduler


def test_schedules_are_read_once_and_kept_apart() -> None:
    """By their noise levels, their timesteps, and the step that they begin with."""
    chooser = PlanChooser(profiled(), Target(speedup=2.0))
    first = chooser.schedule(scheduler_of(10), 0)
    assert chooser.schedule(scheduler_of(10), 0) is first
    others = [chooser.schedule(scheduler_of(10), 3), chooser.schedule(scheduler_of(14), 0)]
    shifted = make("FlowMatchEulerDiscreteScheduler", shift=5.0)
    shifted.set_timesteps(10)
    others.append(chooser.schedule(shifted, 0))
    assert len({id(schedule) for schedule in (first, *others)}) == 4
    assert chooser.choose(scheduler_of(10)) is chooser.choose(scheduler_of(10))


def test_default_device_does_not_matter() -> None:
    """Plans are solved where the profile is, whatever a pipeline allocates on."""
    here = PlanChooser(profiled(), Target(speedup=2.0)).choose(scheduler_of(14))
    scheduler = scheduler_of(14)
    with torch.device("meta"):
        there = PlanChooser(profiled(), Target(speedup=2.0)).choose(scheduler)
    assert here is not None
    assert there is not None
    assert here.compute_steps == there.compute_steps
    assert torch.equal(here.sigmas, there.sigmas)


def test_what_is_solved_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        attach(sampling(), profiled(), speedup=2.0) as handle,
        caplog.at_level("INFO", logger="ertacache"),
    ):
        run(handle, 14)
        run(handle, 14)
    (message,) = caplog.messages
    assert message.startswith("solved a plan for this sigma schedule: 7 of 14 steps computed, pre")
    assert handle.plan is not None
    assert handle.plan.predicted_error is not None
    psnr = PlanSolver(profiled()).psnr(handle.plan.predicted_error)
    assert f"predicted PSNR to the full run {psnr:.1f} dB" in message


def test_of_a_run_that_begins_later_the_log_says_that_it_comes_less_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", logger="ertacache"):
        PlanChooser(profiled(), Target(speedup=2.0)).choose(scheduler_of(14), begin=4)
    (message,) = caplog.messages
    assert message.startswith("solved a plan for this sigma schedule: 5 of 10 steps computed, pre")
    assert "it begins later and comes less close" in message


def test_two_experts_on_other_schedules(experts: Setting) -> None:
    """Of any number of steps: each network begins with a computed step, or there is no run."""
    first = int((experts.sigmas[:-1] >= 0.7).sum())
    profile = replace(experts.profile(), expert_steps=(first,))
    policy = experts.policy(profile=profile)
    with attach(experts.pipe, policy, speedup=4.0) as handle:
        for num_steps in (8, 11, 5):
            experts.generate(num_inference_steps=num_steps)
            assert handle.stats.last.reused_steps > 0
            assert handle.plan is not None
            assert handle.plan.num_steps == num_steps
    assert torch.equal(experts.generate(), experts.run.latents[-1])


def test_sizes_and_steps_in_turn(flux: Setting) -> None:
    """A shift that follows the size: every size has its plan, whatever ran before."""
    pipe = flux.another().pipe
    config = {"use_dynamic_shifting": True, "base_image_seq_len": 16, "max_image_seq_len": 128}
    pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config, **config)
    setting = replace(flux, pipe=pipe)
    policy = flux.policy(profile=flux.profile())
    calls = [{"height": 48}, {"num_inference_steps": 6}, {"width": 16}, {}]
    full = [setting.generate(**call) for call in calls]
    results: list[Any] = []
    with attach(pipe, policy, speedup=2.0) as handle:
        plans = []
        for call in [*calls, *reversed(calls)]:
            results.append(setting.generate(**call))
            plans.append(handle.plan)
    for k in range(len(calls)):
        assert torch.equal(results[k], results[-1 - k])
        assert plans[k] is plans[-1 - k]
        assert torch.equal(setting.generate(**calls[k]), full[k])
    assert len({id(plan) for plan in plans}) == len(calls)


def test_plans_with_a_second_history_are_replaced_where_there_is_no_guidance() -> None:
    """By those without one, or by what the profile gives for the same speed-up."""
    one = profiled()
    plan = one.default.plan
    assert isinstance(plan, TrajectoryPlan)
    z = torch.cat([plan.coefficients, torch.zeros_like(plan.coefficients[..., 1:])], dim=2)
    second = replace(one.default, plan=TrajectoryPlan(COMPUTED, z, branch=True))
    for plans, target in (((second,), Target()), ((second,), Target(compute_steps=4))):
        single = PlanChooser(replace(one, plans=plans), target).without_branch()
        found = single.choose(scheduler_of(10))
        assert found is not None
        assert isinstance(found.plan, TrajectoryPlan)
        assert not found.plan.branch
        assert len(found.compute_steps) == 4
    both = PlanChooser(replace(one, plans=(second, one.default)), Target())
    assert both.choose(scheduler_of(10)) is second
    assert both.without_branch().choose(scheduler_of(10)) is one.default
    assert both.without_branch() is both.without_branch()
    for policy in (one, replace(one, plans=(second,), profile=None, frontier=())):
        chooser = PlanChooser(policy, Target())
        assert chooser.without_branch() is chooser
