"""The journal: nothing measured is lost, nothing of other settings is mixed in."""

from __future__ import annotations

from pathlib import Path

import pytest

from ertacache.bench.records import Cost, Journal, Record
from tests.formats.golden.objects import golden_paper_policy

SETTINGS = {"model": "m", "budgets": [2.0]}
RECORD = Record("ours", 2.0, 0, 0.5, {"psnr": [40.0, 41.0]})


def test_an_interrupted_journal_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    Journal(path, SETTINGS).add(RECORD)
    with path.open("a") as file:
        file.write('{"method": "ours", "budget": 2.0, "bat')  # cut off in the middle of a line
    again = Journal(path, SETTINGS)
    assert list(again.of("ours", 2.0)) == [RECORD]
    assert again.has("ours", 2.0, 0)
    assert not again.has("ours", 2.0, 1)
    assert not again.has("ours", 3.0, 0)
    again.add(Record("ours", 2.0, 1, 0.4, {"psnr": [39.0]}))
    assert [record.batch for record in Journal(path, SETTINGS).of("ours", 2.0)] == [0, 1]


def test_a_journal_of_other_settings_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, SETTINGS).add(RECORD)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="other settings"):
        Journal(path, SETTINGS | {"budgets": [3.0]})
    assert path.read_bytes() == before


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, SETTINGS)
    with path.open("a") as file:
        file.write('{"method": "ours", "budget": 2.0, "batch": 0}\n')  # of no kind
    with pytest.raises(ValueError, match="other settings or versions"):
        Journal(path, SETTINGS)


def test_costs_and_turns_are_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for measured in (True, False):
        journal = Journal(path, SETTINGS)
        asked: list[str] = []

        def flops(asked: list[str] = asked) -> int:
            asked.append("flops")
            return 30

        def cost(asked: list[str] = asked) -> tuple[int, int]:
            asked.append("cost")
            return 50, 7

        assert journal.flops("theirs", 0.1, flops) == 30
        assert journal.cost("theirs", 2.0, cost) == Cost("theirs", 2.0, 50, 7)
        assert asked == (["flops", "cost"] if measured else [])
    assert not journal.has("theirs", 2.0, 0)


def test_policies_are_kept_beside_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "bench.journal.jsonl"
    journal = Journal(path, SETTINGS)
    assert journal.policy("paper, no timesteps", 1.5) is None
    policy = golden_paper_policy(1)
    journal.keep_policy("paper, no timesteps", 1.5, policy)
    again = Journal(path, SETTINGS).policy("paper, no timesteps", 1.5)
    assert again is not None
    assert again.compute_steps == policy.compute_steps
    (tmp_path / "bench.policies" / "paper-no-timesteps-1.5x.safetensors").unlink()
    assert Journal(path, SETTINGS).policy("paper, no timesteps", 1.5) is None


def test_a_new_journal_knows_nothing_of_an_old_ones_policies(tmp_path: Path) -> None:
    path = tmp_path / "bench.journal.jsonl"
    Journal(path, SETTINGS).keep_policy("paper", 2.0, golden_paper_policy(1))
    path.unlink()
    assert Journal(path, SETTINGS).policy("paper", 2.0) is None


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, {})
    journal.keep_policy("paper", 2.0, golden_paper_policy(1))
    assert journal.policy("paper", 2.0) is not None
    assert journal.flops("theirs", 0.1, lambda: 30) == 30
    assert not list(tmp_path.iterdir())
