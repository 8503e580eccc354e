"""Closed-loop refit: run a schedule on calibration noise and fit each step where it really is.

Simulation takes the network's outputs at accelerated latents for the reference ones; here they are
the true ones. One network call per computed step and prompt. Knows no search and no file.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ertacache.core.gram import CHUNK
from ertacache.core.least_squares import solve_ridge
from ertacache.core.plan import TrajectoryPlan, check_compute_steps
from ertacache.core.sampler import combine
from ertacache.core.solve import Fit
from ertacache.core.solver import Denoise

__all__ = ["fit_step", "refit_plan", "typical_distance"]


def fit_step(
    sample: Tensor, outputs: Sequence[Tensor], target: Tensor, *, nominal: Tensor, fit: Fit
) -> Tensor:
    """Coefficients c, a_1 ... a_h that bring ``c x + sum_j a_j v_j`` nearest to ``target``.

    Args:
        sample: the latents reached, shape (P, ...).
        outputs: the computed outputs at hand, newest first.
        target: the reference latents of the next step.
        nominal: the scheduler's first-order update of this step, shape (2,).
        fit: ridge and latent's freedom.

    Example:
        >>> x, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
        >>> nominal = torch.tensor([1.0, -0.5], dtype=torch.float64)
        >>> target = torch.tensor([[1.0, 1.0]])
        >>> fit_step(x, [v], target, nominal=nominal, fit=Fit(ridge=0.0))
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    vectors = [sample, *outputs, target]
    G = _gram([vector.flatten() for vector in vectors])
    n = len(vectors) - 1
    return solve_ridge(
        G[None, :n, :n], G[None, :n, n], nominal, ridge=fit.ridge, free_latent=fit.free_latent
    )[0]


def refit_plan(
    denoise: Denoise,
    latents: Sequence[Tensor],
    *,
    sigmas: Tensor,
    compute_steps: Sequence[int],
    nominal: Tensor,
    fit: Fit,
) -> TrajectoryPlan:
    """Run a schedule in closed loop, all calibration prompts in lockstep, fitting step by step.

    Args:
        denoise: the network; called once per computed step.
        latents: the reference latents x_0 ... x_T, each of shape (P, ...).
        sigmas: the table, shape (T + 1,).
        compute_steps: the computed steps.
        nominal: the scheduler's first-order update, shape (T, 2).
        fit: how coefficients are fitted; the sensitivity is not needed here.
    """
    T = len(nominal)
    computed = frozenset(check_compute_steps(compute_steps, T))
    z = torch.zeros(T, 1 + fit.history, dtype=torch.float64)
    x, past = latents[0], list[Tensor]()
    for k in range(T):
        if k in computed:
            past = [denoise(x, sigmas[k]), *past][: fit.history]
        fitted = fit_step(x, past, latents[k + 1], nominal=nominal[k], fit=fit)
        z[k, : len(fitted)] = fitted
        x = combine(x, past, z[k].tolist())
    return TrajectoryPlan(tuple(compute_steps), z[:, 0].clone(), z[:, 1:].clone())


def typical_distance(reached: Tensor, target: Tensor) -> float:
    """Geometric mean over prompts of the root mean square distance: what a mean PSNR tells.

    A plain mean would be that of the one prompt that strays the farthest.

    Args:
        reached: latents, shape (P, ...).
        target: what they should be, of the same shape.

    Example:
        >>> round(typical_distance(torch.tensor([[1.0], [100.0]]), torch.zeros(2, 1)), 6)
        10.0
    """
    squares = (reached.double() - target.double()).square().flatten(1).mean(1)
    return float(squares.clamp_min(torch.finfo(squares.dtype).tiny).log().mean().div(2).exp())


def _gram(vectors: Sequence[Tensor]) -> Tensor:
    """Inner products of flat vectors per element, in float64, a chunk at a time."""
    n = len(vectors[0])
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for start in range(0, n, CHUNK):
        rows = torch.stack([v[start : start + CHUNK].double() for v in vectors])
        total += (rows @ rows.mT).cpu()
    return total / n
