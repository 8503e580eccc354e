"""The profile of a policy: what is valid, which runs are the same, selecting and merging."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.gram import Trajectory, profile_run, resample
from ertacache.core.groups import (
    ONE_GROUP,
    Groups,
    GroupStatistics,
    Layout,
    finest_groups,
    group_products,
)
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.formats.schema import PolicyError
from tests.formats.golden.objects import (
    GROUPS,
    facts,
    fingerprint,
    golden_profile,
    group_statistics,
    make_profile,
    numbers,
    schedule,
    sigma_schedule,
)
from tests.formats.mutations import edited

APPLE = ProfiledPrompt("an apple", 0)
COUNTS = [1, 1, 0, 0, 0, 0, 0, 0]  # runs of each fold of ``make_profile()``


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


def loaded(profile: Profile) -> Profile | None:
    policy = Policy(fingerprint(), profile=profile)
    return Policy._from_bytes(policy._to_bytes(), "memory").profile


@pytest.mark.parametrize("groups", [None, ONE_GROUP, GROUPS, Groups(16, 4)])
@pytest.mark.parametrize(("num_steps", "num_runs"), [(4, 2), (1, 1), (7, 11)])
def test_round_trip_is_exact(num_steps: int, num_runs: int, groups: Groups | None) -> None:
    profile = make_profile(num_steps, num_runs, groups=groups)
    assert profile.finest == groups
    assert (profile.num_steps, profile.num_runs) == (num_steps, num_runs)
    assert facts(loaded(profile)) == facts(profile)


def test_fifty_steps_and_64_prompts_stay_under_five_megabytes() -> None:
    profile = make_profile(50, 64, groups=None)
    size = sum(8 * value.numel() for value in profile.tensors().values())
    assert size == 8 * (64 * 7902 + 2803) == 4_068_248  # docs/formats-profile.md states the sum
    assert len(Policy(fingerprint(), profile=profile)._to_bytes()) - size < 16_384
    longest = tuple(ProfiledPrompt("ü" * 1000, k) for k in range(64))
    assert (
        len(Policy(fingerprint(), profile=replace(profile, runs=longest))._to_bytes()) < 5_000_000
    )


def test_fifty_steps_32_prompts_and_16_channels_stay_under_eight_megabytes() -> None:
    noise = torch.Generator().manual_seed(0)
    half = torch.rand(8, 48, 51, 51, generator=noise, dtype=torch.float64)
    counts = torch.full((8,), 4)
    by_group = GroupStatistics(Groups(channels=16, bands=3), half + half.mT, counts)
    profile = replace(make_profile(50, 32), by_group=by_group)
    sizes = {name: 8 * value.numel() for name, value in profile.tensors().items()}
    assert (
        sizes["profile.groups"] == 8 * 8 * 48 * 1326 == 4_073_472
    )  # as in docs/formats-profile.md
    size = len(Policy(fingerprint(), profile=profile)._to_bytes())
    assert round(size / 1e6, 1) == 6.1
    long = tuple(ProfiledPrompt("ü" * 1000, k) for k in range(32))
    assert len(Policy(fingerprint(), profile=replace(profile, runs=long))._to_bytes()) < 8_000_000


def test_matrices_are_kept_as_triangles() -> None:
    tensors = make_profile(4, 2).tensors()
    assert tensors["profile.groups"].shape == (8, 6, 15)
    assert "profile.groups" not in make_profile(4, 2, groups=None).tensors()
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
        ({"folds": (0,)}, "1 folds of 2 runs"),
        ({"folds": (0, 8)}, "fold must be from 0 to 7, got 8"),
        ({"folds": (0, -1)}, "fold must be from 0 to 7, got -1"),
        ({"folds": (0, True)}, "fold must be an integer, got bool"),
        ({"folds": (0, 0)}, "statistics by group are of other runs"),
        ({"by_group": "b"}, "by_group must be GroupStatistics, not str"),
        ({"by_group": group_statistics([0, 1], 5)}, "of 8 folds and 5 steps, .* has 8 and 4"),
        ({"by_group": group_statistics([0, 2])}, "statistics by group are of other runs"),
        ({"by_group": group_statistics([0, 1, 1])}, "statistics by group are of other runs"),
        ({"by_group": group_statistics([0, 1]).select([])}, "statistics by group are of no runs"),
        (
            {"by_group": GroupStatistics(ONE_GROUP, ones(2, 1, 5, 5), torch.tensor([1, 1]))},
            "of 2 folds and 4 steps, but the profile has 8 and 4",
        ),
        (
            {"by_group": GroupStatistics(ONE_GROUP, ones(8, 1, 5, 5), torch.tensor(COUNTS))},
            "statistics by group of a fold without runs must be 0",
        ),
        (
            {"by_group": group_statistics([0, 1], groups=Groups(True, 2))},
            "groups.channels must be an integer, got bool",
        ),
    ],
)
def test_bad_parts_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PolicyError, match=sentence):
        replace(make_profile(), **changes)


RUN = {"arguments": {}, "elements": 12, "fold": 0, "prompt": "a", "seed": 0}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"profile": []}, "policy.profile must be an object or null, got a list"),
        ({"profile.extra": 1}, "profile has an unknown key 'extra'"),
        ({"profile.begun": 1}, "profile.begun must be a boolean, got an integer"),
        ({"profile.num_steps": 0}, "profile.num_steps must be from 1 to 10000, got 0"),
        ({"profile.num_steps": 10_001}, "profile.num_steps must be from 1 to 10000, got 10001"),
        ({"profile.num_steps": 5}, "it declares 'profile.groups' as"),
        ({"profile.num_steps": 5, "profile.groups": None}, "an unknown tensor 'profile.groups'"),
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
        ({"profile.runs": [{"seed": 0}, RUN]}, r"profile.runs\[0\] lacks the key 'arguments'"),
        ({"profile.runs.1.fold": 8}, r"profile.runs\[1\].fold must be from 0 to 7, got 8"),
        ({"profile.runs.1.fold": -1}, r"profile.runs\[1\].fold must be from 0 to 7, got -1"),
        ({"profile.runs.1.fold": 1.0}, r"runs\[1\].fold must be an integer, got a number"),
        ({"profile.runs.1.fold": None}, r"runs\[1\].fold must be an integer, got null"),
        ({"profile.runs.1.fold": 0}, "statistics by group are of other runs"),
        ({"profile.groups": []}, "profile.groups must be an object or null, got a list"),
        ({"profile.groups": {}}, "profile.groups lacks the key 'bands'"),
        ({"profile.groups.extra": 1}, "profile.groups has an unknown key 'extra'"),
        ({"profile.groups": None}, "it holds an unknown tensor 'profile.groups'"),
        ({"profile.groups.bands": 0}, "profile.groups.bands must be from 1 to 4, got 0"),
        ({"profile.groups.bands": 5}, "profile.groups.bands must be from 1 to 4, got 5"),
        ({"profile.groups.bands": 3}, "it declares 'profile.groups' as"),
        ({"profile.groups.channels": 17}, "groups.channels must be from 1 to 16, got 17"),
        ({"profile.groups.channels": True}, "groups.channels must be an integer, got a boolean"),
        ({"profile.groups.counts": 2}, "profile.groups.counts must be a list, got an integer"),
        ({"profile.groups.counts": COUNTS[1:]}, "counts must have 8 entries, got 7"),
        ({"profile.groups.counts.3": 1.0}, r"profile.groups.counts\[3\] must be an integer"),
        ({"profile.groups.counts.3": -1}, "profile.groups.counts must be from 0 to 10000, got -1"),
        ({"profile.groups.counts.3": 2**62}, "profile.groups.counts must be from 0 to 10000"),
        ({"profile.groups.counts.3": 1}, "statistics by group are of other runs"),
        ({"profile.groups.counts.0": 2}, "statistics by group are of other runs"),
        ({"profile.groups.counts.0": 0}, "of a fold without runs must be 0"),
        ({"profile.groups.counts": [0] * 8}, "statistics by group are of no runs"),
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


def noise(runs: int, first_seed: int = 0) -> tuple[Tensor, list[Tensor]]:
    """Start and outputs of runs of four steps, of three channels of 4 x 4 pixels."""
    values = torch.Generator().manual_seed(first_seed)
    start, *outputs = torch.randn(5, runs, 3, 4, 4, generator=values, dtype=torch.float64)
    return start, outputs


def measured(folds: Sequence[int], *, first_seed: int = 0) -> Profile:
    """A profile of such runs, which Euler's method has taken."""
    start, outputs = noise(len(folds), first_seed)
    d = sigma_schedule().diff()
    euler = torch.cat([ones(5, 1), d.expand(5, 4).tril(-1)], dim=1)
    vectors = torch.stack([start, *outputs])
    latents = tuple(torch.einsum("kj,j...->k...", euler, vectors))
    return Profile(
        replace(schedule(), latents=euler),
        profile_run(Trajectory(latents, tuple(outputs))),
        tuple(ProfiledPrompt("a", first_seed + k) for k in range(len(folds))),
        folds=tuple(folds),
        by_group=GroupStatistics.of(start, outputs, Layout(), folds=folds),
    )


def filled(profile: Profile) -> list[int]:
    """Runs by fold that the statistics by group are of."""
    assert profile.by_group is not None
    return profile.by_group.counts.tolist()


def test_by_default_runs_take_turns_in_the_folds() -> None:
    profile = make_profile(4, 11)
    assert Profile(profile.schedule, profile.statistics, profile.runs).folds == profile.folds
    assert profile.folds == (0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2)


def test_the_gram_matrices_of_groups_are_means_over_the_runs() -> None:
    profile, (start, outputs) = measured([5, 0, 5]), noise(3)
    latents = torch.einsum(
        "kj,j...->k...", profile.schedule.latents, torch.stack([start, *outputs])
    )
    assert profile.finest == finest_groups(start, Layout()) == Groups(3, 3)
    for groups in (Groups(3, 3), Groups(3, 1), Groups(1, 2)):
        expected = group_products([*latents, *outputs], groups, Layout()).mean(0)
        found = profile.gram(groups)
        assert (found.groups, found.num_prompts) == (groups.count, 1)
        torch.testing.assert_close(found.products, expected)


def test_the_groups_of_a_profile_add_up_to_the_whole_latent() -> None:
    profile = measured([0, 1, 1])
    whole = profile.statistics.gram.mean().products
    torch.testing.assert_close(profile.gram(Groups(3, 3)).by_prompt.sum(1), whole)
    torch.testing.assert_close(profile.gram(ONE_GROUP).products, whole)


def test_every_run_counts_by_the_inverse_of_what_plain_reuse_costs_it() -> None:
    profile = measured([0, 1, 1])
    d, (_, outputs) = profile.schedule.nominal[:, 1], noise(3)
    costs = [
        sum(d[k] ** 2 * (outputs[k] - outputs[k - 1])[p].square().mean() for k in range(1, 4))
        for p in range(3)
    ]
    torch.testing.assert_close(
        profile.weights, 1 / torch.stack([torch.as_tensor(c) for c in costs])
    )
    grams = profile.run_grams().products / profile.statistics.gram.products
    torch.testing.assert_close(
        grams[:, 0, 0] / grams[0, 0, 0], profile.weights / profile.weights[0]
    )


def test_the_gram_matrices_of_groups_on_another_schedule_are_resampled() -> None:
    profile = measured([0, 1, 1])
    d = sigma_schedule(3).diff()
    euler = torch.cat([ones(4, 1), d.expand(4, 3).tril(-1)], dim=1)
    for begun in (True, False):
        run = replace(schedule(3, begun=begun), latents=euler)
        found = profile.gram(GROUPS, run)
        assert (found.num_steps, found.groups) == (3, 6)
        expected = resample(profile.gram(GROUPS), profile.schedule, run)
        torch.testing.assert_close(found.products, expected.products)
        one = resample(profile.statistics.gram, profile.schedule, run).mean()
        torch.testing.assert_close(found.by_prompt.sum(1), one.products)
    same = profile.gram(GROUPS, profile.schedule)
    assert torch.equal(same.products, profile.gram(GROUPS).products)


def test_groups_that_a_profile_does_not_know_are_refused() -> None:
    with pytest.raises(PolicyError, match="the profile has no statistics of 3 channels x 2 bands"):
        make_profile(groups=None).gram(GROUPS)
    with pytest.raises(ValueError, match="2 channels do not consist of 3 channels x 2 bands"):
        make_profile().gram(Groups(channels=2))
    with pytest.raises(ValueError, match="3 bands do not consist of 3 channels x 2 bands"):
        make_profile().gram(Groups(bands=3))


def test_a_selection_keeps_the_folds_that_it_fills() -> None:
    profile = measured([0, 1, 1, 2])
    runs = profile.runs
    part = profile.select([runs[3], runs[1], runs[0]])
    assert part.folds == (2, 1, 0)
    assert filled(part) == [1, 0, 1, 0, 0, 0, 0, 0]
    alone = [profile.select([runs[k]]).gram(GROUPS).products for k in (0, 3)]
    torch.testing.assert_close(part.gram(GROUPS).products, (alone[0] + alone[1]) / 2)
    assert facts(loaded(part)) == facts(part)
    assert filled(profile.select(list(runs))) == [1, 2, 1, 0, 0, 0, 0, 0]


def test_a_selection_that_fills_no_fold_has_no_groups() -> None:
    profile = measured([0, 1, 1])
    runs = profile.runs
    assert profile.select([runs[1]]).finest is None
    assert profile.select([runs[0], runs[1]]).select([runs[1]]).finest is None
    assert make_profile(4, 3, groups=None).select([make_profile(4, 3).runs[0]]).finest is None


@pytest.mark.parametrize(
    ("folds", "first", "second"),
    [
        ((0, 1, 2, 3, 0), [0, 2, 4], [1, 3]),
        ((0, 0, 1, 1), [0, 1], [2, 3]),
        ((2, 2, 4, 4), [0, 1], [2, 3]),  # of the same parity
        ((7, 3, 5), [1, 0], [2]),
    ],
)
def test_halves_have_different_folds(
    folds: tuple[int, ...], first: list[int], second: list[int]
) -> None:
    profile = measured(folds)
    one, other = profile.halves(profile.runs)
    assert {run.seed for run in one} == set(first)
    assert {run.seed for run in other} == set(second)
    parts = [profile.select(half) for half in (one, other)]
    assert not set(parts[0].folds) & set(parts[1].folds)
    assert [sum(filled(part)) for part in parts] == [len(first), len(second)]  # nothing is lost


def test_halves_of_one_fold_take_turns() -> None:
    profile = measured((3, 3, 3))
    a, b, c = profile.runs
    assert profile.halves(profile.runs) == ([a, c], [b])
    assert profile.halves([c]) == ([c], [])
    assert profile.halves([]) == ([], [])


def test_merged_statistics_by_group_are_added() -> None:
    first, second = measured([0, 1, 7]), measured([1, 2], first_seed=10)
    merged = first.merge(second)
    assert merged.folds == (0, 1, 7, 1, 2)
    assert filled(merged) == [1, 2, 1, 0, 0, 0, 0, 1]
    assert merged.by_group is not None
    parts = [part.by_group.products for part in (first, second) if part.by_group is not None]
    assert torch.equal(merged.by_group.products, parts[0] + parts[1])
    torch.testing.assert_close(
        second.merge(first).gram(GROUPS).products, merged.gram(GROUPS).products
    )
    assert facts(loaded(merged)) == facts(merged)


@pytest.mark.parametrize("groups", [None, Groups(3, 3), ONE_GROUP])
def test_parts_with_different_groups_have_none_when_merged(groups: Groups | None) -> None:
    first, other = make_profile(), make_profile(4, 2, first_seed=5, groups=groups)
    assert first.merge(other).finest is other.merge(first).finest is None
    assert first.merge(other).num_runs == 4


def test_a_fold_that_a_part_does_not_know_is_left_out_of_the_merged_profile() -> None:
    whole = measured([0, 1, 1])
    part, other = whole.select(list(whole.runs[:2])), measured([1, 2], first_seed=10)
    for merged in (part.merge(other), other.merge(part)):
        assert filled(merged) == [1, 0, 1, 0, 0, 0, 0, 0]
    assert part.merge(measured([0, 0], first_seed=10)).finest == Groups(3, 3)
    assert whole.select([whole.runs[1]]).merge(other).finest is None


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
