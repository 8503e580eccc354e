"""What the site makes of files that are not pages: formulas, links, commands."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "docs" / "theme" / "hooks.py"


@pytest.fixture(scope="module")
def hooks() -> Any:
    spec = importlib.util.spec_from_file_location("hooks", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_formula_is_mathml(hooks: Any) -> None:
    made = hooks.on_page_content('<p><span class="arithmatex">\\(x_0 &lt; 1\\)</span></p>')
    assert made.startswith("<p><math")
    assert "<msub><mi>x</mi><mn>0</mn></msub>" in made
    block = hooks.on_page_content('<div class="arithmatex">\\[x\\]</div>')
    assert block.startswith('<div class="formula" tabindex="0"><math')


def test_a_formula_that_is_not_understood_is_an_error(hooks: Any) -> None:
    with pytest.raises(ValueError, match="no MathML"):
        hooks.mathml(r"\nosuchthing", block=False)


def test_links_lead_to_pages(hooks: Any) -> None:
    links = hooks.site_links
    text = "[a](../docs/start.md#x), [b](images/b.png), [c](x.py), [d](#e), [f](https://g)"
    here = "[a](start.md#x), [b](examples/images/b.png), `c`, [d](#e), [f](https://g)"
    assert links(text, "examples") == here
    assert (
        hooks.on_page_markdown("[a](../comfyui/README.md) [b](c.md)") == "[a](comfyui.md) [b](c.md)"
    )
    assert hooks.on_page_markdown("[all](../src/ertacache/cli)") == "[all](commands.md)"


def test_a_command_has_its_options_and_examples(hooks: Any) -> None:
    page = hooks.command_page()
    section = page.split("## inspect")[1].split("\n## ")[0]
    assert "```bash\nertacache inspect policy.safetensors" in section
    assert "| `-q, --quiet` | Print results" in section
