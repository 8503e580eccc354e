"""The Pareto plot as an SVG element of the page, where every point has its numbers on hover.

What belongs to a method is marked with ``data-method``, so that the page's script can make it stand
out. Without the script the browser shows the titles of the points.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from ertacache.bench.results import BenchRow
from ertacache.figures import with_variables
from ertacache.report.plots import Line, lines_of, pareto, speedup_of

__all__ = ["describe", "interactive_pareto"]

SVG, LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
REACH = 8  # radius around a point where it can be hit, in points


def interactive_pareto(rows: Sequence[BenchRow], *, name: str) -> str:
    """The plot of `pareto` as an SVG element of the page; ``name`` is that of the model."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK)
    svg = ElementTree.fromstring(with_variables(pareto(rows, name=name)))
    for part in svg.findall(f"{{{SVG}}}metadata"):
        svg.remove(part)
    lines = lines_of(rows)
    for group in list(svg.iter(f"{{{SVG}}}g")):
        found = re.fullmatch(r"(line|bars|label|leader)-(\d+)", group.get("id", ""))
        if found:
            _mark(group, found[1], lines[int(found[2])])
        group.attrib.pop("id", None)  # there may be several plots on a page
    for size in ("width", "height"):
        svg.attrib.pop(size)
    text = f"PSNR against speed-up of every method on {name}; the tables have the numbers"
    svg.attrib |= {"role": "img", "aria-label": text, "class": "pareto"}
    return ElementTree.tostring(svg, encoding="unicode")


def _mark(group: ElementTree.Element, kind: str, line: Line) -> None:
    """Give the elements of a method its name, and its points their numbers."""
    group.attrib |= {"data-method": line.method, "class": kind}
    if kind != "line":
        return
    (points,) = (part for part in group.iter(f"{{{SVG}}}g") if part.get("clip-path"))
    for drawn, row in zip(list(points), line.rows, strict=True):
        points.remove(drawn)
        point = ElementTree.SubElement(points, f"{{{SVG}}}g", {"class": "point"})
        ElementTree.SubElement(point, f"{{{SVG}}}title").text = describe(row)
        place = {"cx": drawn.get("x", ""), "cy": drawn.get("y", "")}
        ElementTree.SubElement(
            point, f"{{{SVG}}}circle", {**place, "r": str(REACH), "fill": "transparent"}
        )
        point.append(drawn)


def describe(row: BenchRow) -> str:
    """The numbers of a point, a line each.

    Example:
        >>> from ertacache.bench.results import Interval
        >>> psnr = Interval(64.1, 62.9, 65.2)
        >>> row = BenchRow("m", "trajectory", 2.0, 30, setting="15 steps", flops_ratio=0.5,
        ...                psnr=psnr, psnr_tenth=58.0)
        >>> print(describe(row))
        trajectory, 15 steps
        FLOPs: 2.00x fewer
        PSNR 64.1 dB (62.9 to 65.2)
        nine of ten prompts above 58.0 dB
    """
    parts = [", ".join(filter(None, (row.method, row.setting)))]
    parts.append(f"FLOPs: {speedup_of(row):.2f}x fewer")
    if row.speedup is not None:
        parts.append(f"time: {row.speedup.value:.2f}x less")
    if row.psnr is not None:
        parts.append(f"PSNR {row.psnr.value:.1f} dB ({row.psnr.low:.1f} to {row.psnr.high:.1f})")
    if row.psnr_tenth is not None:
        parts.append(f"nine of ten prompts above {row.psnr_tenth:.1f} dB")
    return "\n".join(parts)
