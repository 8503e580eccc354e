"""The journal: nothing measured is lost, nothing of other settings is mixed in."""

from __future__ import annotations

from pathlib import Path

import pytest

from ertacache.bench.journal import Cost, Journal, Record
from tests.formats.faults import full_disk
from tests.formats.golden.objects import golden_paper_policy

SETTINGS = {"model": "m", "budgets": [2.0]}
RECORD = Record("ours", 2.0, 0, 0.5, {"psnr": [40.0, 41.0]})


def test_an_interrupted_journal_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    Journal(path, SETTINGS).add(RECORD)
    with path.open("a") as file:
        file.write('{"method": "ours", "budget": 2.0, "bat')  # cut off in the middle of a line
    again = Journal(path, SETTINGS)
    assert again.records("ours", 2.0) == [RECORD]
    assert again.has("ours", 2.0, 0)
    assert not again.has("ours", 2.0, 1)
    assert not again.has("ours", 3.0, 0)
    again.add(Record("ours", 2.0, 1, 0.4, {"psnr": [39.0]}))
    assert [record.batch for record in Journal(path, SETTINGS).records("ours", 2.0)] == [0, 1]


def test_a_journal_of_other_settings_is_refused_and_unchanged(tmp_path: Path) -> None:
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


def test_costs_and_trials_are_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    for first in (True, False):
        journal = Journal(path, SETTINGS)
        measured: list[str] = []

        def flops(measured: list[str] = measured) -> int:
            measured.append("flops")
            return 30

        def cost(measured: list[str] = measured) -> tuple[int, int]:
            measured.append("cost")
            return 50, 7

        assert journal.flops("theirs", 0.1, flops) == 30
        assert journal.cost("theirs", 2.0, cost) == Cost("theirs", 2.0, 50, 7)
        assert measured == (["flops", "cost"] if first else [])
    assert not journal.has("theirs", 2.0, 0)


def test_policies_are_saved_beside_the_journal(tmp_path: Path) -> None:
    path = tmp_path / "bench.journal.jsonl"
    journal = Journal(path, SETTINGS)
    assert journal.policy("paper, no timesteps", 1.5) is None
    policy = golden_paper_policy(1)
    journal.add_policy("paper, no timesteps", 1.5, policy)
    again = Journal(path, SETTINGS).policy("paper, no timesteps", 1.5)
    assert again is not None
    assert again.default.compute_steps == policy.default.compute_steps
    (tmp_path / "bench.policies" / "paper-no-timesteps-1.5x.safetensors").unlink()
    assert Journal(path, SETTINGS).policy("paper, no timesteps", 1.5) is None


def test_a_new_journal_ignores_the_policies_of_an_old_one(tmp_path: Path) -> None:
    path = tmp_path / "bench.journal.jsonl"
    Journal(path, SETTINGS).add_policy("paper", 2.0, golden_paper_policy(1))
    path.unlink()
    assert Journal(path, SETTINGS).policy("paper", 2.0) is None


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    journal = Journal(None, {})
    journal.add_policy("paper", 2.0, golden_paper_policy(1))
    assert journal.policy("paper", 2.0) is not None
    assert journal.flops("theirs", 0.1, lambda: 30) == 30
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with full_disk(), pytest.raises(OSError, match=r"journal.jsonl"):
        Journal(path, SETTINGS | {"command": "x" * 200})
    assert list(tmp_path.iterdir()) == []
    journal = Journal(path, SETTINGS)
    before = path.read_bytes()
    with full_disk(), pytest.raises(OSError, match=r"journal.jsonl"):
        journal.add(RECORD)
    assert path.read_bytes() == before
    path.write_bytes(before + b'{"kind": "rec')
    with full_disk(20), pytest.raises(OSError, match=r"journal.jsonl"):
        Journal(path, SETTINGS)  # the whole lines are written again without the cut one
    assert path.read_bytes() == before + b'{"kind": "rec'
    Journal(path, SETTINGS)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"a note\n", b"\xff\n", b"[]\n[]\n", b'{"model": "m"}\n{"kind": 1}\n']
)
def test_a_file_that_is_no_journal_is_refused_and_unchanged(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="other settings or versions"):
        Journal(path, SETTINGS)
    assert path.read_bytes() == content


def test_a_line_that_is_cut_off_after_a_bracket(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, SETTINGS).add(RECORD)
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])  # the line ends with the bracket of its scores
    journal = Journal(path, SETTINGS)
    assert not journal.has("ours", 2.0, 0)
    journal.add(RECORD)
    assert path.read_bytes() == whole
