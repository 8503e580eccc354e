"""What is lost when one policy takes the place of another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ertacache.formats.measured import lost_work
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from tests.formats.golden.objects import (
    fingerprint,
    golden_paper_policy,
    golden_policy,
    make_profile,
    measured_plan,
    schedule,
    short_plan,
)

SOLVED = replace(short_plan(), validation=())
OLD = replace(golden_policy(), plans=(measured_plan(), SOLVED))
ALL = "2 runs of a profile, 2 measured fits, 1 measured plan"


def with_profile(**changes: object) -> Profile:
    return replace(make_profile(), **changes)  # type: ignore[arg-type]


def test_everything_or_nothing() -> None:
    assert lost_work(OLD, None) == ALL
    assert lost_work(OLD, OLD) == ""
    assert lost_work(golden_paper_policy(), None) == ""  # it was only solved
    assert lost_work(replace(OLD, plans=(SOLVED,), fits=()), None) == "2 runs of a profile"


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        (
            {"profile": None, "frontier": (), "fits": (), "response": ()},
            "2 runs of a profile, 2 measured fits",
        ),
        ({"profile": make_profile(num_runs=1)}, "1 run of a profile"),
        ({"profile": make_profile(num_runs=3)}, ""),
        ({"profile": with_profile(schedule=schedule(begun=False))}, "2 runs of a profile, 2 mea"),
        ({"fits": OLD.fits[:1]}, "1 measured fit"),
        ({"plans": ()}, "1 measured plan"),
        ({"plans": (measured_plan(),)}, ""),
        ({"plans": (replace(measured_plan(), validation=()),)}, ""),
        ({"plans": (replace(measured_plan(), measured_error=None),)}, ""),
        (
            {"plans": (replace(measured_plan(), validation=(), measured_error=None),)},
            "1 measured plan",
        ),
        ({"fingerprint": fingerprint(versions={})}, ""),
        ({"fingerprint": fingerprint(guidance={"guidance_scale": (2.5, 3.0, 3.5)})}, ""),
        ({"fingerprint": fingerprint(guidance={"guidance_scale": (2.5, 3.0)})}, ALL),
        ({"fingerprint": fingerprint(dtype="bfloat16")}, ALL),
    ],
)
def test_what_another_policy_lacks(changes: dict[str, object], lost: str) -> None:
    new: Policy = replace(OLD, **changes)  # type: ignore[arg-type]
    found = lost_work(OLD, new)
    assert found.startswith(lost)
    assert bool(found) == bool(lost)
