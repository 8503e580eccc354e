"""What README and docs show is true: their code runs, their numbers stand in results/."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/method.md"]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


@pytest.mark.parametrize("page", PAGES)
def test_the_code_runs(page: str) -> None:
    (block,) = python_blocks(page)
    names: dict[str, object] = {}
    exec(compile(block, page, "exec"), names)
    assert names["fast"].latents[-1].shape == (5, 2)  # type: ignore[attr-defined]
    assert len(names["plan"].compute_steps) == 10  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES)
def test_the_table_is_the_results_file(page: str) -> None:
    cases = json.loads((ROOT / "results" / "flows.json").read_text())["cases"]
    text = (ROOT / page).read_text()
    for case in cases:
        assert (
            f"radius {case['radius']:g}, width {case['width']:g}, T = {case['num_steps']}" in text
        )
    for rows in zip(*(case["rows"] for case in cases), strict=True):
        numbers = " | ".join(f"{row['rmse']:.4f}" for row in rows)
        assert f"| {rows[0]['method']} | {numbers} |" in text


def test_the_stated_time_is_the_measured_one() -> None:
    rows = json.loads((ROOT / "results" / "frontier.json").read_text())["rows"]
    seconds = round(rows[0]["seconds"])
    assert f"all 49 budgets, solves in about {seconds} s" in (ROOT / "README.md").read_text()
    assert all(0.5 < row["seconds"] / rows[0]["seconds"] < 2 for row in rows)


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert all(f": {page}" in navigation for page in pages)
