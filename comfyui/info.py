"""A policy as text and as an image: the frontier, and which steps are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from ertacache import Policy
from ertacache.integration.solve import FrontierRow, PlanSolver

from .sampling import MODEL_KEY

__all__ = ["describe", "draw"]

SIZE = (960, 640)
INK, GRID, PAPER = "#222222", "#dddddd", "#ffffff"
COMPUTED, REUSED, MEASURED = "#0072b2", "#e5e5e5", "#d55e00"  # told apart by the colour-blind too
PLOT = (90, 60, 930, 400)  # left, top, right, bottom of the frontier
TOP_DB = 100.0  # what is nearer to the full run than this is drawn here


def describe(policy: Policy) -> str:
    """What the policy holds, and one line for every number of computed steps."""
    lines = [f"{name}: {value}" for name, value in policy.provenance.items() if name == MODEL_KEY]
    lines.append(str(policy))
    if policy.profile is not None:
        steps = policy.profile.num_steps
        lines += ["", "computed  fewer  predicted  measured PSNR to the full run"]
        for row in PlanSolver(policy).rows():
            measured = "" if row.measured_psnr is None else f"{row.measured_psnr:.1f} dB"
            computed = len(row.compute_steps)
            lines.append(
                f"{computed:8d}  {steps / computed:4.1f}x  {row.predicted_psnr:6.1f} dB  {measured}"
            )
    return "\n".join(lines).rstrip()


def draw(policy: Policy) -> Tensor:
    """The frontier over one strip per speed-up, as a ComfyUI image of shape (1, H, W, 3)."""
    image = Image.new("RGB", SIZE, PAPER)
    canvas = ImageDraw.Draw(image)
    name = policy.provenance.get(MODEL_KEY, policy.fingerprint.pipeline)
    title = f"{name}: PSNR to the full run by computed steps"
    canvas.text((PLOT[0], 18), title, fill=INK, font=_font(22))
    if policy.profile is None:
        canvas.text((PLOT[0], 200), "no profile: only the plans below", fill=INK, font=_font(18))
        strips = [(plan.compute_steps, plan.num_steps) for plan in policy.plans]
    else:
        rows, steps = PlanSolver(policy).rows(), policy.profile.num_steps
        _draw_frontier(canvas, rows, steps)
        strips = [(_nearest(rows, steps / speedup), steps) for speedup in (1.5, 2.0, 3.0)]
    for place, (computed, steps) in enumerate(strips[:3]):
        _draw_strip(canvas, 480 + 52 * place, computed, steps)
    array = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return array.view(1, SIZE[1], SIZE[0], 3).float() / 255


def _nearest(rows: Sequence[FrontierRow], computed: float) -> tuple[int, ...]:
    return min(rows, key=lambda row: abs(len(row.compute_steps) - computed)).compute_steps


def _draw_frontier(canvas: ImageDraw.ImageDraw, rows: Sequence[FrontierRow], steps: int) -> None:
    left, top, right, bottom = PLOT
    # The last rows compute nearly every step; their error is rounding.
    shown = [row for row in rows if len(row.compute_steps) < steps]
    values = [_clip(row.predicted_psnr) for row in shown] or [0.0]
    low, high = 10 * math.floor(min(values) / 10), 10 * math.ceil(max(values) / 10 + 0.1)

    def place(computed: int, psnr: float) -> tuple[float, float]:
        across = (computed - 1) / max(steps - 1, 1)
        return left + across * (right - left), bottom - (psnr - low) / (high - low) * (bottom - top)

    for level in range(low, high + 1, 10):
        _, y = place(1, level)
        canvas.line((left, y, right, y), fill=GRID)
        canvas.text((left - 12, y), f"{level} dB", fill=INK, font=_font(16), anchor="rm")
    for computed in range(0, steps + 1, 5):
        x, _ = place(max(computed, 1), low)
        canvas.text((x, bottom + 8), str(max(computed, 1)), fill=INK, font=_font(16), anchor="ma")
    canvas.line(
        [place(len(r.compute_steps), _clip(r.predicted_psnr)) for r in shown],
        fill=COMPUTED,
        width=3,
    )
    for row in shown:
        if row.measured_psnr is not None:
            x, y = place(len(row.compute_steps), _clip(row.measured_psnr))
            canvas.ellipse((x - 7, y - 7, x + 7, y + 7), fill=MEASURED)
    canvas.line((right - 128, bottom - 44, right - 100, bottom - 44), fill=COMPUTED, width=3)
    canvas.text((right - 90, bottom - 44), "predicted", fill=INK, font=_font(16), anchor="lm")
    canvas.ellipse((right - 121, bottom - 26, right - 107, bottom - 12), fill=MEASURED)
    canvas.text((right - 90, bottom - 19), "measured", fill=INK, font=_font(16), anchor="lm")
    canvas.text(
        ((left + right) / 2, bottom + 30), "computed steps", fill=INK, font=_font(16), anchor="ma"
    )


def _draw_strip(canvas: ImageDraw.ImageDraw, top: int, computed: Sequence[int], steps: int) -> None:
    left, _, right, _ = PLOT
    width = (right - left - 150) / steps
    label = f"{steps / len(computed):.1f}x"
    canvas.text((left - 12, top + 15), label, fill=INK, font=_font(18), anchor="rm")
    for k in range(steps):
        fill = COMPUTED if k in set(computed) else REUSED
        x = left + k * width
        canvas.rectangle((x, top, x + width - 2, top + 30), fill=fill)
    text = f"{len(computed)} of {steps} computed"
    canvas.text((right, top + 15), text, fill=INK, font=_font(16), anchor="rm")


def _clip(psnr: float) -> float:
    return max(0.0, min(psnr, TOP_DB))


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
