"""``ertacache report``: results files as one self-contained HTML page. Runs no model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ertacache.cli.console import Stages, print_line
from ertacache.cli.output import JsonFile
from ertacache.cli.writing import check_folder, check_json, check_name, write_json
from ertacache.formats.files import write_whole

__all__ = ["EXAMPLES", "report"]

EXAMPLES = (
    "ertacache report bench.json -o report.html",
    "ertacache report results/bench-*.json -o report.html",
    "ertacache report out -o compared.html",
)


def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="Files of `ertacache bench`, or folders of `ertacache generate --compare`.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page, as HTML.")
    ] = Path("report.html"),
    json: JsonFile = None,
) -> None:
    """Write tables, plots, images and videos into one page.

    Of a benchmark: the largest speed-up that looks the same, a plot with the numbers on hover,
    sortable tables, and samples if they are beside the results. Of a folder: every result and its
    full run, with a divider between them. --json has the speed-ups that look the same.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("a report needs matplotlib: pip install 'ertacache[plots]'")
    from ertacache.report.page import make_page

    check_name(output, ".html", ".htm")
    check_folder(output)
    check_json(json)
    with Stages() as stage:
        page = make_page(sources, progress=stage("report"))
    write_whole(output, page)
    print_line(f"Report in {output}")
    if json is not None:
        write_json(json, {"report": str(output), "same": _same(sources)})


def _same(sources: list[Path]) -> dict[str, Any]:
    """The largest speed-up that looks the same, by model and method, for machines."""
    from ertacache.bench.results import read_results
    from ertacache.report.tables import reaches, tell_apart

    found: dict[str, Any] = {}
    files = [path for path in sources if not path.is_dir()]
    apart = tell_apart([(path, read_results(path)[1]) for path in files])
    for method, of in reaches([row for rows in apart for row in rows]).items():
        for model, reach in of.items():
            value = {"speedup": round(reach.speedup, 2), "bound": reach.bound}
            found.setdefault(model, {})[method] = value
    return found
