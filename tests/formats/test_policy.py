"""The policy file: golden bytes, exact round trips, merging, choosing plans, refusals."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ertacache.core.frontier import KnownSchedule, MeasuredFit
from ertacache.core.groups import Groups
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.simulate import Fit
from ertacache.formats.policy import Policy
from ertacache.formats.schema import PolicyError
from tests.formats.golden.objects import (
    FOLDER,
    GOLDEN,
    facts,
    fingerprint,
    golden_paper_policy,
    golden_policy,
    golden_profile,
    make_profile,
    measured_plan,
    numbers,
    paper_plan,
    schedule,
    short_plan,
    trajectory_plan,
)
from tests.formats.mutations import edited


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(name: str) -> None:
    policy = GOLDEN[name]()
    assert policy._to_bytes() == (FOLDER / name).read_bytes()
    assert facts(Policy.load(FOLDER / name)) == facts(policy)


@pytest.mark.parametrize(
    "policy",
    [
        golden_policy(),
        replace(golden_policy(), plans=()),
        replace(golden_policy(), profile=None, fits=(), frontier=(), response=(), unit_psnr=-3),
        replace(golden_policy(), fits=[], frontier=[], plans=[paper_plan(), short_plan()]),
        replace(
            golden_policy(),
            fits=(MeasuredFit(1, Fit(1, 0, 0), 1),),
            frontier=(KnownSchedule((0,), 0),),
        ),
        replace(
            golden_policy(),
            fits=[MeasuredFit(k + 1, Fit(order=k, groups=Groups(3, 1)), 1) for k in range(3)],
        ),
        replace(golden_policy(), profile=make_profile(groups=None)),
    ],
)
def test_round_trip_is_exact(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "p.safetensors")
    found = Policy.load(str(tmp_path / "p.safetensors"))
    assert facts(found) == facts(policy)
    assert found._to_bytes() == policy._to_bytes()


def test_more_than_ten_plans_keep_their_order() -> None:
    plans = tuple(replace(short_plan(), predicted_error=float(k)) for k in range(12))
    policy = Policy(fingerprint(), plans=plans)  # "plan.10" sorts before "plan.2"
    assert facts(Policy._from_bytes(policy._to_bytes(), "memory")) == facts(policy)


def test_order_and_layout_in_memory_do_not_change_the_bytes() -> None:
    policy, fitted = golden_policy(), measured_plan()
    assert isinstance(fitted.plan, TrajectoryPlan)
    turned = fitted.plan.coefficients.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert not turned.is_contiguous()
    plan = replace(fitted, plan=replace(fitted.plan, coefficients=turned))
    config = dict(reversed(policy.fingerprint.scheduler_config.items()))
    same = replace(
        policy,
        fingerprint=fingerprint(scheduler_config=config),
        plans=(plan, short_plan()),
        provenance=dict(reversed(policy.provenance.items())),
    )
    assert same._to_bytes() == policy._to_bytes() == policy._to_bytes()


def test_print_shows_the_profile_and_every_plan() -> None:
    policy = golden_policy()
    head = "policy for FluxPipeline: a profile of 2 runs of 4 steps, 2 plans"
    assert str(policy) == "\n".join([head, str(measured_plan()), str(short_plan())])
    assert repr(policy) == f"<{head}>"
    assert repr(golden_paper_policy()) == "<policy for FluxPipeline: no profile, 1 plan>"


def test_repr_of_a_policy_and_its_parts_shows_no_tensors() -> None:
    policy = golden_policy()
    profile = golden_profile().profile
    assert profile is not None
    assert repr(profile) == "<profile of 2 runs of 4 steps>"
    assert repr(make_profile(4, 1)) == "<profile of 1 run of 4 steps>"
    assert repr(profile.schedule) == "<schedule of 4 steps, sigma 1 to 0>"
    assert repr(profile.statistics) == "<statistics of 2 runs of 4 steps>"
    assert repr(policy.default.plan) == (
        "TrajectoryPlan(compute_steps=(0, 1, 3), groups=Groups(channels=3, bands=2), branch=True)"
    )
    paper = golden_paper_policy().default.plan
    assert repr(paper) == "PaperPlan(compute_steps=(0, 1, 3), reuse='residual')"
    parts = (policy, *policy.plans, *policy.fits, *policy.frontier, policy.fingerprint)
    assert not any("tensor" in repr(part) for part in parts)


def test_the_first_plan_is_the_default() -> None:
    policy = golden_policy()
    assert policy.default is policy.plans[0]
    with pytest.raises(PolicyError, match="holds no plan yet: give a speed-up, or refit one"):
        golden_profile().default  # noqa: B018


def test_a_plan_is_found_by_schedule_and_budget() -> None:
    policy = golden_policy()
    assert policy.find_plan(schedule(), 3) is policy.plans[0]
    assert policy.find_plan(schedule(3), 2) is policy.plans[1]
    assert policy.find_plan(schedule(), 2) is None
    assert policy.find_plan(schedule(5), 3) is None
    assert policy.find_plan(replace(schedule(), latents=numbers(5, 5)), 3) is None
    assert golden_profile().find_plan(schedule(), 3) is None


def test_one_more_plan() -> None:
    policy = golden_policy()
    other = replace(measured_plan(), plan=trajectory_plan((0, 3), numbers(4, 2)), guided=None)
    assert policy.with_plan(other).plans == (*policy.plans, other)
    assert golden_profile().with_plan(other).plans == (other,)


def test_a_plan_for_the_same_runs_and_budget_is_replaced() -> None:
    policy = golden_policy()
    refitted = replace(measured_plan(), predicted_error=0.5)
    assert set(policy.with_plan(refitted).plans) == {refitted, policy.plans[1]}
    paper = policy.with_plan(paper_plan())
    assert set(paper.plans) > set(policy.plans)
    other_scheduler = replace(measured_plan(), target=numbers(5))
    assert set(policy.with_plan(other_scheduler).plans) == {*policy.plans, other_scheduler}


def test_merge_joins_runs_and_leaves_out_what_was_made_from_a_part() -> None:
    first = golden_policy()
    second = Policy(fingerprint(), profile=make_profile(4, 3, first_seed=2))
    merged = first.merge(second)
    assert first.profile is not None
    assert second.profile is not None
    assert facts(merged.profile) == facts(first.profile.merge(second.profile))
    assert merged.fingerprint == first.fingerprint
    assert (merged.plans, merged.fits, merged.frontier, merged.unit_psnr) == ((), (), (), None)
    assert facts(golden_profile().merge()) == facts(golden_profile())


def test_merged_policies_have_the_provenance_of_all_parts() -> None:
    texts = ({"command": "one", "call": "steps=4"}, {"command": "two"}, {"command": "two"})
    first, second, third = (
        Policy(fingerprint(), profile=make_profile(4, 1, first_seed=k), provenance=text)
        for k, text in enumerate(texts)
    )
    together, in_turn = first.merge(second, third), first.merge(second).merge(third)
    assert together.provenance == {"call": "steps=4", "command": "one\ntwo"}
    assert together._to_bytes() == in_turn._to_bytes()


OTHER = Policy(fingerprint(), profile=make_profile(4, 1, first_seed=9))


def test_merge_joins_the_values_of_guidance() -> None:
    other = replace(OTHER, fingerprint=fingerprint(guidance={"guidance_scale": (1.0, 3.0)}))
    for merged in (golden_policy().merge(other), other.merge(golden_policy())):
        assert merged.fingerprint.guidance == {"guidance_scale": (1.0, 2.5, 3.0, 3.5)}


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (replace(OTHER, profile=None, plans=(short_plan(),)), "without a profile cannot be merged"),
        (replace(OTHER, profile=make_profile()), "share a run cannot be merged: 'a red apple'"),
        (replace(OTHER, profile=make_profile(5)), "different sigma schedules cannot be merged"),
        (
            replace(OTHER, fingerprint=fingerprint(latent_shape=(3, 4, 4), dtype="float16")),
            r"of different runs cannot be merged: dtype is 'float16', was 'float32', latent_shape "
            r"is \(3, 4, 4\), was \(3, 2, 2\)",
        ),
        (
            replace(OTHER, fingerprint=fingerprint(guidance={"true_cfg_scale": (1.0,)})),
            "guidance_scale is None, was 2.5 to 3.5, true_cfg_scale is 1.0, was None",
        ),
    ],
)
def test_merge_refuses(other: Policy, sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        golden_policy().merge(other)


def fit(computed: Any = 2, ridge: float = 0.1, **changes: Any) -> MeasuredFit:
    return MeasuredFit(computed, replace(Fit(4, ridge), **changes), 1.0)


def known(*steps: int, error: float = 0.1) -> KnownSchedule:
    return KnownSchedule(steps, error)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fingerprint": None}, "fingerprint must be a Fingerprint, not NoneType"),
        ({"profile": "p"}, "profile must be a Profile, not str"),
        ({"plans": (short_plan().plan,)}, "plans must hold FittedPlan, not TrajectoryPlan"),
        ({"plans": (short_plan(),) * 1001}, "it has 1001 plans, more than the limit 1000"),
        ({"profile": None, "plans": (), "frontier": ()}, "has a profile, plans, or both"),
        ({"fits": (Fit(),)}, "fits must hold MeasuredFit, not Fit"),
        ({"fits": (fit(10_001),)}, "computed_steps must be from 1 to 10000, got 10001"),
        ({"fits": (fit(2.0),)}, "computed_steps must be an integer, got float"),
        ({"fits": (fit(ridge=math.inf),)}, "ridge must be finite, got inf"),
        ({"fits": (fit(history=4.0),)}, "history must be an integer, got float"),
        ({"fits": (fit(order=True),)}, "order must be an integer, got bool"),
        ({"fits": (fit(groups=None),)}, "groups must be Groups, not NoneType"),
        ({"fits": (fit(groups=Groups(3, 2.0)),)}, "groups.bands must be an integer, got float"),
        ({"fits": (fit(groups=Groups(16, 3)),)}, "fits have 16 channels x 3 bands, but the prof"),
        ({"fits": (fit(branch=True),)}, "a measured fit has no second history: only plans have"),
        ({"fits": (fit(3), fit(2))}, "fits must ascend in their number of computed steps"),
        ({"fits": (fit(2), fit(2))}, "fits must ascend in their number of computed steps"),
        ({"profile": None}, "a frontier is of a profile, and there is none"),
        ({"frontier": ((0, 1),)}, "frontier must hold KnownSchedule, not tuple"),
        ({"frontier": (known(1),)}, "step 0 must be computed"),
        ({"frontier": (known(0, 4),)}, "holds 4, but the run has 4 steps"),
        ({"frontier": (known(0, error=-1),)}, "predicted_error must be at least 0, got -1"),
        ({"frontier": (known(0, 1), known(0, 2))}, "the frontier must ascend in its number"),
        ({"unit_psnr": math.nan}, "unit_psnr must be finite"),
        ({"unit_psnr": "20"}, "unit_psnr must be a number, got str"),
        ({"response": (0.0,) * 3}, "response must have one number for every step of the profile"),
        ({"response": (0.0, 1.0, math.nan, 0.0)}, "response must be finite"),
        ({"response": (0.0, 1.0, "2", 0.0)}, "response must be a number, got str"),
        ({"response": ()}, "fits need the response of the outputs, and there is none"),
        ({"provenance": {"a": 1}}, "provenance.a must be a string, got int"),
        ({"provenance": {"": "a"}}, "a key of provenance must not be empty"),
        ({"provenance": None}, "provenance must be a mapping, got NoneType"),
    ],
)
def test_bad_parts_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        replace(golden_policy(), **changes)


PLAN = short_plan().to_json()
FIT = {
    "computed_steps": 2,
    "error_ratio": 1,
    "groups": {"bands": 1, "channels": 1},
    "history": 3,
    "order": 0,
    "response": False,
    "ridge": 0,
    "sensitivity": 1,
    "uniform": True,
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"extra": 1}, "policy has an unknown key 'extra'"),
        ({"plans": {}}, "policy.plans must be a list, got an object"),
        ({"plans": [PLAN] * 1001}, "it has 1001 plans, more than the limit of 1000"),
        ({"plans": [PLAN]}, "it declares 'plan.0.coefficients' as"),
        ({"provenance": []}, "policy.provenance must be an object, got a list"),
        ({"provenance.a": 1}, "provenance.a must be a string, got int"),
        ({"response": None}, "policy.response must be a list, got null"),
        ({"response": [0, 0, 0, True]}, "response must be a number, got bool"),
        ({"fits.0.response": 1}, r"fits\[0\].response must be a boolean"),
        ({"unit_psnr": True}, "policy.unit_psnr must be a number or an integer or null"),
        ({"fingerprint": {}}, "fingerprint lacks the key"),
        ({"fingerprint.extra": 1}, "fingerprint has an unknown key 'extra'"),
        ({"fingerprint.guidance": 3.5}, "fingerprint.guidance must be an object, got a number"),
        ({"fingerprint.guidance.g": 3.5}, "guidance.g must be a list of 1 to 1000 numbers"),
        ({"fingerprint.guidance.g": [True]}, "guidance.g must be a number, got bool"),
        ({"fingerprint.latent_shape": [2.0]}, r"latent_shape\[0\] must be an integer"),
        ({"fingerprint.scheduler_config.a": {}}, "scheduler_config.a must be a JSON scalar"),
        ({"fits": [1]}, r"fits\[0\] must be an object, got an integer"),
        ({"fits": [FIT | {"uniform": 1}]}, r"fits\[0\].uniform must be a boolean"),
        ({"fits": [FIT | {"history": 17}]}, "history must be between 1 and 16, got 17"),
        ({"fits": [FIT | {"ridge": -1}]}, "ridge and sensitivity must not be negative"),
        ({"fits": [FIT | {"error_ratio": 0}]}, "error_ratio must be positive, got 0.0"),
        ({"fits": [FIT | {"computed_steps": 0}]}, "computed must be positive, got 0"),
        ({"fits": [FIT, FIT]}, "fits must ascend"),
        ({"fits.0.order": 3}, "order must be from 0 to 2, got 3"),
        ({"fits.0.order": -1}, "order must be from 0 to 2, got -1"),
        ({"fits.0.order": 1.0}, r"fits\[0\].order must be an integer, got a number"),
        ({"fits.1.order": True}, r"fits\[1\].order must be an integer, got a boolean"),
        ({"fits.0.groups": None}, r"fits\[0\].groups must be an object, got null"),
        ({"fits.0.groups": {"bands": 2}}, r"fits\[0\].groups lacks the key 'channels'"),
        ({"fits.0.groups.counts": [0] * 8}, r"fits\[0\].groups has an unknown key 'counts'"),
        ({"fits.0.groups.bands": 5}, r"fits\[0\].groups.bands must be from 1 to 4, got 5"),
        ({"fits.1.groups.channels": 0}, r"fits\[1\].groups.channels must be from 1 to 16, got 0"),
        ({"fits.1.groups.channels": 2}, "fits have 2 channels, but the profile knows 3 channels x"),
        ({"fits.0.groups.bands": 3}, "fits have 3 bands, but the profile knows 3 channels x 2"),
        ({"fits.0.branch": False}, r"fits\[0\] has an unknown key 'branch'"),
        ({"frontier.0.mask": "0111"}, "step 0 must be computed"),
        ({"frontier.0.mask": "100"}, r"frontier\[0\].mask has 3 digits for 4 steps"),
        ({"frontier.0.mask": "10000"}, r"frontier\[0\].mask has 5 digits for 4 steps"),
        ({"frontier.0.mask": "1x00"}, r"frontier\[0\].mask must consist of 0 and 1"),
        ({"frontier.0.predicted_error": -1}, "predicted_error must be at least 0"),
        ({"frontier.0.predicted_error": None}, r"frontier\[0\].predicted_error must be a number"),
        ({"frontier.0.mask": "1111"}, "the frontier must ascend"),
    ],
)
def test_bad_records_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PolicyError, match=f"^cannot load 'memory': .*{sentence}"):
        Policy._from_bytes(edited(golden_policy()._to_bytes(), changes), "memory")


def test_a_file_with_a_frontier_needs_a_profile() -> None:
    changes: dict[str, object] = {"frontier": [{"mask": "10", "predicted_error": 0.1}]}
    with pytest.raises(PolicyError, match="a frontier is of a profile, and there is none"):
        Policy._from_bytes(edited(golden_paper_policy()._to_bytes(), changes), "memory")


def test_numbers_in_a_file_are_checked() -> None:
    data = golden_paper_policy(rectified=False)._to_bytes()
    header, last = data[:-8], data[-8:]  # sigmas end the file
    assert last == bytes(8)
    for number, sentence in (
        (1.0, "sigmas must descend at every step, but entry 4 does not"),
        (math.nan, "sigmas holds a number that is not finite"),
    ):
        raised = edited(header + struct.pack("<d", number), {})
        with pytest.raises(PolicyError, match=sentence):
            Policy._from_bytes(raised, "memory")
