"""What the page shows, as images, figures, tables and HTML: no model is run here.

Everything that comes from a file or a prompt is escaped, or shown in a table of plain text.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ertacache.app.engine import Outcome, Prediction
from ertacache.formats.policy import Policy
from ertacache.integration.solve import PlanSolver
from ertacache.metrics.image import to_image
from ertacache.report.grids import difference, labelled_row

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "FRONTIER_COLUMNS",
    "describe_outcome",
    "describe_prediction",
    "draw_frontier",
    "draw_strip",
    "frontier_table",
    "notes_html",
    "policy_facts",
    "shown_images",
    "write_video",
]

SHOWN_SIDE = 512  # pixels that a small image is enlarged to, at most
FPS = 16
FRONTIER_COLUMNS = ["computed steps", "fewer", "predicted PSNR", "measured PSNR", "step mask"]
_COMPUTED, _REUSED = "█", "·"


def shown_images(outcome: Outcome) -> tuple[Image.Image, Image.Image, Image.Image]:
    """The full result, the accelerated one, and eight times their difference, enlarged."""
    scale = max(1, SHOWN_SIDE // max(outcome.full.shape[-2:]))
    gap = difference(outcome.accelerated, outcome.full)
    full, fast, apart = (
        to_image(each, scale=scale) for each in (outcome.full, outcome.accelerated, gap)
    )
    return full, fast, apart


def write_video(outcome: Outcome, path: Path) -> Path:
    """Both videos and their difference as one lossless animation, so that they play in step."""
    gap = difference(outcome.accelerated, outcome.full)
    scale = max(1, SHOWN_SIDE // (2 * max(outcome.full.shape[-2:])))
    panels = [("full run", outcome.full), ("accelerated", outcome.accelerated)]
    row = labelled_row([(name, _enlarge(v, scale)) for name, v in [*panels, ("8 x diff.", gap)]])
    first, *rest = (to_image(frame) for frame in row)
    first.save(path, save_all=True, append_images=rest, duration=1000 // FPS, loop=0, lossless=True)
    return path


def _enlarge(video: Tensor, scale: int) -> Tensor:
    return video.repeat_interleave(scale, -1).repeat_interleave(scale, -2)


def draw_strip(compute_steps: Sequence[int], num_steps: int) -> str:
    """The compute schedule as HTML: one cell per step, filled where the network is evaluated.

    Example:
        >>> draw_strip([0, 2], 4).count("<rect")
        4
    """
    computed, cells = set(compute_steps), []
    for step in range(num_steps):
        kind = "computed" if step in computed else "reused"
        colour = "#0072b2" if step in computed else "none"
        cells.append(
            f'<rect x="{10 * step + 1}" y="1" width="8" height="18" fill="{colour}" '
            f'stroke="#0072b2" vector-effect="non-scaling-stroke">'
            f"<title>step {step + 1}: {kind}</title></rect>"
        )
    label = f"{len(computed)} of {num_steps} steps computed"
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {10 * num_steps} 20" '
        f'style="width:100%;max-height:28px" preserveAspectRatio="none">{"".join(cells)}</svg>'
        f"<p>{label}; filled: computed, empty: reused</p>"
    )


def describe_prediction(found: Prediction) -> str:
    """What the slider says, in one line.

    Example:
        >>> describe_prediction(Prediction(10, 30, 41.25))
        '10 of 30 network evaluations (3.00x fewer), predicted PSNR 41.2 dB'
    """
    times = found.num_steps / found.computed
    text = f"{found.computed} of {found.num_steps} network evaluations ({times:.2f}x fewer)"
    if found.psnr is None:
        return f"{text}; no predicted PSNR: {found.why}"
    return f"{text}, predicted PSNR {_decibels(found.psnr)}"


def describe_outcome(outcome: Outcome) -> list[list[str]]:
    """What was measured, as rows of a table: a name and a value."""
    rows = []
    for name, score in outcome.scores.items():
        if isinstance(score, str):
            shown = f"not available: {score}"
        else:
            shown = _decibels(score) if name == "PSNR" else f"{score:.4f}"
        rows.append([name, shown])
    rows.append(["full run", f"{outcome.full_seconds:.2f} s"])
    gain = outcome.full_seconds / outcome.seconds
    rows.append(["accelerated run", f"{outcome.seconds:.2f} s, {gain:.2f}x faster"])
    return rows + [["note", note] for note in outcome.notes]


def policy_facts(policy: Policy) -> list[list[str]]:
    """Everything a policy file says besides its numbers, as rows of a table."""
    run, profile = policy.fingerprint, policy.profile
    rows = [
        ["pipeline", run.pipeline],
        ["network", f"{run.denoiser} ({run.denoiser_hash[:12]}), {run.dtype}"],
        ["scheduler", run.scheduler],
        ["scheduler settings", ", ".join(f"{k}={v}" for k, v in run.scheduler_config.items())],
        ["prediction", run.prediction],
        ["guidance", "; ".join(f"{k} {list(v)}" for k, v in run.guidance.items()) or "none"],
        ["latent", " x ".join(map(str, run.latent_shape))],
        ["versions", ", ".join(f"{k} {v}" for k, v in run.versions.items())],
    ]
    if profile is None:
        rows.append(["profile", "none"])
    else:
        rows.append(["profile", f"{profile.num_runs} runs of {profile.num_steps} steps"])
        rows += [["prompt", f"{each.prompt} (seed {each.seed})"] for each in profile.runs[:8]]
    rows += [["plan", str(plan)] for plan in policy.plans]
    return rows + [list(entry) for entry in policy.provenance.items()]


def frontier_table(policy: Policy) -> list[list[str]]:
    """The frontier of a policy, a row for every number of computed steps."""
    if policy.profile is None:
        return []
    steps = policy.profile.num_steps
    return [
        [
            str(len(row.compute_steps)),
            f"{steps / len(row.compute_steps):.2f}x",
            _decibels(row.predicted_psnr),
            "" if row.measured_psnr is None else _decibels(row.measured_psnr),
            "".join(_COMPUTED if k in row.compute_steps else _REUSED for k in range(steps)),
        ]
        for row in PlanSolver(policy).rows()
    ]


def draw_frontier(policy: Policy) -> Any:
    """PSNR against the number of computed steps, predicted and measured, as a figure.

    Returns:
        A matplotlib figure; None for a policy without a profile.
    """
    if policy.profile is None:
        return None
    from matplotlib.figure import Figure

    steps = policy.profile.num_steps
    rows = [row for row in PlanSolver(policy).rows() if len(row.compute_steps) < steps]
    figure = Figure(figsize=(7, 4), layout="tight")
    axis = figure.subplots()
    counts = [len(row.compute_steps) for row in rows]
    axis.plot(counts, [row.predicted_psnr for row in rows], color="#0072b2", label="predicted")
    known = [(len(r.compute_steps), r.measured_psnr) for r in rows if r.measured_psnr is not None]
    if known:
        axis.plot(*zip(*known, strict=True), "D", color="#d55e00", label="measured, held-out")
    axis.set_xlabel(f"computed steps of {steps}")
    axis.set_ylabel("PSNR to the full run [dB]")
    axis.grid(alpha=0.3)
    axis.legend()
    return figure


def notes_html(notes: Sequence[str]) -> str:
    """Warnings as a list; nothing if there are none.

    Example:
        >>> notes_html(["a < b"])
        '<ul><li>a &lt; b</li></ul>'
    """
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f"<ul>{items}</ul>" if items else ""


def _decibels(value: float) -> str:
    return "identical" if math.isinf(value) else f"{value:.1f} dB"
