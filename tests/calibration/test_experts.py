"""A pipeline of two experts: whatever the target, each begins with a computed step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.profile import profile
from ertacache.calibration.refit import refit
from ertacache.calibration.solve import solve
from ertacache.calibration.trial import trial_budgets
from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from ertacache.integration.private_api import fresh_copy
from ertacache.integration.record import record
from ertacache.integration.schedulers import read_schedule
from ertacache.integration.solve import PlanSolver, profile_of, with_frontier
from tests.calibration.conftest import TINY_PROMPTS, counting_rows, tiny_call
from tests.integration.tiny import CASES, STEPS, call_arguments, generate

NAME = "wan-experts"
CALL = tiny_call(NAME)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return CASES[NAME].build()


@pytest.fixture(scope="module")
def known(pipe: Any) -> Policy:
    return with_frontier(profile(pipe, TINY_PROMPTS[:2], **CALL))


@pytest.fixture(scope="module")
def first(known: Policy) -> int:
    """The first step of the second network."""
    (second,) = profile_of(known).expert_steps
    return second


def test_profile_keeps_where_the_second_network_begins(pipe: Any, first: int) -> None:
    with counting_rows(pipe.transformer) as calls:
        generate(pipe, CASES[NAME])
    assert len(calls) == 2 * first
    assert record(CASES["wan"].build(), **call_arguments(CASES["wan"])).expert_steps == ()


def test_every_budget_computes_it(known: Policy, first: int) -> None:
    assert [len(point.compute_steps) for point in known.frontier] == list(range(2, STEPS + 1))
    for point in known.frontier:
        assert {0, first} <= {*point.compute_steps}
    assert min(trial_budgets(profile_of(known))) > 2  # with the two alone nothing is left to choose


def test_policy_keeps_it_in_its_file(known: Policy, first: int, tmp_path: Path) -> None:
    solve(known, compute_steps=3).save(tmp_path / "policy.safetensors")
    policy = Policy.load(tmp_path / "policy.safetensors")
    assert profile_of(policy).expert_steps == (first,)
    assert {0, first} <= {*policy.default.compute_steps}


def test_a_plan_for_the_last_steps_computes_it_too(pipe: Any, known: Policy, first: int) -> None:
    """As in image to image."""
    solver, scheduler = PlanSolver(known), fresh_copy(pipe.scheduler)
    scheduler.set_timesteps(STEPS)
    for begin in range(1, first + 1):
        schedule = read_schedule(scheduler, begin=begin)
        assert solver.pinned(schedule) == {0, first - begin}
        solved = solver.solve(schedule, schedule.num_steps - 1)
        assert solved is not None
        assert {0, first - begin} <= {*solved.compute_steps}


def test_calibrated_policy_runs(pipe: Any, first: int) -> None:
    """Refitted, with the uniform schedule among the candidates, and measured."""
    policy = calibrate(pipe, TINY_PROMPTS[:4], compute_steps=3, refit_prompts=2, **CALL)
    steps = policy.default.compute_steps
    assert {0, first} <= {*steps}
    with (
        attach(pipe, policy),
        counting_rows(pipe.transformer) as one,
        counting_rows(pipe.transformer_2) as two,
    ):
        generate(pipe, CASES[NAME])
    second = sum(step >= first for step in steps)
    assert len(two) == 2 * second
    assert len(one) + len(two) == 2 * 3 < 2 * STEPS


def test_refitted_for_other_steps_it_runs(pipe: Any, known: Policy) -> None:
    """Where the second network begins in a run of six steps is seen in the run itself."""
    call = CALL | {"num_inference_steps": 6}
    policy = refit(pipe, known, compute_steps=3, **call)
    with counting_rows(pipe.transformer) as one:
        generate(pipe, CASES[NAME], num_inference_steps=6)
    assert {0, len(one) // 2} <= {*policy.default.compute_steps}
    with attach(pipe, policy), counting_rows(pipe.transformer_2) as two:
        generate(pipe, CASES[NAME], num_inference_steps=6)
    assert len(two) == 2 * sum(step >= len(one) // 2 for step in policy.default.compute_steps)


def test_guidance_that_the_second_network_takes_over_may_be_varied(pipe: Any) -> None:
    """Without a scale of its own it has that of the first, which the pipeline works out."""
    call = {name: value for name, value in CALL.items() if name != "guidance_scale_2"}
    found = profile(pipe, TINY_PROMPTS[:4], **(call | {"guidance_scale": [3.0, 5.0]}))
    assert profile_of(found).num_runs == 4
    assert found.fingerprint.guidance["guidance_scale"] == (3.0, 5.0)
    assert found.fingerprint.guidance["guidance_scale_2"] == (3.0, 5.0)
