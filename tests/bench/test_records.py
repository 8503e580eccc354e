"""The journal: nothing measured is lost, nothing of other settings is mixed in."""

from __future__ import annotations

from pathlib import Path

import pytest

from ertacache.bench.records import Journal, Record

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
