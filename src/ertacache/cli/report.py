"""``ertacache report``: results files as one self-contained HTML page. Runs no model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ertacache.cli.console import print_line

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
    page = make_page(results)
    try:
        output.write_text(page, encoding="utf-8")
    except OSError as cause:
        raise ValueError(f"cannot write {str(output)!r}: {cause.strerror}") from cause
    print_line(f"Report in {output}")
