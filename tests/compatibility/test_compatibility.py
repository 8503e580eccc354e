"""The compatibility matrix: every pipeline passes every check, and the page lists it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.compatibility.checks import CHECKS, Subject, make_subject
from tests.compatibility.matrix import GREEN, REFUSED, green_facts, refused_facts
from tests.compatibility.rows import Row

# Only the warnings of ertacache matter here.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:the policy was calibrated"),
]
RESULTS = Path(__file__).parent.parent.parent / "results" / "compatibility.json"


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return {row["model"]: row for row in json.loads(RESULTS.read_text())}


@pytest.fixture(scope="module", params=GREEN, ids=lambda row: row.title)
def subject(request: pytest.FixtureRequest) -> Subject:
    """A pipeline of the matrix with its full run, built once for all checks."""
    return make_subject(request.param)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_pipeline(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)


def test_page_lists_the_facts(subject: Subject, recorded: dict[str, Any]) -> None:
    assert recorded[subject.row.title] == green_facts(subject)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.title)
def test_refused_with_the_message_of_the_page(row: Row, recorded: dict[str, Any]) -> None:
    assert recorded[row.title] == refused_facts(row)


def test_results_have_these_rows(recorded: dict[str, Any]) -> None:
    assert list(recorded) == [row.title for row in (*GREEN, *REFUSED)]
    assert len(GREEN) >= 35
