"""The Pareto plot: every method that applies has a line and a name, the strongest stand out."""

from __future__ import annotations

from itertools import pairwise

from ertacache.bench.methods import METHODS
from ertacache.bench.results import BenchRow, Interval
from ertacache.figures import BACKGROUND, REFERENCE, SERIES
from ertacache.report.plots import MARKERS, draw_pareto, highlights, lines_of, pareto


def row(method: str, budget: float, psnr: float, *, cost: float | None = None) -> BenchRow:
    ratio = 1 / budget if cost is None else cost
    close = Interval(psnr, psnr - 1, psnr + 1)
    return BenchRow("m", method, budget, 30, flops_ratio=ratio, psnr=close)


ROWS = [
    row("full", 1.0, 100.0),
    *(row("trajectory", budget, 70 - 5 * budget) for budget in (2.0, 3.0)),
    *(row("our schedule, order 1", budget, 69 - 5 * budget) for budget in (2.0, 3.0)),
    *(row("TeaCache", budget, 50 - 5 * budget) for budget in (3.0, 2.0)),
    *(row("uniform", budget, 48 - 5 * budget) for budget in (2.0, 3.0)),
    *(row("MagCache", budget, 46 - 5 * budget) for budget in (2.0, 3.0)),
    *(row("paper", budget, 44 - 5 * budget) for budget in (2.0, 3.0)),
    *(row("fewer steps", budget, 42 - 5 * budget) for budget in (2.0, 3.0)),
    *(row("paper, policy only", budget, 60.0) for budget in (2.0, 3.0)),  # a part
    *(row("PAB", budget, 65.0, cost=0.9) for budget in (2.0, 3.0)),  # reaches no budget
    BenchRow("m", "T-GATE", 2.0, 30, why_not="no"),
]


def test_the_strongest_stand_out() -> None:
    assert highlights(ROWS) == ["trajectory", "TeaCache", "uniform", "MagCache", "fewer steps"]
    assert highlights([row("uniform", 2.0, 40.0)]) == ["uniform"]
    assert highlights([]) == []


def test_lines_have_the_style_of_their_rank_and_the_marker_of_their_family() -> None:
    lines = {line.method: line for line in lines_of(ROWS)}
    assert lines.keys() == {r.method for r in ROWS} - {"full", "T-GATE"}
    assert lines["trajectory"].series == SERIES[0]
    assert lines["TeaCache"].series.color == SERIES[1].color
    assert lines["fewer steps"].series.color == REFERENCE.color
    assert lines["PAB"].series.color == BACKGROUND.color
    assert not lines["PAB"].highlighted
    assert lines["uniform"].series.marker == "s"
    assert lines["PAB"].series.marker == lines["TeaCache"].series.marker == "D"
    assert [x for x, _ in lines["TeaCache"].points()] == [2.0, 3.0]


def test_ours_keeps_its_colour_for_itself() -> None:
    (line,) = lines_of([row("uniform", 2.0, 40.0)])
    assert line.series.color == SERIES[1].color


def test_every_method_has_a_marker() -> None:
    lines = lines_of([row(method, 2.0, 40.0) for method in METHODS])
    assert {line.series.marker for line in lines} == set(MARKERS.values())
    (line,) = lines_of([row("of a later version", 2.0, 40.0)])
    assert line.series.marker not in MARKERS.values()


def test_every_line_has_its_name_and_nothing_else_has() -> None:
    plot = pareto(ROWS)
    assert plot.startswith("<svg")
    for line in lines_of(ROWS):
        assert f">{line.method}</text>" in plot
    assert "T-GATE" not in plot
    assert ">full<" not in plot
    assert "looks the same" in plot  # 40 dB is inside


def test_names_do_not_overlap() -> None:
    rows = [row(method, 3.0, 40 + k / 10) for k, method in enumerate(METHODS)]
    (axis,) = draw_pareto([row("fewer steps", 2.0, 60.0), *rows]).axes
    names = [text for text in axis.texts if text.get_text() in METHODS]
    heights = sorted(text.xyann[1] for text in names)
    points = axis.get_figure().get_figheight() * axis.get_position().height * 72
    assert min(b - a for a, b in pairwise(heights)) * points > 8


def test_nothing_to_draw() -> None:
    assert pareto([]).startswith("<svg")
