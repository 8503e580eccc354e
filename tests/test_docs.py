"""What README and docs show is true: their code runs, their numbers stand in results/."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import ertacache
from ertacache.models import MODELS, load_pipeline
from tests.core import samplers
from tests.hubserver import MEMBERS, Hub
from tests.hubserver import hub as hub  # a fixture

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


def test_the_code_of_any_code_base_runs() -> None:
    """The first block is the example; the sampler of the last is one of ours."""
    blocks = re.findall(r"```python\n(.*?)```", text_of("docs/any-code.md"), re.S)
    example = text_of("examples/own_loop.py")
    assert example.endswith('"""\n\n' + blocks[0])
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "examples/own_loop.py", "exec"), names)
    assert names["OFF"]["ours"] < 0.7 * names["OFF"]["fewer"]
    exec(compile(blocks[1], "docs/any-code.md", "exec"), names)
    (plan,) = names["calibrated"].plans
    assert plan.measured is not None
    denoise, sigmas = names["denoise"], names["SIGMAS"]
    names |= {
        "sample_dpmpp_2m": samplers.dpmpp_2m,
        "model": lambda x, sigma: x - sigma[0] * denoise(x, sigma[0]),
        "x": names["noise"](9),
        "sigmas": sigmas,
    }
    exec(compile(blocks[2], "docs/any-code.md", "exec"), names)
    assert names["fast_sampler"].computed == 10
    assert names["latents"].shape == names["full"].shape


def test_the_code_of_custom_pipelines_runs() -> None:
    names = run_python("docs/custom-pipelines.md")
    (plan,) = names["policy"].plans
    assert plan.measured is not None
    assert names["handle"].stats.last.reused_steps == 6
    assert names["image"].shape == (1, 3, 8, 8)


def test_examples_are_short() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path.name


@pytest.fixture
def policy_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy of the bundled model, as the pages name it, in the present folder."""
    monkeypatch.chdir(tmp_path)
    call = {"num_inference_steps": 8, "height": 32, "width": 32, "max_sequence_length": 16}
    known = ertacache.profile(load_pipeline("emoji-flux"), ["a cat", "a dog"], batch_size=2, **call)
    ertacache.solve(known, speedup=2).save("policy.safetensors")
    return tmp_path / "policy.safetensors"


def test_the_code_of_the_serving_page_runs(policy_file: Path) -> None:
    names = run_python("docs/serving.md")
    assert names["handle"].stats.total.computed_steps == 2 + 4 + 8


def test_the_code_of_the_page_on_changed_models_runs(policy_file: Path) -> None:
    (plan,) = run_python("docs/check.md")["found"].plans
    assert (plan.measured.computed_steps, plan.measured.prompts) == (4, 8)


def test_the_code_of_the_hub_page_runs(
    policy_file: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEMBERS, "ada", ["ada", "user"])
    names = run_python("docs/hub.md")
    assert names["place"] == f"hub:user/repo@{hub.repos['user/repo'].refs['main']}"
    assert names["policy"]._to_bytes() == policy_file.read_bytes()


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
