"""The profile of a policy: what is valid, which runs are the same, selecting and merging."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.formats.schema import PolicyError
from tests.formats.golden.objects import (
    facts,
    fingerprint,
    golden_profile,
    make_profile,
    numbers,
    schedule,
    sigma_schedule,
)
from tests.formats.mutations import edited

APPLE = ProfiledPrompt("an apple", 0)


def loaded(profile: Profile) -> Profile | None:
    policy = Policy(fingerprint(), profile=profile)
    return Policy._from_bytes(policy._to_bytes(), "memory").profile


@pytest.mark.parametrize(("num_steps", "num_runs"), [(4, 2), (1, 1), (7, 3)])
def test_round_trip_is_exact(num_steps: int, num_runs: int) -> None:
    profile = make_profile(num_steps, num_runs)
    assert (profile.num_steps, profile.num_runs) == (num_steps, num_runs)
    assert facts(loaded(profile)) == facts(profile)


def test_fifty_steps_and_64_prompts_stay_under_five_megabytes() -> None:
    profile = make_profile(50, 64)
    size = sum(8 * value.numel() for value in profile.tensors().values())
    assert size == 8 * (64 * 7902 + 2803) == 4_068_248  # docs/formats.md states the sum
    assert len(Policy(fingerprint(), profile=profile)._to_bytes()) - size < 16_384
    longest = tuple(ProfiledPrompt("ü" * 1000, k) for k in range(64))
    assert (
        len(Policy(fingerprint(), profile=replace(profile, runs=longest))._to_bytes()) < 5_000_000
    )


def test_matrices_are_kept_as_triangles() -> None:
    tensors = make_profile(4, 2).tensors()
    assert tensors["profile.inner"].shape == (2, 45)
    assert tensors["profile.output_l1"].shape == tensors["profile.residual_l1"].shape == (2, 10)
    assert {name.split(".")[0] for name in tensors} == {"profile"}
    assert {name: tuple(value.shape) for name, value in tensors.items()} == Profile.shapes(
        make_profile(4, 2).to_json()
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"prompt": None}, "prompt must be a string, got NoneType"),
        ({"prompt": "\ud800"}, "prompt holds a lone surrogate"),
        ({"seed": -1}, "seed must be from 0 to 9223372036854775807, got -1"),
        ({"seed": 2**63}, "seed must be from 0"),
        ({"seed": True}, "seed must be an integer, got bool"),
        ({"arguments": (("", 1),)}, "an argument must not be empty"),
        ({"arguments": ((1, 1),)}, "an argument must be a string, got int"),
        ({"arguments": (("a", ()),)}, "arguments.a must be a JSON scalar, got tuple"),
        ({"arguments": (("a", math.nan),)}, "arguments.a must be finite, got nan"),
        ({"arguments": (("b", 1), ("a", 1))}, "arguments must be sorted by name, no name twice"),
        ({"arguments": (("a", 1), ("a", 2))}, "arguments must be sorted by name, no name twice"),
        ({"arguments": ("abc",)}, "too many values to unpack"),
    ],
)
def test_bad_run(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        replace(APPLE, **changes)


def test_runs_with_other_arguments_are_other_runs() -> None:
    pairs: Any = [["height", 64], ["width", 64]]
    run = replace(APPLE, arguments=pairs)
    assert run == replace(APPLE, arguments=(("height", 64), ("width", 64)))
    assert len({APPLE, run, replace(APPLE, seed=1), replace(APPLE, prompt="")}) == 4


def with_schedule(**changes: Any) -> dict[str, Any]:
    return {"schedule": replace(schedule(), **changes)}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"schedule": sigma_schedule()}, "schedule must be a Schedule, not Tensor"),
        (with_schedule(sigmas=sigma_schedule(5)), r"sigmas must have shape \(5,\), got \(6,\)"),
        (with_schedule(sigmas=[1.0, 0.0]), "sigmas must be a tensor, got list"),
        (with_schedule(sigmas=sigma_schedule().float()), "sigmas must be float64, got float32"),
        (with_schedule(sigmas=sigma_schedule().flip(0)), "descend at every step, but entry 1"),
        (with_schedule(nominal=numbers(4, 3)), r"nominal must have shape \(4, 2\)"),
        (with_schedule(nominal=numbers(4, 2) / 0), "nominal holds a number that is not finite"),
        (with_schedule(nominal=numbers(0, 2)), "num_steps must be from 1 to 10000, got 0"),
        (with_schedule(latents=numbers(5, 4)), r"latents must have shape \(5, 5\)"),
        (with_schedule(latents=numbers(5, 5)), "latents must be 0 above the diagonal"),
        (with_schedule(scale=numbers(4)), r"scale must have shape \(5,\)"),
        (with_schedule(scale=numbers(5, start=0)), "scale must be positive"),
        ({"runs": ()}, "a profile has 1 to 10000 runs, not 0"),
        ({"runs": (APPLE,) * 10_001}, "a profile has 1 to 10000 runs, not 10001"),
        ({"runs": ("a", "b")}, "runs must hold ProfiledPrompt, not str"),
        ({"runs": (APPLE, APPLE)}, "'an apple' with seed 0 is there twice"),
        ({"runs": (APPLE,)}, "statistics are of 2 runs and 4 steps, but the profile has 1 and 4"),
        ({"schedule": schedule(5)}, "of 2 runs and 4 steps, but the profile has 2 and 5"),
        ({"statistics": None}, "statistics must be RunStatistics"),
        ({"expert_steps": (0, 2)}, "expert_steps must be from 1 to 3, got 0"),
        ({"expert_steps": (4,)}, "expert_steps must be from 1 to 3, got 4"),
        ({"expert_steps": (True,)}, "expert_steps must be an integer, got bool"),
        ({"expert_steps": 2}, "expert_steps must be a tuple, got int"),
    ],
)
def test_bad_parts_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        replace(make_profile(), **changes)


RUN = {"arguments": {}, "elements": 12, "prompt": "a", "seed": 0}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"profile": []}, "policy.profile must be an object or null, got a list"),
        ({"profile.extra": 1}, "profile has an unknown key 'extra'"),
        ({"profile.begun": 1}, "profile.begun must be a boolean, got an integer"),
        ({"profile.num_steps": 0}, "profile.num_steps must be from 1 to 10000, got 0"),
        ({"profile.num_steps": 10_001}, "profile.num_steps must be from 1 to 10000, got 10001"),
        ({"profile.num_steps": 5}, "it declares 'profile.inner' as"),
        ({"profile.runs": []}, "a profile has 1 to 10000 runs, not 0"),
        ({"profile.runs": [RUN]}, "it declares 'profile.inner' as"),
        ({"profile.runs": [RUN, RUN]}, "'a' with seed 0 is there twice"),
        ({"profile.runs": [RUN, 1]}, r"profile.runs\[1\] must be an object, got an integer"),
        ({"profile.runs.1.elements": 0}, r"profile.runs\[1\].elements must be from 1"),
        ({"profile.runs.1.elements": 1.0}, r"profile.runs\[1\].elements must be an integer"),
        ({"profile.runs.1.elements": 2**63}, r"profile.runs\[1\].elements must be from 1"),
        ({"profile.runs.1.seed": -1}, "seed must be from 0"),
        ({"profile.runs.1.arguments": []}, r"runs\[1\].arguments must be an object, got a list"),
        ({"profile.runs.1.arguments.a": [1]}, "arguments.a must be a JSON scalar, got list"),
        ({"profile.expert_steps": [3, 1]}, "profile.expert_steps must ascend"),
        ({"profile.expert_steps": [1, 1]}, "profile.expert_steps must ascend"),
        ({"profile.expert_steps": [4]}, "expert_steps must be from 1 to 3, got 4"),
        ({"profile.expert_steps": [1.0]}, r"profile.expert_steps\[0\] must be an integer"),
    ],
)
def test_bad_records_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(PolicyError, match=f"^cannot load 'memory': .*{sentence}"):
        Policy._from_bytes(edited(golden_profile()._to_bytes(), changes), "memory")


def test_expert_steps_are_sorted() -> None:
    profile = replace(make_profile(), expert_steps=(3, 1, 3))
    assert profile.expert_steps == (1, 3)
    assert facts(loaded(profile)) == facts(profile)


def test_some_of_the_runs() -> None:
    profile = make_profile(4, 3)
    part = profile.select([profile.runs[2], profile.runs[0]])
    assert part.runs == (profile.runs[2], profile.runs[0])
    assert facts(part.statistics) == facts(profile.statistics.select([2, 0]))
    assert part.schedule is profile.schedule


def test_merge() -> None:
    first = replace(make_profile(4, 2), expert_steps=(3,))
    second = replace(make_profile(4, 3, first_seed=2), expert_steps=(1, 3))
    merged = first.merge(second)
    assert merged.runs == first.runs + second.runs
    assert merged.expert_steps == (1, 3)
    for entry in fields(merged.statistics):
        parts = [getattr(part.statistics, entry.name) for part in (first, second)]
        assert torch.equal(getattr(merged.statistics, entry.name), torch.cat(parts))
    assert facts(first.merge()) == facts(first)


OTHER = make_profile(4, 1, first_seed=9)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (make_profile(), "share a run cannot be merged: 'a red apple' with seed 0 is in more"),
        (make_profile(5, 1, first_seed=9), "different sigma schedules cannot be merged"),
        (replace(OTHER, schedule=schedule(begun=False)), "different sigma schedules"),
        (
            replace(OTHER, **with_schedule(sigmas=sigma_schedule() * (1 + 1e-12))),
            "different sigma schedules",
        ),
        (replace(OTHER, **with_schedule(nominal=numbers(4, 2))), "different sigma schedules"),
    ],
)
def test_merge_refuses(other: Profile, sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        make_profile().merge(other)
