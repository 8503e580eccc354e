"""A pipeline of two experts: whatever the target, each begins with a computed step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.profile import profile
from ertacache.calibration.solve import solve, solve_profile
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.integration.attach import attach
from ertacache.integration.img2img import solve_later
from ertacache.integration.record import record
from tests.calibration.conftest import TINY_PROMPTS, counting_rows, tiny_call
from tests.integration.tiny import CASES, STEPS, call_arguments, generate

NAME = "wan-experts"
CALL = tiny_call(NAME)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return CASES[NAME].build()


@pytest.fixture(scope="module")
def known(pipe: Any) -> Profile:
    return profile(pipe, TINY_PROMPTS[:2], **CALL)


@pytest.fixture(scope="module")
def first(known: Profile) -> int:
    """The first step of the second network."""
    (second,) = known.expert_steps
    return second


def test_profile_keeps_where_the_second_network_begins(pipe: Any, first: int) -> None:
    with counting_rows(pipe.transformer) as calls:
        generate(pipe, CASES[NAME])
    assert len(calls) == 2 * first
    assert record(CASES["wan"].build(), **call_arguments(CASES["wan"])).expert_steps == ()


def test_every_budget_computes_it(known: Profile, first: int) -> None:
    for point in solve_profile(known).points:
        assert {0, first} <= {*point.plan.compute_steps}


def test_policy_keeps_it_in_its_file(known: Profile, first: int, tmp_path: Path) -> None:
    solve(known, compute_steps=3).save(tmp_path / "policy.safetensors")
    policy = Policy.load(tmp_path / "policy.safetensors")
    assert policy.expert_steps == (first,)


def test_a_policy_for_the_last_steps_computes_it_too(
    known: Profile, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a first-order scheduler; with UniPC such a run is refused."""
    monkeypatch.setattr("ertacache.integration.img2img.first_order_error", lambda *_: 0.0)
    policy = solve(known, compute_steps=3)
    for begin in range(1, first):
        assert {0, first - begin} <= {*solve_later(policy, begin).compute_steps}
    assert solve_later(policy, first).compute_steps[0] == 0


def test_calibrated_policy_runs(pipe: Any, first: int) -> None:
    """Refitted, with the uniform schedule among the candidates, and measured."""
    policy = calibrate(pipe, TINY_PROMPTS[:4], compute_steps=3, refit_prompts=2, **CALL)
    assert {0, first} <= {*policy.compute_steps}
    with (
        attach(pipe, policy),
        counting_rows(pipe.transformer) as one,
        counting_rows(pipe.transformer_2) as two,
    ):
        generate(pipe, CASES[NAME])
    second = sum(step >= first for step in policy.compute_steps)
    assert len(two) == 2 * second
    assert len(one) + len(two) == 2 * 3 < 2 * STEPS
