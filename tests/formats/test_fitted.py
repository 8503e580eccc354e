"""Plans in a policy: what is valid, the runs that they are for, what is printed."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest

from ertacache.core.groups import ONE_GROUP, Groups
from ertacache.core.plans import PaperPlan
from ertacache.formats.fitted import FittedPlan, ValidationRow
from ertacache.formats.policy import Policy
from ertacache.formats.schema import PolicyError
from tests.formats.golden.objects import (
    ROWS,
    facts,
    fingerprint,
    golden_paper_policy,
    golden_policy,
    grouped_plan,
    measured_plan,
    numbers,
    paper_plan,
    schedule,
    short_plan,
    sigma_schedule,
    trajectory_plan,
)
from tests.formats.mutations import dump, edited, join, split

JOINT = replace(measured_plan(), guided=None)


@pytest.mark.parametrize(
    "plan",
    [
        measured_plan(),
        short_plan(),
        paper_plan(),
        paper_plan(1),
        paper_plan(3, 2, 2),
        paper_plan(rectified=False),
        replace(paper_plan(), target=numbers(5), validation=list(ROWS)),
        FittedPlan(PaperPlan((0, 3), "velocity", sigma_schedule()), sigma_schedule()),
        FittedPlan(trajectory_plan((0,), numbers(1, 17)), sigma_schedule(1), measured_error=0),
        replace(JOINT, plan=replace(grouped_plan(), branch=False)),
        replace(JOINT, plan=grouped_plan(groups=ONE_GROUP, history=1)),
        replace(JOINT, plan=grouped_plan(groups=Groups(16, 4), history=16)),
    ],
)
def test_round_trip_is_exact(plan: FittedPlan) -> None:
    policy = Policy(fingerprint(), plans=(plan,))
    assert facts(Policy._from_bytes(policy._to_bytes(), "memory").default) == facts(plan)
    shapes = {name: tuple(value.shape) for name, value in plan.tensors(0).items()}
    assert shapes == FittedPlan.shapes(plan.to_json(), 0)


def test_properties() -> None:
    plan = measured_plan()
    assert (plan.method, plan.num_steps, plan.speedup) == ("trajectory", 4, 4 / 3)
    assert (plan.compute_steps, plan.reuse_steps) == ((0, 1, 3), (2,))
    assert paper_plan().method == "paper"


def test_its_own_row_is_the_one_that_was_measured() -> None:
    assert measured_plan().measured == ROWS[0]
    assert replace(measured_plan(), validation=ROWS[::-1]).measured == ROWS[0]
    assert replace(measured_plan(), validation=ROWS[1:]).measured is None


def test_print_shows_schedule_and_measurements() -> None:
    plan, row = JOINT, ValidationRow("policy", 3, math.inf, 1.3, 24)
    head = "trajectory: 3 of 4 steps computed, 1.33x fewer"
    measured = "measured on 24 held-out prompts: "
    for shown, last in (
        (plan, measured + "46.5 dB PSNR to the full run, 1.30x faster"),
        (replace(plan, validation=(row,)), measured + "identical to the full run, 1.30x faster"),
        (replace(plan, validation=()), "not measured; predicted error of the latent 0.001"),
        (
            replace(plan, validation=(replace(row, prompts=1, heldout=False),)),
            "measured on 1 calibration prompt with other seeds, not held out: identical to the "
            "full run, 1.30x faster",
        ),
    ):
        assert str(shown) == f"{head}\n██·█\n{last}"
    assert str(paper_plan()) == "paper: 3 of 4 steps computed, 1.33x fewer\n██·█"
    assert repr(plan) == f"<{head}>"


def test_a_plan_fits_runs_on_its_schedule() -> None:
    plan, run = measured_plan(), schedule()
    assert plan.fits(run)
    assert plan.fits(replace(run, sigmas=run.sigmas * 1.00001))  # rounding
    assert not plan.fits(replace(run, sigmas=run.sigmas**1.1))
    assert not plan.fits(schedule(3))
    other_scheduler = replace(run, latents=run.latents * 1.1)
    assert not plan.fits(other_scheduler)
    assert replace(plan, target=None).fits(other_scheduler)


def test_a_plan_replaces_one_for_the_same_runs_and_budget() -> None:
    plan, sigmas = JOINT, sigma_schedule()
    assert plan.replaces(measured_plan())
    assert plan.replaces(replace(plan, validation=(), measured_error=None))
    assert plan.replaces(replace(plan, plan=trajectory_plan((0, 2, 3), numbers(4, 2))))
    assert plan.replaces(replace(plan, sigmas=sigmas * 1.00001))
    assert plan.replaces(replace(plan, plan=grouped_plan((0, 2, 3), Groups(bands=4))))
    assert paper_plan().replaces(paper_plan(1))
    for other in (
        replace(plan, plan=trajectory_plan((0, 3), numbers(4, 2))),
        replace(plan, sigmas=sigmas**1.1),
        replace(plan, target=numbers(5)),
        replace(plan, target=None),
        short_plan(),
        paper_plan(),
    ):
        assert not plan.replaces(other)
        assert not other.replaces(plan)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plan": None}, "plan must be TrajectoryPlan or PaperPlan, not NoneType"),
        (
            {"plan": trajectory_plan((0,), numbers(4, 18))},
            "history must be from 1 to 16, got 17",
        ),
        ({"plan": grouped_plan(history=17)}, "history must be from 1 to 16, got 17"),
        ({"plan": replace(grouped_plan(), branch=1)}, "branch must be a boolean, got int"),
        (
            {"plan": replace(grouped_plan(), groups=Groups(3.0, 2))},  # type: ignore[arg-type]
            "groups.channels must be an integer, got float",
        ),
        ({"plan": trajectory_plan((0,), numbers(3, 2))}, r"sigmas must have shape \(4,\)"),
        ({"sigmas": sigma_schedule(3)}, r"sigmas must have shape \(5,\), got \(4,\)"),
        ({"sigmas": sigma_schedule() * 0}, "sigmas must descend at every step, but entry 1"),
        ({"target": numbers(4)}, r"target must have shape \(5,\), got \(4,\)"),
        ({"target": numbers(5).float()}, "target must be float64, got float32"),
        ({"predicted_error": -1.0}, "predicted_error must be at least 0, got -1"),
        ({"predicted_error": math.nan}, "predicted_error must be finite"),
        ({"measured_error": -1.0}, "measured_error must be at least 0, got -1"),
        ({"measured_error": "0"}, "measured_error must be a number, got str"),
        ({"target_psnr": math.inf}, "target_psnr must be finite"),
        ({"validation": ("a",)}, "validation must hold ValidationRow, not str"),
        (
            {"validation": (replace(ROWS[0], computed_steps=5),)},
            "computed_steps must be from 1 to 4, got 5",
        ),
    ],
)
def test_bad_parts_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        replace(measured_plan(), **changes)


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [((1,) * 9, "gain has more than 8 dimensions for one sample"), ((0,), "gain_shape must be")],
)
def test_a_gain_that_a_file_cannot_hold_is_refused(shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        paper_plan(*shape)


def test_more_steps_than_a_file_can_hold_are_refused() -> None:
    plan = trajectory_plan((0,), numbers(10_001, 2))
    with pytest.raises(PolicyError, match="num_steps must be from 1 to 10000, got 10001"):
        FittedPlan(plan, sigma_schedule(10_001))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": ""}, "method must not be empty"),
        ({"computed_steps": 0}, "computed_steps must be from 1"),
        ({"psnr": math.nan}, "psnr must be finite"),
        ({"psnr": -math.inf}, "psnr must be finite"),
        ({"psnr": None}, "psnr must be a number, got NoneType"),
        ({"speedup": -1.0}, "speedup must be at least 0, got -1"),
        ({"prompts": 0}, "prompts must be from 1"),
        ({"prompts": 1.0}, "prompts must be an integer, got float"),
        ({"heldout": 1}, "heldout must be a boolean, got int"),
    ],
)
def test_bad_validation_row(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        replace(ROWS[0], **changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plans.0": 1}, r"plans\[0\].method must be 'trajectory' or 'paper'"),
        ({"plans.0.method": "other"}, r"plans\[0\].method must be 'trajectory' or 'paper'"),
        ({"plans.0.method": "paper"}, r"plans\[0\] has an unknown key 'branch'"),
        ({"plans.0.branch": False}, "it declares 'plan.0.coefficients' as"),
        ({"plans.1.branch": True}, "it declares 'plan.1.coefficients' as"),
        ({"plans.0.branch": 1}, r"plans\[0\].branch must be a boolean, got an integer"),
        ({"plans.0.branch": None}, r"plans\[0\].branch must be a boolean, got null"),
        ({"plans.0.groups": None}, r"plans\[0\].groups must be an object, got null"),
        ({"plans.0.groups": {}}, r"plans\[0\].groups lacks the key 'bands'"),
        ({"plans.0.groups.counts": []}, r"plans\[0\].groups has an unknown key 'counts'"),
        ({"plans.0.groups.bands": 5}, r"plans\[0\].groups.bands must be from 1 to 4, got 5"),
        ({"plans.0.groups.bands": 1}, "it declares 'plan.0.coefficients' as"),
        ({"plans.0.groups.channels": 0}, r"\[0\].groups.channels must be from 1 to 16, got 0"),
        ({"plans.0.groups.channels": 2.0}, r"\[0\].groups.channels must be an integer"),
        ({"plans.1.groups.channels": 17}, r"\[1\].groups.channels must be from 1 to 16, got 17"),
        ({"plans.0.guided": None}, "it holds an unknown tensor 'plan.0.guided'"),
        ({"plans.0.guided": 1}, r"plans\[0\].guided must be an object or null, got an integer"),
        ({"plans.0.guided": {}}, r"plans\[0\].guided lacks the key 'argument'"),
        ({"plans.0.guided.argument": ""}, r"plans\[0\].guided.argument must not be empty"),
        ({"plans.0.guided.values": [3.5, 2.5]}, "guided.values must be 2 to 100 numbers that asc"),
        ({"plans.0.guided.values": [2.5]}, "guided.values must be 2 to 100 numbers that ascend"),
        ({"plans.0.guided.values": [2.5, "3"]}, r"\[0\].guided.values must be a number, got str"),
        ({"plans.0.guided.values": [1, 2, 3]}, "it declares 'plan.0.guided' as"),
        (
            {"plans.1.guided": {"argument": "a", "values": [1, 2]}},
            "lacks the tensor 'plan.1.guided",
        ),
        ({"plans.0.num_steps": 10_001}, r"plans\[0\].num_steps must be from 1 to 10000"),
        ({"plans.0.num_steps": 5}, "it declares 'plan.0.coefficients' as"),
        ({"plans.0.history": 4}, "it declares 'plan.0.coefficients' as"),
        ({"plans.0.history": 17}, r"plans\[0\].history must be from 1 to 16, got 17"),
        ({"plans.0.history": True}, r"plans\[0\].history must be an integer, got a boolean"),
        ({"plans.0.target": False}, "it holds an unknown tensor 'plan.0.target'"),
        ({"plans.1.target": True}, "it lacks the tensor 'plan.1.target'"),
        ({"plans.1.target": 0}, r"plans\[1\].target must be a boolean, got an integer"),
        ({"plans.0.compute_steps": []}, "step 0 must be computed"),
        ({"plans.0.compute_steps": [1, 3]}, "step 0 must be computed"),
        ({"plans.0.compute_steps": [0, 3, 3]}, "compute_steps must be strictly increasing"),
        ({"plans.0.compute_steps": [0, 4]}, "holds 4, but the run has 4 steps"),
        ({"plans.0.compute_steps": [0, 1.0]}, r"plans\[0\].compute_steps\[1\] must be an integer"),
        ({"plans.0.predicted_error": -1}, "predicted_error must be at least 0"),
        ({"plans.0.measured_error": "0"}, r"plans\[0\].measured_error must be a number"),
        ({"plans.0.validation": [[]]}, r"plans\[0\].validation\[0\] must be an object"),
        ({"plans.0.validation.1.psnr": "inf"}, r"validation\[1\].psnr must be a number"),
        ({"plans.0.validation.1.computed_steps": 5}, "computed_steps must be from 1 to 4, got 5"),
        ({"plans.0.validation.0.heldout": 1}, r"validation\[0\].heldout must be a boolean"),
        ({"plans.1.validation.0.heldout": None}, r"validation\[0\].heldout must be a boolean"),
    ],
)
def test_bad_records_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PolicyError, match=f"^cannot load 'memory': .*{sentence}"):
        Policy._from_bytes(edited(golden_policy()._to_bytes(), changes), "memory")


def test_all_groups_in_a_file_have_the_same_coefficient_of_the_latent() -> None:
    policy = Policy(fingerprint(), plans=(measured_plan(),))
    header, buffer = split(policy._to_bytes())
    assert buffer[40:48] == policy.default.plan.coefficients[0, 1, 0].numpy().tobytes()
    changed = buffer[:40] + struct.pack("<d", 0.5) + buffer[48:]
    with pytest.raises(PolicyError, match="groups must have the same coefficient of the latent"):
        Policy._from_bytes(edited(join(dump(header), changed), {}), "memory")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"plans.0.history": 1}, r"plans\[0\] has an unknown key 'history'"),
        ({"plans.0.branch": True}, r"plans\[0\] has an unknown key 'branch'"),
        ({"plans.0.groups": {}}, r"plans\[0\] has an unknown key 'groups'"),
        ({"plans.0.gain_shape": None}, "it holds an unknown tensor 'plan.0.bias'"),
        ({"plans.0.gain_shape": [1, 3, 1]}, "it declares 'plan.0.bias' as"),
        ({"plans.0.gain_shape": [0]}, "gain_shape must be from 1"),
        ({"plans.0.gain_shape": [True]}, "gain_shape must be an integer, got bool"),
        ({"plans.0.gain_shape": [1] * 9}, "gain has more than 8 dimensions"),
        ({"plans.0.reuse": "other"}, "reuse must be 'residual' or 'velocity', got 'other'"),
        ({"plans.0.compute_steps": [0, 1]}, "the paper's method computes the last step"),
    ],
)
def test_bad_records_of_the_papers_method_are_refused(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(PolicyError, match=f"^cannot load 'memory': .*{sentence}"):
        Policy._from_bytes(edited(golden_paper_policy()._to_bytes(), changes), "memory")
