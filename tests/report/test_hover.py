"""The plot inside the page: every point has its numbers, every part of a line its method."""

from __future__ import annotations

from xml.etree import ElementTree

from ertacache.figures import PALETTE
from ertacache.report.hover import SVG, describe, interactive_pareto
from ertacache.report.plots import lines_of
from tests.report.test_plots import ROWS


def parse(name: str = "m") -> ElementTree.Element:
    return ElementTree.fromstring(interactive_pareto(ROWS, name=name))


def test_every_point_has_the_numbers_of_its_row() -> None:
    svg = parse()
    for line in lines_of(ROWS):
        (group,) = svg.findall(f".//{{{SVG}}}g[@class='line'][@data-method='{line.method}']")
        found = [title.text for title in group.iter(f"{{{SVG}}}title")]
        assert found == [describe(row) for row in line.rows]


def test_names_and_leaders_belong_to_methods() -> None:
    svg = parse()
    for kind in ("label", "leader", "bars"):
        groups = svg.findall(f".//{{{SVG}}}g[@class='{kind}']")
        assert groups
        assert all(group.get("data-method") for group in groups)


def test_colours_are_variables_and_identifiers_are_of_one_plot() -> None:
    text = interactive_pareto(ROWS, name="m")
    assert not any(color in text for color, _ in PALETTE.values())
    assert "var(--series-0)" in text
    one, other = (
        {part.get("id") for part in parse(name).iter() if part.get("id")} for name in ("m", "n")
    )
    assert one
    assert not one & other


def test_a_model_is_escaped() -> None:
    assert "<m>" not in interactive_pareto(ROWS, name="<m>")
    assert "&lt;m&gt;" in interactive_pareto(ROWS, name="<m>")
