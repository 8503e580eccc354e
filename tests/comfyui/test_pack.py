"""The pack as files: sizes, licence, registry entry, workflows, pictures."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACK = ROOT / "comfyui"
MODULES = sorted(PACK.glob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_files_and_functions_are_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= 500
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name}"


def test_the_licence_is_that_of_the_repository() -> None:
    assert (PACK / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_the_registry_entry() -> None:
    text = (PACK / "pyproject.toml").read_text()
    assert "[tool.comfy]" in text
    for key in ("PublisherId", "DisplayName", "Icon"):
        assert re.search(rf"^{key} = ", text, re.M)
    assert (PACK / "requirements.txt").read_text().split() == ["ertacache"]


def test_workflows_use_nodes_that_exist() -> None:
    ours = set(re.findall(r"^class (ERTACache\w+)", (PACK / "nodes.py").read_text(), re.M))
    used = set()
    for path in sorted((PACK / "example_workflows").glob("*.json")):
        types = {node["type"] for node in json.loads(path.read_text())["nodes"]}
        used |= {name for name in types if name.startswith("ERTACache")}
    assert used == ours


def test_every_picture_of_the_readme_exists() -> None:
    shown = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (PACK / "README.md").read_text())
    assert shown
    assert all((PACK / path).is_file() for path in shown)
