"""What README and docs show is true: their code runs, their commands exist, their numbers are
those of the files in results/.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

import ertacache
from ertacache.cli import program
from ertacache.integration.attach import find_handle
from ertacache.models import MODELS, load_pipeline
from ertacache.models.opensora import OpenSoraPipeline
from tests.cli.conftest import invoke
from tests.core import samplers
from tests.hubserver import MEMBERS, Hub
from tests.hubserver import hub as hub  # a fixture

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results"
PAGES = ["README.md", "CONTRIBUTING.md", "comfyui/README.md", "examples/README.md"]
PAGES += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]

Names = dict[str, Any]


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), re.S | re.M)


def run_python(page: str) -> Names:
    """Run the code of a page, one block after the other."""
    names: Names = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)
    return names


def check_readme(names: Names) -> None:
    handle = find_handle(names["pipe"])
    assert handle is not None
    steps = handle.stats.last
    assert (steps.computed_steps, steps.reused_steps) == (12, 18)  # 30 steps at 2.5x
    plans = ertacache.Policy.load("policy.safetensors").plans
    assert [len(plan.compute_steps) for plan in plans] == [15, 10]
    ertacache.detach(names["pipe"])


def check_baseline(names: Names) -> None:
    stats = names["handle"].stats
    assert (stats.computed, stats.reused) == (6, 6)  # six steps of two calls each


def check_custom(names: Names) -> None:
    (plan,) = names["policy"].plans
    assert plan.measured is not None
    assert names["handle"].stats.last.reused_steps == 6
    assert names["image"].shape == (1, 3, 8, 8)


def check_changed(names: Names) -> None:
    (plan,) = names["found"].plans
    assert (plan.measured.computed_steps, plan.measured.prompts) == (4, 8)


def check_scale(names: Names) -> None:
    assert names["policy"].profile.num_runs == 2
    assert [path.name for path in Path.cwd().iterdir()] == ["profile.safetensors"]


def check_calibrate(names: Names) -> None:
    assert len(names["policy"].plans[0].compute_steps) == 6
    assert names["policy"].plans[0].measured is not None


# Pages whose code runs as it is, and what must hold after it.
CODE: dict[str, Callable[[Names], None]] = {
    "README.md": check_readme,
    "docs/add-baseline.md": check_baseline,
    "docs/add-scheduler.md": lambda names: _same(names["schedule"].num_steps, 10),
    "docs/calibrate.md": check_calibrate,
    "docs/check.md": check_changed,
    "docs/custom-pipelines.md": check_custom,
    "docs/flows.md": lambda names: _same(len(names["plan"].compute_steps), 10),
    "docs/models.md": lambda names: _same(names["image"].size, (64, 64)),
    "docs/paper.md": lambda names: _same(len(names["compute_steps"]), 10),
    "docs/scale.md": check_scale,
    "docs/serving.md": lambda names: _same(names["handle"].stats.total.computed_steps, 2 + 4 + 8),
    "docs/settings.md": lambda names: _same(names["handle"].stats.last.computed_steps, 6),
    "docs/speedup.md": lambda names: _same(names["handle"].stats.total.computed_steps, 4 + 3 + 5),
    "docs/start.md": lambda names: _same(names["image"].size, (64, 64)),
}
# Pages whose code needs more than a policy file, each with a test of its own.
BY_ITSELF = {"docs/any-code.md", "docs/hub.md", "docs/metrics.md", "docs/opensora.md"}


def _same(found: object, expected: object) -> None:
    assert found == expected


@pytest.fixture(scope="module")
def policy() -> ertacache.Policy:
    call = {"num_inference_steps": 8, "height": 32, "width": 32, "max_sequence_length": 16}
    pipe = load_pipeline("emoji-flux")
    known = ertacache.profile(pipe, ["a cat", "a dog"], batch_size=2, **call)
    return ertacache.solve(known, speedup=2)


@pytest.fixture
def policy_file(tmp_path: Path, policy: ertacache.Policy, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A policy of the bundled model, as the pages name it, in the present folder."""
    monkeypatch.chdir(tmp_path)
    policy.save("policy.safetensors")
    return tmp_path / "policy.safetensors"


@pytest.mark.parametrize("page", CODE)
def test_the_code_of_a_page_runs(page: str, policy_file: Path) -> None:
    code = "".join(blocks(page, "python"))
    if "policy.safetensors" not in code or ".save(" in code:  # needs none, or makes its own
        policy_file.unlink()
    CODE[page](run_python(page))


def test_no_page_with_code_is_left_out() -> None:
    assert {page for page in PAGES if blocks(page, "python")} == {*CODE, *BY_ITSELF}
    marked = {mark for page in PAGES for mark in re.findall(r"^```(\w+)", text_of(page), re.M)}
    assert marked == {"bash", "python", "text"}


def test_the_code_of_any_code_base_runs() -> None:
    """The first block is the example; the sampler of the last is one of ours."""
    first, second, third = blocks("docs/any-code.md", "python")
    assert text_of("examples/own_loop.py").endswith('"""\n\n' + first)
    names: Names = {}
    exec(compile(first, "examples/own_loop.py", "exec"), names)
    assert names["OFF"]["ours"] < 0.7 * names["OFF"]["fewer"]
    exec(compile(second, "docs/any-code.md", "exec"), names)
    (plan,) = names["calibrated"].plans
    assert plan.measured is not None
    denoise, sigmas = names["denoise"], names["SIGMAS"]
    names |= {
        "sample_dpmpp_2m": samplers.dpmpp_2m,
        "model": lambda x, sigma: x - sigma[0] * denoise(x, sigma[0]),
        "x": names["noise"](9),
        "sigmas": sigmas,
    }
    exec(compile(third, "docs/any-code.md", "exec"), names)
    assert names["fast_sampler"].computed == 10
    assert names["latents"].shape == names["full"].shape


def test_the_code_of_the_hub_page_runs(
    policy_file: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEMBERS, "ada", ["ada", "user"])
    names = run_python("docs/hub.md")
    assert names["place"] == f"hub:user/repo@{hub.repos['user/repo'].refs['main']}"
    assert names["policy"]._to_bytes() == policy_file.read_bytes()


def test_the_code_of_the_open_sora_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are those of the functions; the weights and the GPU are not there."""
    load, call = (
        inspect.signature(x) for x in (OpenSoraPipeline.from_original, OpenSoraPipeline.__call__)
    )

    def pipe(*args: Any, **arguments: Any) -> Any:
        call.bind(None, *args, **arguments)
        return SimpleNamespace(frames=["video"])

    def from_original(**arguments: Any) -> Any:
        load.bind(**arguments)
        return SimpleNamespace(to=lambda device: pipe)

    monkeypatch.setattr(OpenSoraPipeline, "from_original", from_original)
    assert run_python("docs/opensora.md")["video"] == "video"


def test_examples_are_short() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path.name


COMMANDS = [
    (page, line)
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    if line and not line.startswith("#")
]
OTHERS = ("pip", "curl", "ln", "pytest")  # programs that are not ours


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda text: text[:60])
def test_commands_of_the_pages_exist(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [word for word in shlex.split(line, comments=True) if not re.match(r"[A-Z_]+=", word)]
    if "ertacache" in words:
        parse_command(words[words.index("ertacache") + 1 :])
    elif words[0] == "make":
        assert f"\n{words[1]}:" in text_of("Makefile")
    elif words[0] == "python":
        assert (ROOT / words[1]).is_file()
    elif words[0] == "uvicorn":
        assert (ROOT / "examples" / "serve.py").is_file()
    else:
        assert words[0] in OTHERS
        for extra in re.findall(r"\[([\w,]+)\]", line):
            assert set(extra.split(",")) <= set(
                re.findall(r"^(\w+) = \[", text_of("pyproject.toml"), re.M)
            )


def parse_command(arguments: list[str]) -> None:
    """Parse a command line as the program does, without running it; its files are there."""
    for word in arguments:
        if re.fullmatch(r"[\w./-]+\.(safetensors|txt|json|png)", word):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).write_text("a cat\n")
    name, *rest = arguments
    group: Any = typer.main.get_command(program)
    with group.commands[name].make_context(name, rest):
        pass


def test_the_commands_of_the_quick_start_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the page, on smaller images, with fewer steps and without the refit."""
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "4", "--height", "32", "--width", "32"]
    smaller = {
        "calibrate": [*small, "--limit", "4", "--no-refit"],
        "generate": small,
        "inspect": [],
    }
    ran = []
    for line in (line for page, line in COMMANDS if page == "docs/start.md"):
        program_name, name, *rest = shlex.split(line, comments=True)
        if program_name == "ertacache":
            done = invoke(name, *rest, *smaller[name])
            assert done.exit_code in (0, 3), done.output  # 3: so few steps are not recommended
            ran.append(name)
    assert ran == ["generate", "calibrate", "generate", "inspect"]
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"strawberry.png", "policy.safetensors", "out"}


def test_the_table_of_flows_is_the_results_file() -> None:
    cases = json.loads((RESULTS / "flows.json").read_text())["cases"]
    text = text_of("docs/flows.md")
    for case in cases:
        title = f"radius {case['radius']:g}, width {case['width']:g}, T = {case['num_steps']}"
        assert title in text
    for rows in zip(*(case["rows"] for case in cases), strict=True):
        numbers = " | ".join(f"{row['rmse']:.4f}" for row in rows)
        assert f"| {rows[0]['method']} | {numbers} |" in text


def test_the_tables_of_models_are_the_results_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = import_module("tables")
    assert {"front", "overview", "summary", "fidelity", "bench-emoji-wan", "scale"} <= set(
        tables.PAGES
    )
    for name, place in tables.PAGES.items():
        page = text_of(place)
        filled = tables.fill(name, page, tables.rows_of(name))
        assert page == filled, f"{place}: run python benchmarks/tables.py"


def test_the_stated_time_is_the_measured_one() -> None:
    rows = json.loads((RESULTS / "frontier.json").read_text())["rows"]
    seconds = round(rows[0]["seconds"])
    assert f"all 49 budgets, solves in about {seconds} s" in text_of("docs/method.md")
    assert all(0.5 < row["seconds"] / rows[0]["seconds"] < 2 for row in rows)


def test_the_stated_time_of_a_new_schedule_is_the_measured_one() -> None:
    rows = json.loads((RESULTS / "solving.json").read_text())
    slowest = math.ceil(max(row["first_ms"] for row in rows) / 100) / 10
    assert {row["steps"] for row in rows} == {50}
    assert f"in at most {slowest:g} s for 50 steps on one core" in text_of("docs/settings.md")
    assert all(row["second_ms"] < 1 for row in rows)


def test_the_stated_cost_of_a_reused_step_is_the_measured_one() -> None:
    rows = json.loads((RESULTS / "overhead.json").read_text())
    assert {row["model"] for row in rows} == set(MODELS)
    share = max(row["reused_step_percent"] for row in rows)
    assert f"costs at most {share:.2f} % of a computed one" in text_of("docs/speedup.md")


def test_the_stated_number_of_pipelines_is_the_measured_one() -> None:
    rows = json.loads((RESULTS / "compatibility.json").read_text())
    green = {row["pipeline"] for row in rows if "refused" not in row}
    assert f"**diffusers**: {len(green)} pipelines" in text_of("README.md")


def test_the_readme_fits_one_screen() -> None:
    """Eight lines of Python, one table, and nothing that belongs to the pages."""
    (code,) = blocks("README.md", "python")
    assert len([line for line in code.splitlines() if line]) == 8
    assert len(text_of("README.md").splitlines()) <= 100


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files(page: str) -> None:
    """As on the pages of the repository; those of the site are tested with it."""
    text = re.sub(r"^(`{3,}).*?^\1", "", text_of(page), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), target


def test_every_page_is_in_the_navigation() -> None:
    navigation = text_of("mkdocs.yml")
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    assert all(f": {page}" in navigation for page in pages)


def test_every_answer_names_tests_that_exist() -> None:
    pages = [text_of(f"docs/{name}.md") for name in ("faq", "faq-tools", "faq-errors")]
    questions = [q for page in pages for q in re.findall(r"^## .*?(?=\n##|\Z)", page, re.S | re.M)]
    assert len(questions) >= 30
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
