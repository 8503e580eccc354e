"""The reference loops: what both methods do, step by step, over any ``denoise(x, sigma) -> v``.

This is the executable definition that integrations are tested against. It knows no pipeline and
makes no decision: everything was decided in the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ertacache.core.plan import PaperPlan, TrajectoryPlan
from ertacache.core.rectify import rectify
from ertacache.core.residual import Cache
from ertacache.core.solver import Denoise, Euler, SolverFactory, Trajectory

__all__ = ["combine", "plain_plan", "run_paper", "run_trajectory"]


def combine(sample: Tensor, outputs: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """The rectified update ``c x + sum_j a_j v_j``; ``coefficients`` are c, a_1, a_2, ...

    Coefficients beyond the outputs at hand are not used.

    Example:
        >>> x, v = torch.tensor([1.0]), torch.tensor([10.0])
        >>> combine(x, [v, 2 * v], [0.5, 1.0, -0.5])
        tensor([0.5000])
    """
    x = coefficients[0] * sample
    for v, a in zip(outputs, coefficients[1:], strict=False):
        x = x.add(v, alpha=a)
    return x


def run_trajectory(
    denoise: Denoise, sample: Tensor, *, sigmas: Tensor, plan: TrajectoryPlan
) -> Trajectory:
    """Trajectory rectification: the network on the computed steps, the plan's scalars on all.

    Args:
        denoise: the network.
        sample: the noise x_0, shape (P, ...).
        sigmas: the table on which the profile was made, shape (T + 1,).
        plan: computed steps and coefficients.

    Returns:
        All latents, and the newest computed output at every step.
    """
    _check_steps(sigmas, plan.num_steps)
    computed = frozenset(plan.compute_steps)
    z = torch.cat([plan.latent[:, None], plan.outputs], dim=1).tolist()
    latents, used, past = [sample], [], list[Tensor]()
    for k in range(plan.num_steps):
        if k in computed:
            past = [denoise(latents[-1], sigmas[k]), *past][: plan.history]
        used.append(past[0])
        latents.append(combine(latents[-1], past, z[k]))
    return Trajectory(tuple(latents), tuple(used))


def run_paper(
    denoise: Denoise, sample: Tensor, *, plan: PaperPlan, solver: SolverFactory = Euler
) -> Trajectory:
    """Algorithm 1: reuse, the adjusted table and rectification, in the scheduler's own update.

    Args:
        denoise: the network.
        sample: the noise x_0, shape (P, ...).
        plan: computed steps, kind of reuse, table, gain and bias.
        solver: makes the solver for the plan's table.

    Returns:
        All latents, and the output used at every step.
    """
    computed = frozenset(plan.compute_steps)
    run = solver(plan.sigmas)
    latents, used = [sample], list[Tensor]()
    cache: Cache | None = None
    for k in range(plan.num_steps):
        x = latents[-1]
        if cache is None or k in computed:
            v = denoise(x, plan.sigmas[k])
            cache = Cache.of(v, x, reuse=plan.reuse)
        else:
            v = cache.reuse(x)
            if plan.gain is not None and plan.bias is not None:
                v = rectify(v, gain=plan.gain[k], bias=plan.bias[k])
        used.append(v)
        latents.append(run.step(v, k, x))
    return Trajectory(tuple(latents), tuple(used))


def plain_plan(sigmas: Tensor, compute_steps: Sequence[int]) -> TrajectoryPlan:
    """Plain reuse of the last output under Euler, as a plan.

    Example:
        >>> plain_plan(torch.tensor([1.0, 0.75, 0.0]), [0]).outputs.flatten()
        tensor([-0.2500, -0.7500], dtype=torch.float64)
    """
    d = sigmas.double().diff()
    return TrajectoryPlan(tuple(compute_steps), torch.ones_like(d), d[:, None])


def _check_steps(sigmas: Tensor, num_steps: int) -> None:
    if len(sigmas) != num_steps + 1:
        raise ValueError(f"a plan of {num_steps} steps, but a table of {len(sigmas) - 1}")
