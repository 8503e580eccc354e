"""What README and docs show is true: their code runs, their numbers stand in results/."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from ertacache.models import MODELS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
FLOW_PAGES = ["README.md", "docs/method.md"]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def run_python(page: str) -> dict[str, Any]:
    (block,) = re.findall(r"```python\n(.*?)```", text_of(page), re.S)
    names: dict[str, Any] = {}
    exec(compile(block, page, "exec"), names)
    return names


def test_the_code_of_the_method_runs() -> None:
    names = run_python("docs/method.md")
    assert names["fast"][-1].shape == (5, 2)
    assert len(names["plan"].compute_steps) == 10


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_python("README.md")
    assert [len(plan.compute_steps) for plan in names["policy"].plans] == [15, 10]
    assert "9 steps computed, 15 reused" in names["report"]  # 24 steps at 2.5x
    assert (tmp_path / "policy.safetensors").exists()


def test_the_code_of_many_processes_runs_in_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_python("docs/scale.md")["policy"].profile.num_runs == 2
    assert [path.name for path in tmp_path.iterdir()] == ["profile.safetensors"]


@pytest.mark.parametrize("page", FLOW_PAGES)
def test_the_table_of_flows_is_the_results_file(page: str) -> None:
    cases = json.loads((RESULTS / "flows.json").read_text())["cases"]
    text = text_of(page)
    for case in cases:
        title = f"radius {case['radius']:g}, width {case['width']:g}, T = {case['num_steps']}"
        assert title in text
    for rows in zip(*(case["rows"] for case in cases), strict=True):
        numbers = " | ".join(f"{row['rmse']:.4f}" for row in rows)
        assert f"| {rows[0]['method']} | {numbers} |" in text


def test_the_tables_of_models_are_the_results_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = import_module("tables")
    assert {"overview", "summary", "fidelity", "transfer", "bench", "scale"} <= set(tables.PAGES)
    for name, place in tables.PAGES.items():
        page = text_of(place)
        filled = tables.fill(name, page, tables.rows_of(name))
        assert page == filled, f"{place}: run python benchmarks/tables.py"


def test_the_stated_time_is_the_measured_one() -> None:
    rows = json.loads((RESULTS / "frontier.json").read_text())["rows"]
    seconds = round(rows[0]["seconds"])
    assert f"all 49 budgets, solves in about {seconds} s" in text_of("README.md")
    assert all(0.5 < row["seconds"] / rows[0]["seconds"] < 2 for row in rows)


def test_the_stated_cost_of_a_reused_step_is_the_measured_one() -> None:
    rows = json.loads((RESULTS / "overhead.json").read_text())
    assert {row["model"] for row in rows} == set(MODELS)
    share = max(row["reused_step_percent"] for row in rows)
    assert f"a reused step costs at most {share:.2f} % of a computed one" in text_of("README.md")


def test_every_page_is_in_the_navigation() -> None:
    navigation = text_of("mkdocs.yml")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert all(f": {page}" in navigation for page in pages)


def test_every_answer_names_tests_that_exist() -> None:
    page = text_of("docs/faq.md")
    questions = re.findall(r"^\*\*.*?(?=\n\n|\Z)", page, re.S | re.M)
    assert len(questions) >= 15
    for question in questions:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", question)
        assert named, f"no test holds: {question}"
        for path, name in named:
            assert f"\ndef {name}(" in text_of(path), f"{path} has no {name}"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_figures_of_the_models_are_the_results_file(name: str) -> None:
    row = json.loads((RESULTS / "models.json").read_text())[name]
    section = text_of("docs/models.md").split(f"## `{name}`")[1].split("\n## ")[0]
    place = "position" if row["motion_accuracy"] is None else "motion"
    for attribute in ("subject", "background", place, "size"):
        figure = f"{row[f'{attribute}_accuracy']:.1%}".replace("%", " %")
        assert f"| {attribute} is the one named | {figure} |" in section
    assert f"| {row['transformer_share']:.1%} |".replace("%", " %") in section
    assert f"| weights | {row['weights_bytes'] / 1e6:.1f} MB |" in section
    assert row["prompts"] == 200
    assert row["subject_accuracy"] >= 0.9
    assert row[f"{place}_accuracy"] >= 0.9
    assert row["transformer_share"] >= 0.9
