"""Where each method departs from the full run: maps of the difference, on held-out prompts.

The counterpart of the paper's images of the cache error. Ours, the paper's method, TeaCache and
fewer steps are prepared as in ``ertacache bench`` and set to half of the network's FLOPs. For a
few held-out prompts the image shows the full run, then the absolute difference of each method's
result, the same gain for all; of a video, frames from its beginning, middle and end. Draws
``docs/images/error-maps-MODEL.png`` and writes one row per model into ``results/errormaps.json``:
the prompts, the gain, and for each method its setting, its PSNR and its largest
difference on these prompts. The last line of standard output is the JSON of the rows,
compact.

    python benchmarks/errormaps.py                      # every bundled model
    python benchmarks/errormaps.py emoji-flux --gain 8
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rows import RESULTS, ROOT, ModelParser, Row, replace_rows
from torch import Tensor

from ertacache.baselines import BASELINES
from ertacache.bench.contestants import Contestant, baseline_contestants, policy_contestants
from ertacache.bench.journal import Journal
from ertacache.bench.workload import Workload
from ertacache.calibration.session import HELDOUT_SEED, Session, number_runs
from ertacache.formats.files import draft
from ertacache.metrics import psnr
from ertacache.models import MODELS, load_pipeline, load_prompts
from ertacache.report.grids import difference, grid

BUDGET = 2.0
POLICIES = ("trajectory", "paper")
COMPARED = ("TeaCache", "fewer steps")
SIDE = 128  # approximate width of an image in pixels
FRAMES = 3  # of a video


def contestants(work: Workload) -> Iterator[Contestant]:
    """Every method at half of the FLOPs; inapplicable methods are left out."""
    journal = Journal(None, {})
    yield from policy_contestants(work, [BUDGET], POLICIES, journal)
    for name in COMPARED:
        for found in baseline_contestants(work, [BUDGET], BASELINES[name], journal):
            if found.why_not is None:
                yield found
            else:
                print(f"{name}: {found.why_not}")


def stills(result: Tensor) -> Tensor:
    """Images unchanged; of videos (B, F, 3, H, W) the first, middle and last frame, in a row.

    Example:
        >>> stills(torch.zeros(2, 17, 3, 8, 8)).shape
        torch.Size([6, 3, 8, 8])
    """
    if result.ndim == 4:
        return result
    places = torch.linspace(0, result.shape[1] - 1, FRAMES).round().long()
    return result[:, places].flatten(0, 1)


def compare(work: Workload, gain: float) -> tuple[list[tuple[str, Tensor]], list[Row]]:
    """The rows of the image, and the measurements of each method."""
    full = work.session.generate(work.heldout).results
    drawn, rows = [("full run", stills(full))], []
    for contestant in contestants(work):
        with contestant.attach():
            result = work.session.generate(work.heldout).results
        near = psnr(result, full).mean().item()
        title = f"{contestant.method}: difference x {gain:g}, {near:.1f} dB"
        drawn.append((title, difference(stills(result), stills(full), gain=gain)))
        rows.append(
            {
                "method": contestant.method,
                "knob": contestant.setting,
                "psnr_db": round(near, 2),
                "largest_difference": round((result - full).abs().max().item(), 4),
            }
        )
        print(title, flush=True)
    return drawn, rows


def measure_model(name: str, options: argparse.Namespace) -> Row:
    """The image and the row of a model."""
    model: Any = MODELS[name]
    count = options.prompts if model.num_frames is None else max(1, options.prompts // 2)
    prompts = load_prompts(name, "heldout")[:count]
    work = Workload(
        name,
        Session(load_pipeline(name), model.call_arguments, batch_size=options.batch),
        number_runs(load_prompts(name, "calibration")[: options.calibration]),
        number_runs(prompts, HELDOUT_SEED),
    )
    drawn, methods = compare(work, options.gain)
    scale = max(1, round(SIDE / model.size[1]))
    options.images.mkdir(parents=True, exist_ok=True)
    with draft(options.images / f"error-maps-{name}.png") as made:
        grid(drawn, scale=scale).save(made, optimize=True)
    return {
        "model": name,
        "budget": BUDGET,
        "gain": options.gain,
        "prompts": prompts,
        "frames": None if model.num_frames is None else FRAMES,
        "methods": methods,
    }


def main(arguments: list[str] | None = None) -> None:
    """Draw models, one after the other."""
    parser = ModelParser(__doc__)
    parser.add_argument("--calibration", type=int, default=8, help="calibration prompts")
    parser.add_argument("--prompts", type=int, default=6, help="held-out prompts; videos half")
    parser.add_argument("--batch", type=int, default=8, help="prompts per call")
    parser.add_argument("--gain", type=float, default=16.0, help="amplification of differences")
    parser.add_argument("--results", type=Path, default=RESULTS / "errormaps.json")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse(arguments)
    rows = []
    for name in options.models:
        rows.append(measure_model(name, options))
        replace_rows(options.results, name, rows[-1:])
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
