"""The identifiers of the methods, as the command line takes them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ertacache.bench.methods import IDENTIFIERS, METHODS, identifier, parse_methods

RESULTS = Path(__file__).parents[2] / "results"


def test_identifiers_are_short_and_different() -> None:
    assert list(IDENTIFIERS.values()) == list(METHODS)
    for name in IDENTIFIERS:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name)
        assert parse_methods(name) == [IDENTIFIERS[name]]


def test_methods_whose_names_contain_commas() -> None:
    found = parse_methods("paper-no-timesteps,paper-policy-only")
    assert found == ["paper, no timesteps", "paper, policy only"]


def test_upper_case_and_names_are_taken_each_once() -> None:
    names = [name for name in METHODS if "," not in name]
    assert parse_methods(",".join(names)) == names
    assert parse_methods("TEACACHE, t-gate ,TeaCache") == ["TeaCache", "T-GATE"]


@pytest.mark.parametrize(
    ("text", "wrong", "nearest"),
    [
        ("paper, no timesteps", "no timesteps", "paper-no-timesteps"),
        ("trajectory,tea-cache", "tea-cache", "teacache"),
    ],
)
def test_an_unknown_method_is_answered_with_the_nearest_and_all(
    text: str, wrong: str, nearest: str
) -> None:
    sentence = f"no such method: {wrong!r}; the nearest is {nearest}, and there are trajectory, "
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_methods(text)


@pytest.mark.parametrize("text", ["", "trajectory,", "trajectory,,paper"])
def test_an_empty_method_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"single commas, got '{text}'"):
        parse_methods(text)


def test_results_files_have_the_names() -> None:
    for path in RESULTS.glob("bench-*.json"):
        rows = json.loads(path.read_text())["rows"]
        assert {row["method"] for row in rows} - {"full"} <= set(METHODS)
        assert all(identifier(row["method"]) in {*IDENTIFIERS, "full"} for row in rows)
