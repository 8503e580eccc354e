"""The notebook of the examples runs from top to bottom and shows images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

SOURCE = Path(__file__).parent.parent.parent / "examples" / "tour.ipynb"


def outputs(book: Any) -> list[str]:
    """The kinds of data that the cells show, and their printed text."""
    found = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    return [kind for out in found for kind in out.get("data") or [out["text"]]]


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    book = nbformat.read(SOURCE, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=300, kernel_name="python3", resources=resources).execute()
    shown = outputs(book)
    assert shown.count("image/png") == 2
    assert any("5 of 10 steps computed" in text for text in shown)
    assert any("network evaluations (NFE)" in text for text in shown)


def test_the_notebook_is_stored_without_outputs() -> None:
    assert outputs(nbformat.read(SOURCE, as_version=4)) == []
