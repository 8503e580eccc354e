"""``ertacache report``: results files as one self-contained HTML page. Runs no model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ertacache.cli.console import print_line
from ertacache.cli.writing import check_folder
from ertacache.formats.files import write_whole

__all__ = ["EXAMPLES", "report"]

EXAMPLES = (
    "ertacache report bench.json -o report.html",
    "ertacache report results/bench-*.json -o report.html",
)


def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="RESULTS...", help="Files of `ertacache bench`.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The page, as HTML.")
    ] = Path("report.html"),
) -> None:
    """Write tables, plots and samples of a benchmark into one page."""
    if find_spec("matplotlib") is None:
        raise ValueError("a report needs matplotlib: pip install 'ertacache[plots]'")
    from ertacache.report.page import make_page

    if output.suffix not in (".html", ".htm"):
        raise ValueError(f"the page is HTML: call it {output.with_suffix('.html')}")
    check_folder(output)
    write_whole(output, make_page(results))
    print_line(f"Report in {output}")
