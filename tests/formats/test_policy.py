"""Policies: exact round trips for both methods, golden bytes, refusals with a sentence."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ertacache.core.plan import PaperPlan, TrajectoryPlan
from ertacache.formats.policy import Policy, PolicyError, ValidationRow
from ertacache.formats.profile import Profile, ProfileError
from tests.formats.golden.objects import (
    FOLDER,
    GOLDEN,
    fingerprint,
    golden_paper_policy,
    golden_policy,
    golden_profile,
    numbers,
    table,
)
from tests.formats.mutations import dump, join, seal, split


def assert_same(a: Policy, b: Policy) -> None:
    for name in ("fingerprint", "predicted_error", "validation", "provenance", "compute_steps"):
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
    ],
)
def test_round_trip_is_exact(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "p.safetensors")
    assert_same(Policy.load(tmp_path / "p.safetensors"), policy)
    assert Policy.load(tmp_path / "p.safetensors")._to_bytes() == policy._to_bytes()


def test_scalar_gain_without_dimensions() -> None:
    steps = (0, 1, 3)
    plan = PaperPlan(steps, "velocity", table(), numbers(4), numbers(4, start=3))
    policy = Policy(plan, table(), fingerprint=fingerprint())
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
    turned = policy.plan.outputs.T.contiguous().T
    plan = TrajectoryPlan((0, 1, 3), policy.plan.latent, turned)
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


def test_an_embedded_profile_is_the_profile(tmp_path: Path) -> None:
    golden_policy(profile=True).save(tmp_path / "p")
    embedded = Policy.load(tmp_path / "p").profile
    assert embedded is not None
    assert embedded._to_bytes() == golden_profile()._to_bytes()


PLAN = golden_policy().plan


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sigmas": table(3)}, r"sigmas must have shape \(5,\)"),
        ({"fingerprint": fingerprint(5)}, r"sigmas must have shape \(6,\)"),
        ({"plan": None}, "plan must be TrajectoryPlan or PaperPlan, not NoneType"),
        ({"plan": TrajectoryPlan((0,), numbers(3), numbers(3, 2))}, "the plan has 3 steps"),
        (
            {"plan": TrajectoryPlan((0,), numbers(4), numbers(4, 17))},
            "history must be from 1 to 16",
        ),
        ({"predicted_error": -1.0}, "predicted_error must be at least 0, got -1"),
        ({"predicted_error": math.nan}, "predicted_error must be finite"),
        ({"provenance": {"a": 1}}, "provenance.a must be a text"),
        ({"validation": ("a",)}, "validation must hold ValidationRow, not str"),
        (
            {"validation": (ValidationRow("a", 5, 1.0, 1.0, 1),)},
            "computed_steps must be from 1 to 4",
        ),
        ({"profile": golden_profile(5)}, "profile is of another run"),
        (
            {"profile": replace(golden_profile(), sigmas=table() * (1 + 1e-12))},
            "another sigma table",
        ),
        ({"profile": "p"}, "profile must be a Profile, not str"),
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


def test_the_wrong_kind_of_file_says_so() -> None:
    with pytest.raises(
        PolicyError, match=r"profile-v1.safetensors': it is a profile, not a policy"
    ):
        Policy.load(FOLDER / "profile-v1.safetensors")
    with pytest.raises(ProfileError, match="it is a policy, not a profile"):
        Profile.load(FOLDER / "policy-v1.safetensors")


def test_a_foreign_safetensors_file_says_so(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(PolicyError, match="not our file"):
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
