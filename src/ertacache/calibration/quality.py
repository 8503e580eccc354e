"""From a wished PSNR to a number of computed steps: predicted errors in decibels.

The solver predicts how far the final latent will be off, root mean square; a wish is about decoded
pictures. For small errors a decoder is a linear map, so a latent error twice as large is a pixel
error twice as large, and one number is all that is missing:

    PSNR(error) = unit - 20 log10(error)        unit: the PSNR of a latent error of 1

``unit`` is measured in a trial run, or guessed when there is no network. Runs nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ertacache.core.frontier import Frontier, FrontierPoint
from ertacache.formats.profile import Profile

__all__ = ["choose_point", "error_of", "guess_unit", "measured_unit", "predicted_psnr"]

PIXEL_SPREAD = 0.25  # standard deviation of pictures with values from 0 to 1, roughly
TINY = 1e-12  # an error below it is none


def predicted_psnr(error: float, unit: float) -> float:
    """The PSNR of a final latent that is ``error`` off.

    Example:
        >>> predicted_psnr(0.01, unit=12.0)
        52.0
    """
    return unit - 20 * math.log10(max(error, TINY))


def error_of(psnr: float, unit: float) -> float:
    """The latent error at which a PSNR is reached; undoes ``predicted_psnr``.

    Example:
        >>> round(error_of(52.0, unit=12.0), 6)
        0.01
    """
    return float(10 ** ((unit - psnr) / 20))


def measured_unit(psnr: float, error: float) -> float:
    """The unit, from a measured PSNR and the error that was predicted for it.

    Example:
        >>> measured_unit(52.0, 0.01)
        12.0
    """
    return psnr + 20 * math.log10(max(error, TINY))


def guess_unit(profile: Profile) -> float:
    """The unit of a decoder that nobody asked: errors are as large to pixels as to latents.

    That is, an error of a tenth of the latents' spread is taken for a tenth of the pixels' spread,
    a quarter of their range. Decoders of real models are some decibels off.
    """
    last = profile.num_steps
    statistics = profile.statistics
    spread = (statistics.inner[:, last, last] - statistics.means[:, last].square()).mean()
    return 20 * math.log10(max(math.sqrt(max(spread.item(), 0.0)), TINY) / PIXEL_SPREAD)


def choose_point(
    frontier: Frontier, psnr: float, *, unit: float, above: int = 0
) -> FrontierPoint | None:
    """The fewest computed steps, more than ``above``, that are expected to reach a PSNR.

    If none are, those that are expected to come nearest; None if there are no more than ``above``.
    Computing every step is no policy and is left out.
    """
    points: Sequence[FrontierPoint] = [
        point for point in frontier.points if above < point.computed < point.plan.num_steps
    ]
    for point in points:
        if predicted_psnr(point.predicted_error, unit) >= psnr:
            return point
    return min(points, key=lambda point: point.predicted_error, default=None)
