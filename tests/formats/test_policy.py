"""Policies: exact round trips for both methods, golden bytes, refusals with a sentence."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ertacache.core.plans import PaperPlan, TrajectoryPlan
from ertacache.formats.policy import Policy, PolicyError, ValidationRow
from ertacache.formats.profile import Profile, ProfileError
from tests.formats.golden.objects import (
    FOLDER,
    GOLDEN,
    expert_policy,
    fingerprint,
    golden_paper_policy,
    golden_policy,
    golden_profile,
    numbers,
    schedule,
    trajectory_plan,
)
from tests.formats.mutations import dump, join, seal, split

FACTS = (
    "fingerprint",
    "predicted_error",
    "validation",
    "target_psnr",
    "expert_steps",
    "provenance",
    "compute_steps",
)


def assert_same(a: Policy, b: Policy) -> None:
    for name in FACTS:
        assert getattr(a, name) == getattr(b, name), name
    assert torch.equal(a.sigmas, b.sigmas)
    assert type(a.plan) is type(b.plan)
    for name, value in vars(b.plan).items():
        found = getattr(a.plan, name)
        same = torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
        assert same, name
    assert (a.profile is None) == (b.profile is None)
    if a.profile is not None and b.profile is not None:
        assert a.profile._to_bytes() == b.profile._to_bytes()


@pytest.mark.parametrize(
    "policy",
    [
        golden_policy(),
        golden_policy(profile=True),
        golden_paper_policy(rectified=False),
        golden_paper_policy(1),
        golden_paper_policy(3, 1, 1),
        golden_paper_policy(3, 2, 2),
        replace(golden_paper_policy(1), profile=None, validation=[]),
        replace(golden_policy(), predicted_error=None, validation=(), provenance={}),
        expert_policy(),
        replace(golden_policy(), target_psnr=100 / 3, expert_steps=(3, 1)),
    ],
)
def test_round_trip_is_exact(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "p.safetensors")
    assert_same(Policy.load(tmp_path / "p.safetensors"), policy)
    assert Policy.load(tmp_path / "p.safetensors")._to_bytes() == policy._to_bytes()


def test_scalar_gain_without_dimensions() -> None:
    steps = (0, 1, 3)
    plan = PaperPlan(steps, "velocity", schedule(), numbers(4), numbers(4, start=3))
    policy = Policy(plan, schedule(), fingerprint=fingerprint())
    assert_same(Policy._from_bytes(policy._to_bytes(), "memory"), policy)


@pytest.mark.parametrize("name", ["policy-v1.safetensors", "paper-policy-v1.safetensors"])
def test_golden_bytes(name: str) -> None:
    policy = GOLDEN[name]()
    assert isinstance(policy, Policy)
    assert policy._to_bytes() == (FOLDER / name).read_bytes()
    assert_same(Policy.load(FOLDER / name), policy)


def test_layout_in_memory_does_not_change_the_bytes() -> None:
    policy = golden_policy()
    assert isinstance(policy.plan, TrajectoryPlan)
    turned = policy.plan.coefficients.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    plan = TrajectoryPlan((0, 1, 3), turned)
    provenance = dict(reversed(policy.provenance.items()))
    same = replace(policy, plan=plan, provenance=provenance)
    assert same._to_bytes() == policy._to_bytes()


def test_properties() -> None:
    policy = golden_policy()
    assert (policy.method, policy.num_steps) == ("trajectory", 4)
    assert (policy.compute_steps, policy.reuse_steps) == ((0, 1, 3), (2,))
    assert policy.speedup == 4 / 3
    assert golden_paper_policy().method == "paper"
    assert policy.validation[2].psnr == math.inf


def test_target_and_expert_steps_are_kept_in_the_provenance_of_the_file() -> None:
    policy = expert_policy()
    header, _ = split(policy._to_bytes())
    origin = json.loads(header["__metadata__"]["ertacache"])["provenance"]
    added = {"first steps of networks": "0 3", "min psnr": "42.5"}
    assert origin == dict(policy.provenance) | added
    assert not set(added) & set(policy.provenance)
    loaded = Policy._from_bytes(policy._to_bytes(), "memory")
    assert loaded.profile is not None
    assert loaded.profile.expert_steps == (3,)


def test_its_own_row_is_the_one_that_was_measured() -> None:
    policy = golden_policy()
    assert policy.measured == policy.validation[0]
    others = replace(policy, validation=policy.validation[1:])
    assert others.measured is None
    turned = replace(policy, validation=policy.validation[::-1])
    assert turned.measured == policy.validation[0]


def test_print_shows_schedule_and_measurements() -> None:
    policy = golden_policy()
    head = "trajectory policy for FluxPipeline: 3 of 4 steps computed, 1.33x fewer\n██·█"
    row = ValidationRow("policy", 3, math.inf, 1.3, 24)
    for shown, last in (
        (policy, "measured on 24 held-out prompts: 46.5 dB PSNR to the full run, 1.30x faster"),
        (
            replace(policy, validation=(row,)),
            "measured on 24 held-out prompts: identical to the full run, 1.30x faster",
        ),
        (
            replace(policy, validation=()),
            "not measured; predicted error of the latent 0.001",
        ),
    ):
        assert str(shown) == f"{head}\n{last}"
    paper = golden_paper_policy()
    assert str(paper).splitlines()[0].startswith("paper policy for FluxPipeline")
    assert len(str(paper).splitlines()) == 2
    assert repr(policy) == "<trajectory policy for FluxPipeline: 3 of 4 steps computed>"


def test_an_embedded_profile_is_the_profile(tmp_path: Path) -> None:
    golden_policy(profile=True).save(tmp_path / "p")
    embedded = Policy.load(tmp_path / "p").profile
    assert embedded is not None
    assert embedded._to_bytes() == golden_profile()._to_bytes()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sigmas": schedule(3)}, r"sigmas must have shape \(5,\)"),
        ({"fingerprint": fingerprint(5)}, r"sigmas must have shape \(6,\)"),
        ({"plan": None}, "plan must be TrajectoryPlan or PaperPlan, not NoneType"),
        ({"plan": trajectory_plan((0,), numbers(3), numbers(3, 2))}, "the plan has 3 steps"),
        (
            {"plan": trajectory_plan((0,), numbers(4), numbers(4, 17))},
            "history must be from 1 to 16",
        ),
        ({"predicted_error": -1.0}, "predicted_error must be at least 0, got -1"),
        ({"predicted_error": math.nan}, "predicted_error must be finite"),
        ({"provenance": {"a": 1}}, "provenance.a must be a string"),
        ({"validation": ("a",)}, "validation must hold ValidationRow, not str"),
        (
            {"validation": (ValidationRow("a", 5, 1.0, 1.0, 1),)},
            "computed_steps must be from 1 to 4",
        ),
        ({"profile": golden_profile(5)}, "profile is of another run"),
        (
            {"profile": replace(golden_profile(), sigmas=schedule() * (1 + 1e-12))},
            "another sigma schedule",
        ),
        ({"profile": "p"}, "profile must be a Profile, not str"),
        ({"target_psnr": math.inf}, "target_psnr must be finite"),
        ({"target_psnr": "40"}, "target_psnr must be a number, got str"),
        ({"expert_steps": (0,)}, "expert_steps must be from 1 to 3, got 0"),
        ({"expert_steps": (4,)}, "expert_steps must be from 1 to 3, got 4"),
        ({"expert_steps": 2}, "expert_steps must be a tuple, got int"),
    ],
)
def test_bad_parts_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        replace(golden_policy(), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "row",
    [
        ("", 1, 1.0, 1.0, 1),
        ("a", 0, 1.0, 1.0, 1),
        ("a", 1, math.nan, 1.0, 1),
        ("a", 1, 1.0, -1.0, 1),
    ],
)
def test_bad_validation_row(row: tuple[str, int, float, float, int]) -> None:
    with pytest.raises(PolicyError):
        ValidationRow(*row)


def test_the_wrong_kind_of_file_is_named() -> None:
    with pytest.raises(
        PolicyError, match=r"profile-v1.safetensors': it is a profile, not a policy"
    ):
        Policy.load(FOLDER / "profile-v1.safetensors")
    with pytest.raises(ProfileError, match="it is a policy, not a profile"):
        Profile.load(FOLDER / "policy-v1.safetensors")


def test_a_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(PolicyError, match="not an ertacache file"):
        Policy.load(tmp_path / "model.safetensors")
    save_file({"weight": torch.ones(2)}, tmp_path / "m", metadata={"ertacache": '{"format":"x"}'})
    with pytest.raises(PolicyError, match="neither an ertacache profile nor"):
        Policy.load(tmp_path / "m")


def edited(**changes: object) -> bytes:
    """The golden policy with header fields replaced and a checksum that is right."""
    header, buffer = split(golden_policy()._to_bytes())
    inner = json.loads(header["__metadata__"]["ertacache"]) | changes
    del inner["checksum"]
    header["__metadata__"]["ertacache"] = seal(dump(inner), buffer)
    return join(dump(header), buffer)


def plan_record(**changes: object) -> dict[str, object]:
    return {"compute_steps": [0, 1, 3], "history": 3, "method": "trajectory"} | changes


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 2}, "format version 2 .* reads up to 1: upgrade ertacache"),
        ({"version": True}, "format version is not a positive integer"),
        ({"extra": 1}, "policy has an unknown key 'extra'"),
        ({"provenance": []}, "policy.provenance must be an object, got a list"),
        ({"plan": plan_record(compute_steps=[1, 3])}, "step 0 must be computed"),
        ({"plan": plan_record(compute_steps=[0, 3, 3])}, "strictly increasing"),
        ({"plan": plan_record(compute_steps=[0, 4])}, "holds 4, but the run has 4 steps"),
        ({"plan": plan_record(compute_steps=[0, 1.0])}, r"compute_steps\[1\] must be an integer"),
        ({"plan": plan_record(history=4)}, "declares 'plan.outputs' as"),
        ({"plan": plan_record(method="other")}, "must be 'trajectory' or 'paper'"),
        ({"profile": {"prompts": []}}, "1 to 10000 prompts, not 0"),
        ({"provenance": {"min psnr": "high"}}, "'min psnr' must be a number"),
        ({"provenance": {"min psnr": "inf"}}, "'min psnr' must be a number"),
        ({"provenance": {"min psnr": 40}}, "provenance.min psnr must be a string, got int"),
        ({"provenance": {"min psnr": []}}, "provenance.min psnr must be a string, got list"),
        ({"provenance": {"min psnr": None}}, "provenance.min psnr must be a string, got NoneType"),
        ({"provenance": {"first steps of networks": 3}}, "networks must be a string, got int"),
        ({"provenance": {"first steps of networks": "0 a"}}, "must list step numbers"),
        ({"provenance": {"first steps of networks": "0 4"}}, "must be from 1 to 3, got 4"),
    ],
)
def test_bad_headers_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PolicyError, match=f"^cannot load 'memory': .*{sentence}"):
        Policy._from_bytes(edited(**changes), "memory")


def test_damage_is_noticed() -> None:
    data = bytearray(golden_policy()._to_bytes())
    data[-1] ^= 1
    with pytest.raises(PolicyError, match="the checksum does not match: the file is damaged"):
        Policy._from_bytes(bytes(data), "memory")


def test_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    golden_policy().save(tmp_path / "p")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(5, "broken disk")))
    with pytest.raises(PolicyError, match=r"cannot save '.*p': broken disk"):
        golden_paper_policy().save(tmp_path / "p")
    assert os.listdir(tmp_path) == ["p"]
    assert (tmp_path / "p").read_bytes() == golden_policy()._to_bytes()
