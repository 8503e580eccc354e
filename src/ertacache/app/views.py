"""What the page shows, as HTML: no model is run here.

Everything that comes from a file or a prompt is escaped. Images and figures are part of the HTML;
a figure is an image, so that nothing inside of it is run.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from torch import Tensor

from ertacache import figures
from ertacache.app.outcomes import Outcome, Prediction
from ertacache.formats.policy import Policy
from ertacache.formats.text import decibels
from ertacache.integration.solve import PlanSolver
from ertacache.metrics.encoding import encode_video
from ertacache.metrics.image import to_image
from ertacache.report.grids import difference

__all__ = [
    "draw_frontier",
    "prediction_html",
    "result_html",
    "show_figure",
    "show_mask",
    "show_notes",
    "show_table",
    "write_video",
]

SMALL_SIDE = 256  # pixels up to which the pixels of an image are shown as squares
VIDEO_SIDE = 256  # pixels that the frames of a small video are enlarged to
FPS = 16
_MOVE = "this.parentNode.style.setProperty('--at', this.value + '%')"


def result_html(outcome: Outcome, video: str | None = None) -> str:
    """Two results and what was measured of them.

    Args:
        outcome: the results.
        video: address of the file that ``write_video`` wrote; None for images.
    """
    if video is None:
        shown = _images(outcome)
    else:
        names = ("full run", "accelerated", "difference, 8 times")
        labels = "".join(f"<span>{name}</span>" for name in names)
        shown = (
            f'<figure class="erta-video"><video src="{escape(video)}" controls autoplay loop muted '
            'playsinline aria-label="full run, accelerated run and their difference"></video>'
            f"<figcaption>{labels}</figcaption></figure>"
        )
    strip = show_mask(outcome.compute_steps, outcome.num_steps)
    label = (
        f"{len(outcome.compute_steps)} of {outcome.num_steps} steps computed (filled), the others "
        "reused"
    )
    schedule = f'<p class="erta-label">Compute schedule: {label}</p>{strip}'
    return f"{shown}{_measured(outcome)}{schedule}{show_notes(outcome.notes)}"


def _images(outcome: Outcome) -> str:
    """A divider to drag between the two images, and the difference beside it."""
    gap = difference(outcome.accelerated, outcome.full)
    full, fast, apart = (_source(each) for each in (outcome.full, outcome.accelerated, gap))
    height, width = outcome.full.shape[-2:]
    small = " erta-pixels" if max(height, width) <= SMALL_SIDE else ""
    shape = f'style="aspect-ratio:{width}/{height}"'
    return (
        f'<div class="erta-pair{small}"><figure><div class="erta-compare" {shape}>'
        f'<img src="{full}" alt="full run"><img class="erta-over" src="{fast}" '
        'alt="accelerated run"><span class="erta-line"></span>'
        '<input type="range" min="0" max="100" value="50" step="0.5" '
        f'aria-label="divider between full and accelerated run" oninput="{_MOVE}"></div>'
        "<figcaption><span>full run</span><span>accelerated</span></figcaption></figure>"
        f'<figure><img src="{apart}" {shape} alt="difference of the two, 8 times">'
        "<figcaption><span>difference, 8 times</span></figcaption></figure></div>"
    )


def _source(image: Tensor) -> str:
    data = io.BytesIO()
    to_image(image.nan_to_num()).save(data, format="PNG")
    return _data("image/png", data.getvalue())


def _data(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _measured(outcome: Outcome) -> str:
    """PSNR, SSIM, LPIPS and seconds as cells with a name and a value each."""
    cells, missing = [], []
    for name, score in outcome.scores.items():
        if isinstance(score, str):
            missing.append(f"{name} is not available: {score}")
        else:
            cells.append((name, decibels(score) if name == "PSNR" else f"{score:.4f}"))
    gain = outcome.full_seconds / outcome.seconds
    cells.append(("Full run", f"{outcome.full_seconds:.2f} s"))
    cells.append(("Accelerated", f"{outcome.seconds:.2f} s"))
    cells.append(("Faster", f"{gain:.2f}x"))
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in cells)
    once = "<p><small>Seconds are of one run each, so that they vary.</small></p>"
    return f'<dl class="erta-cells">{items}</dl>{once}{show_notes(missing)}'


def write_video(outcome: Outcome, path: Path) -> None:
    """Both videos and their difference side by side in one file, so that they play in step."""
    import torch

    gap = difference(outcome.accelerated, outcome.full)
    scale = max(1, VIDEO_SIDE // max(outcome.full.shape[-2:]))
    panels = torch.cat([outcome.full, outcome.accelerated, gap], dim=-1).nan_to_num()
    shown = panels.repeat_interleave(scale, -1).repeat_interleave(scale, -2)
    encode_video(shown, path, fps=FPS)


def show_mask(compute_steps: Iterable[int], num_steps: int) -> str:
    """A compute schedule: one cell per step, filled where the network is evaluated.

    Example:
        >>> show_mask([0, 2], 4).count("<rect")
        4
    """
    computed, cells = set(compute_steps), []
    for step in range(num_steps):
        kind = "computed" if step in computed else "reused"
        cells.append(
            f'<rect class="erta-{kind}" x="{10 * step + 1}" y="1" width="8" height="18">'
            f"<title>step {step + 1}: {kind}</title></rect>"
        )
    label = f"{len(computed)} of {num_steps} steps computed"
    return (
        f'<svg class="erta-mask" role="img" aria-label="{label}" '
        f'viewBox="0 0 {10 * num_steps} 20" preserveAspectRatio="none">{"".join(cells)}</svg>'
    )


def prediction_html(found: Prediction) -> str:
    """What the slider says.

    Example:
        >>> text = prediction_html(Prediction(10, 30, 41.25))
        >>> "<b>10 of 30</b> network evaluations (3.00x fewer)" in text, "<b>41.2 dB</b>" in text
        (True, True)
    """
    times = found.num_steps / found.computed
    counts = (
        f"<b>{found.computed} of {found.num_steps}</b> network evaluations ({times:.2f}x fewer)"
    )
    if not found.ready:
        return f"<p>{counts}</p>"
    if found.psnr is None:
        return f"<p>{counts}</p><p>No predicted PSNR: {escape(found.why)}.</p>"
    known = ""
    if found.measured is not None:
        row = found.measured
        known = f"<p>Measured on {row.measured_on}: <b>{decibels(row.psnr)}</b></p>"
    return (
        f"<p>{counts}, predicted PSNR <b>{decibels(found.psnr)}</b></p>{known}"
        "<p><small>The prediction is a mean over prompts: a single image can be several dB "
        "better or worse.</small></p>"
    )


def draw_frontier(policy: Policy) -> str:
    """PSNR against the speed-up, predicted and measured.

    Returns:
        An image as HTML; a sentence for a policy without a profile.
    """
    if policy.profile is None:
        return "<p>The policy has no profile, so that it has no frontier.</p>"
    steps = policy.profile.num_steps
    rows = [row for row in PlanSolver(policy).rows() if len(row.compute_steps) < steps]
    fewer = {row: steps / len(row.compute_steps) for row in rows}
    known = [(fewer[row], row.measured_psnr) for row in rows if row.measured_psnr is not None]
    predicted = [(fewer[row], row.predicted_psnr) for row in rows]
    figure = figures.draw_frontier(predicted, {"policy": known})
    shown = figures.to_svg(figure, name="frontier")
    return show_figure(shown, f"predicted PSNR for 2 to {steps - 1} computed steps")


def show_figure(svg: str, label: str) -> str:
    """An SVG as an image on white, which can be scrolled where it is narrow."""
    source = _data("image/svg+xml", svg.encode())
    image = f'<img src="{source}" alt="{escape(label)}">'
    return f'<div class="erta-figure" tabindex="0" role="group" aria-label="figure">{image}</div>'


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, label: str) -> str:
    """A table; cells are HTML already.

    Example:
        >>> show_table(["a"], [["1"]], label="one").count("<td>")
        1
    """
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="erta-table" tabindex="0" role="group" aria-label="{escape(label)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def show_notes(notes: Sequence[str]) -> str:
    """Warnings as a list; nothing if there are none.

    Example:
        >>> show_notes(["a < b"])
        '<ul class="erta-notes"><li>a &lt; b</li></ul>'
    """
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<ul class="erta-notes">{items}</ul>' if items else ""
