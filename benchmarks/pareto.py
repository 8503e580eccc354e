"""PSNR against compute for every method: one plot per results file of ``ertacache bench``.

Draws what ``results/bench-MODEL.json`` holds, with the plot of ``ertacache report``, into
``docs/images/pareto-MODEL.png``; runs no model. The last line of standard output is the JSON of the
files written, compact.

    python benchmarks/pareto.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchtables import bench_files
from plots import IMAGES, save
from rows import RESULTS

from ertacache.bench.results import read_results
from ertacache.report.plots import draw_pareto


def main(arguments: list[str] | None = None) -> None:
    """Plot every results file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the files")
    parser.add_argument("--images", type=Path, default=IMAGES, help="folder of the plots")
    options = parser.parse_args(arguments)
    written = []
    for name, path in bench_files(options.results).items():
        image = options.images / f"pareto-{name}.png"
        save(draw_pareto(read_results(path)[1]), image)
        written.append(image.name)
    print(json.dumps(written, separators=(",", ":")))


if __name__ == "__main__":
    main()
