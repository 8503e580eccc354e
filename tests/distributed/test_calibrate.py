"""Calibration on several processes: the same file, whatever their number and whatever happens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from ertacache.formats.policy import Policy
from tests.distributed.launch import COMPUTED, finished, launch


class Undisturbed(NamedTuple):
    """The file of one process, and the calls of the pipeline that it took."""

    data: bytes
    calls: Counter[str]


def policy_of(folder: Path) -> bytes:
    return (folder / "policy.safetensors").read_bytes()


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of all launches: of 1, 2 and 4 processes, and of two that lose one of them."""
    root = tmp_path_factory.mktemp("launched")
    task = {"task": "calibrate"}
    codes = launch(
        *(task | {"count": count, "folder": root / str(count)} for count in (1, 2, 4)),
        task | {"count": 2, "folder": root / "profile", "kill": ["network", 1, 4]},
        task | {"count": 2, "folder": root / "profile"},
        task | {"count": 2, "folder": root / "refit", "kill": ["refit", 1, 20]},
        task | {"count": 1, "folder": root / "refit"},
    )
    assert codes[:3] == [[0], [0, 0], [0] * 4]
    assert codes[3:] == [[2, -9], [0, 0], [2, -9], [0]]
    return root


@pytest.fixture(scope="module")
def undisturbed(launched: Path) -> Undisturbed:
    return Undisturbed(policy_of(launched / "1"), finished(launched / "1"))


@pytest.mark.parametrize("count", [2, 4])  # three batches: one of four processes has none
def test_the_file_does_not_depend_on_the_number_of_processes(
    launched: Path, undisturbed: Undisturbed, count: int
) -> None:
    assert policy_of(launched / str(count)) == undisturbed.data
    assert finished(launched / str(count)) == undisturbed.calls  # every run once, by one process
    profile = "profile.safetensors"
    assert (launched / str(count) / profile).read_bytes() == (launched / "1" / profile).read_bytes()


@pytest.mark.parametrize("where", ["profile", "refit"])
def test_a_killed_process_costs_no_finished_run(
    launched: Path, undisturbed: Undisturbed, where: str
) -> None:
    assert policy_of(launched / where) == undisturbed.data
    assert finished(launched / where) == undisturbed.calls
    assert not (launched / where / "parts").exists()


def test_where_the_processes_were_killed(launched: Path, undisturbed: Undisturbed) -> None:
    """In the middle of the profile, and of the refit: what was finished before was taken up."""
    before = {}
    for where in ("profile", "refit"):
        calls = [finished_in(path) for path in sorted((launched / where).glob("calls-*"))]
        before[where] = sum(calls[:2])
    total = undisturbed.calls.total()
    assert before["profile"] == 1  # the batch of the other process, of three
    assert 5 < before["refit"] < total


def finished_in(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_survivors_name_the_remedy(launched: Path) -> None:
    for where, number in (("profile", 3), ("refit", 5)):
        text = (launched / where / f"err-{number}-0").read_text().splitlines()[-1]
        assert text.startswith("error: another process of this launch has ended")
        assert "the same command continues" in text


def test_the_policy_is_whole(launched: Path) -> None:
    policy = Policy.load(launched / "4" / "policy.safetensors")
    assert policy.profile is not None
    assert policy.profile.num_runs == 5
    (plan,) = policy.plans
    assert len(plan.compute_steps) == COMPUTED
    assert plan.measured is not None
    assert plan.measured.prompts == 2
