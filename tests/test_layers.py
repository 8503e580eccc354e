"""Rules of the code base that a test can check: import order, sizes, what an import may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ertacache

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "ertacache"
MODULES = sorted(SOURCE.rglob("*.py"))

# Layer by layer: the parts of the package, and the other packages that they may import.
LAYERS: list[tuple[set[str], set[str]]] = [
    ({"core"}, {"torch", "numpy"}),
    ({"formats"}, {"torch", "safetensors", "filelock"}),
    ({"figures"}, {"matplotlib"}),
    ({"hub"}, {"huggingface_hub"}),
    ({"metrics"}, {"torch", "PIL", "imageio", "transformers"}),
    ({"models", "integration"}, {"torch", "safetensors", "diffusers", "transformers"}),
    ({"distributed"}, {"torch", "accelerate"}),
    ({"calibration"}, {"torch"}),
    ({"baselines"}, {"torch", "numpy", "diffusers", "cache_dit"}),
    ({"bench"}, {"torch", "diffusers", "safetensors"}),
    ({"report"}, {"torch", "PIL", "matplotlib"}),
    ({"app"}, {"torch", "PIL", "matplotlib", "gradio", "starlette"}),
    (
        {"cli", "__main__"},
        {"torch", "typer", "rich", "PIL", "imageio", "diffusers", "transformers"},
    ),
]


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Every imported module, lazy imports inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            assert node.module is not None
            yield node.module


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_imports_a_later_layer(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    layers = [index for index, (parts, _) in enumerate(LAYERS) if part in parts]
    assert len(layers) == 1, f"{part} is in no layer: add it to the table"
    allowed = set().union(*(parts for parts, _ in LAYERS[: layers[0] + 1]))
    for name in imports(path):
        package, *rest = name.split(".")
        if package == "ertacache":
            assert not rest or rest[0] in allowed, f"{path} imports {name}"
        else:
            known = package in sys.stdlib_module_names or package in LAYERS[layers[0]][1]
            assert known, f"{path} imports {name}"


def test_only_methods_of_a_policy_find_later_layers_by_name() -> None:
    """So that ``policy.check(pipe)`` can be written; nothing else may go round the order."""
    found = {
        str(path.relative_to(SOURCE))
        for path in MODULES
        if re.search(r"import_module\(f?\"ertacache", path.read_text())
    }
    assert found == {"formats/policy.py"}
    named = re.findall(r"_later\(\"([\w.]+)\"", (SOURCE / "formats" / "policy.py").read_text())
    assert sorted(named) == ["calibration.check", "hub", "hub"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name}"


def test_few_public_names_and_each_is_there() -> None:
    names = ertacache.__all__
    assert len(names) <= 12
    assert all(getattr(ertacache, name) is not None for name in names)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        _ = ertacache.absent


def run_python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_core_loads_no_pipeline_library() -> None:
    modules = [f"ertacache.core.{path.stem}" for path in (SOURCE / "core").glob("[a-z]*.py")]
    code = f"import sys, {', '.join(modules)}; print(*sorted(sys.modules))"
    loaded = set(run_python(code).split())
    assert "torch" in loaded
    assert not loaded & {"diffusers", "transformers", "safetensors", "accelerate"}


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys; before = set(sys.modules); import ertacache; print(*sys.modules)"
    loaded = set(run_python(code).split())
    assert not loaded & {"torch", "numpy", "diffusers", "transformers", "safetensors"}


def test_the_tree_in_contributing_is_the_tree() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    block = re.search(r"```text\nsrc/ertacache/\n(.*?)```", page, re.S)
    assert block is not None
    listed = {line.split()[0].rstrip("/") for line in block[1].splitlines() if line.strip()}
    found = {entry.name for entry in SOURCE.iterdir()} - {"__pycache__", "py.typed"}
    for layer in ("core", "integration", "calibration"):
        found |= {path.name for path in (SOURCE / layer).glob("[a-z]*.py")}
    assert listed == found
