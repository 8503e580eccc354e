"""A pipeline of two experts: whatever is wished for, each begins with a computed step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ertacache.calibration import calibrate, profile, solve
from ertacache.calibration.solving import solve_all
from ertacache.formats.firststeps import FIRST_STEPS, read_first_steps
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.integration import attach, record
from ertacache.integration.later import solve_later
from tests.integration.setting import count_calls
from tests.integration.tiny import CASES, STEPS, call_arguments, generate

CASE = CASES["wan-experts"]
CALL = {
    name: value
    for name, value in call_arguments(CASE).items()
    if name not in ("prompt", "generator")
}
PROMPTS = ["a red circle", "a blue square", "a red square", "a blue circle"]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return CASE.build()


@pytest.fixture(scope="module")
def known(pipe: Any) -> Profile:
    return profile(pipe, PROMPTS[:2], **CALL)


@pytest.fixture(scope="module")
def first(known: Profile) -> int:
    """The first step of the second network."""
    start, second = read_first_steps(known.provenance)
    assert start == 0
    return second


def test_profile_notes_where_the_second_network_begins(pipe: Any, first: int) -> None:
    with count_calls(pipe.transformer) as calls:
        generate(pipe, CASE)
    assert len(calls) == 2 * first
    assert record(CASES["wan"].build(), **call_arguments(CASES["wan"])).first_steps == (0,)


def test_every_budget_computes_it(known: Profile, first: int) -> None:
    for point in solve_all(known).points:
        assert {0, first} <= {*point.plan.compute_steps}


def test_policy_remembers_it_in_its_file(known: Profile, first: int, tmp_path: Path) -> None:
    solve(known, compute_steps=3).save(tmp_path / "policy.safetensors")
    policy = Policy.load(tmp_path / "policy.safetensors")
    assert policy.provenance[FIRST_STEPS] == f"0 {first}"


def test_a_policy_for_the_last_steps_computes_it_too(
    known: Profile, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a first-order scheduler; with UniPC such a run is refused."""
    monkeypatch.setattr("ertacache.integration.later.first_order_error", lambda *_: 0.0)
    policy = solve(known, compute_steps=3)
    for begin in range(1, first):
        assert {0, first - begin} <= {*solve_later(policy, begin).compute_steps}
    assert solve_later(policy, first).compute_steps[0] == 0


def test_calibrated_policy_runs(pipe: Any, first: int) -> None:
    """Refitted, with the uniform schedule among the candidates, and measured."""
    policy = calibrate(pipe, PROMPTS, compute_steps=3, refit_prompts=2, **CALL)
    assert {0, first} <= {*policy.compute_steps}
    networks = (pipe.transformer, pipe.transformer_2)
    with attach(pipe, policy), count_calls(*networks) as calls:
        generate(pipe, CASE)
    second = sum(step >= first for step in policy.compute_steps)
    assert calls.count(networks[1]) == 2 * second
    assert len(calls) == 2 * 3 < 2 * STEPS
