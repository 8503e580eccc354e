"""Trajectory-aware timestep adjustment: phi, and the sigma table it makes.

The scales come from calibration, so that the whole table is known before a run. Knows nothing of
rectification, nor of how the computed steps were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ertacache.core.plan import Reuse, check_compute_steps
from ertacache.core.residual import ReusedStep, relative_l1, safe_ratio, walk_schedule
from ertacache.core.solver import Denoise, Euler, SolverFactory

__all__ = ["adjusted_sigmas", "calibrate_step_scales", "profile_step_scales", "step_scale"]


def step_scale(reused: Tensor, computed: Tensor, *, previous: Tensor) -> float:
    """Phi of eq. 13: ``clip(1 - |v~ - v|_1 / |v - v_previous|_1, 0, 1)``.

    Where the output did not change (both norms zero) the step keeps its length.

    Args:
        reused: v~, what the step reuses.
        computed: v, what the network says at the same latent.
        previous: the output that the step before used. With velocity reuse it is v~ itself, the
            ratio is exactly 1 and phi is 0.

    Example:
        >>> v_tilde, v, before = torch.tensor([1.25]), torch.tensor([1.0]), torch.tensor([2.0])
        >>> step_scale(v_tilde, v, previous=before)
        0.75
    """
    ratio = relative_l1(reused, computed, reference=computed - previous)
    return min(1.0, max(0.0, 1.0 - ratio))


def adjusted_sigmas(sigmas: Tensor, step_scales: Tensor) -> Tensor:
    """Eq. 13 and 14: shrink reused intervals by phi, stretch what remains to end at ``sigmas[-1]``.

    Eq. 14 is read as "remaining budget over remaining steps"; on a table that is not uniform the
    remaining nominal intervals share one factor. A step with phi = 0 has length zero.

    Args:
        sigmas: the nominal table, strictly descending, shape (T + 1,).
        step_scales: phi of every step, shape (T,); 1 on computed steps, the last one included.

    Returns:
        The adjusted table, float64, never increasing, with the same two ends.

    Example:
        >>> table = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
        >>> adjusted_sigmas(table, torch.tensor([1.0, 0.0, 1.0, 1.0])).tolist()
        [1.0, 0.75, 0.75, 0.375, 0.0]
    """
    table: list[float] = sigmas.double().tolist()
    scales: list[float] = step_scales.double().tolist()
    _check(table, scales)
    end, adjusted = table[-1], [table[0]]
    for nominal, following, phi in zip(table, table[1:], scales, strict=False):
        sigma = adjusted[-1]
        stretch = (sigma - end) / (nominal - end)
        full = following + (stretch - 1) * (following - end)
        # This form is exact for phi = 0 and phi = 1; the minimum undoes an upward rounding.
        adjusted.append(min(sigma, phi * full + (1 - phi) * sigma))
    return torch.tensor(adjusted, dtype=torch.float64)


def _check(table: list[float], scales: list[float]) -> None:
    if len(scales) != len(table) - 1:
        raise ValueError(f"{len(table) - 1} steps need as many step_scales, got {len(scales)}")
    if any(not a > b for a, b in pairwise(table)):
        raise ValueError("sigmas must be strictly descending")
    if any(not 0 <= phi <= 1 for phi in scales):
        raise ValueError("step_scales must lie between 0 and 1")
    if scales[-1] != 1:
        raise ValueError("the last step must be computed (step scale 1), or the table has no end")


def calibrate_step_scales(
    denoise: Denoise,
    sample: Tensor,
    *,
    sigmas: Tensor,
    compute_steps: Sequence[int],
    reuse: Reuse = "residual",
    solver: SolverFactory = Euler,
) -> Tensor:
    """Phi of eq. 13 for every step, measured on calibration noise over the nominal table.

    Args:
        denoise: the network; called once per step.
        sample: the noise of the calibration prompts, shape (P, ...).
        sigmas: the nominal table, shape (T + 1,).
        compute_steps: the computed steps.
        reuse: what a reused step returns.
        solver: makes the solver for the table.

    Returns:
        The scales, shape (T,), float64, 1 on computed steps.

    Example:
        >>> table = torch.tensor([1.0, 0.5, 0.0])
        >>> calibrate_step_scales(
        ...     lambda x, sigma: sigma * x, torch.ones(1, 1), sigmas=table, compute_steps=[0]
        ... )
        tensor([1.0000, 0.6667], dtype=torch.float64)
    """
    phi = torch.ones(len(sigmas) - 1, dtype=torch.float64)

    def visit(at: ReusedStep) -> Tensor:
        phi[at.step] = step_scale(at.reused, at.computed, previous=at.previous)
        return at.reused

    walk_schedule(
        denoise,
        sample,
        sigmas=sigmas,
        compute_steps=compute_steps,
        reuse=reuse,
        solver=solver,
        visit=visit,
    )
    return phi


def profile_step_scales(l1: Tensor, output_l1: Tensor, *, compute_steps: Sequence[int]) -> Tensor:
    """Phi of eq. 13 without the network: every output is taken to be the reference run's.

    Args:
        l1: L1 distance of the residuals of any two steps, shape (P, T, T); of the outputs for
            velocity reuse.
        output_l1: L1 distance of the outputs of any two steps, shape (P, T, T).
        compute_steps: the computed steps.

    Returns:
        The scales, shape (T,), float64, 1 on computed steps.

    Example:
        >>> v = torch.tensor([4.0, 3.0, 1.0])
        >>> apart = (v[:, None] - v).abs()[None]
        >>> profile_step_scales(apart / 2, apart, compute_steps=[0, 2]).tolist()
        [1.0, 0.5, 1.0]
    """
    T = l1.shape[-1]
    C = torch.tensor(check_compute_steps(compute_steps, T))
    k = torch.arange(1, T)
    source = C[torch.searchsorted(C, k, right=True) - 1]
    shift, change = l1.double().sum(0)[source, k], output_l1.double().sum(0)[k - 1, k]
    phi = torch.ones(T, dtype=torch.float64)
    # On a computed step the source is the step itself: no shift, and phi stays 1.
    phi[1:] = (1 - safe_ratio(shift, change)).clamp(0, 1)
    return phi
