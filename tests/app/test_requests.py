"""What comes from a browser is checked before a model is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from ertacache.app.requests import Limits, check_prompts, describe_failure, find_models


def test_links_that_lead_out_of_the_folder_are_not_offered(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "work"
    for path in (outside, folder / "mine", folder / "empty"):
        path.mkdir(parents=True)
    for path in (outside, folder / "mine"):
        (path / "model_index.json").write_text("{}")
    (folder / "link").symlink_to(outside)
    assert list(find_models(folder)) == ["mine"]
    assert find_models(tmp_path / "absent") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "at least two different prompts"),
        ("a cat\na cat", "at least two different prompts"),
        ("a cat\n" * 40 + "a dog\n" * 40, "80 prompts, more than 64"),
        ("a cat\n" + "b" * 2001, "2001 characters, more than 2000"),
    ],
)
def test_prompts_of_a_calibration(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_prompts(text, Limits())


def test_a_failure_is_one_short_line() -> None:
    assert describe_failure(KeyError()) == "KeyError"
    long = describe_failure(ValueError("\x1b[31m" + "line\n" * 1000))
    assert long.startswith("\\x1b[31mline line")
    assert len(long) < 610
