"""What a reused step returns, how far it is off, and the walk that calibration shares.

Sec. 3.1 and 3.2 of the paper: residual caching, the relative L1 distance, and the two error terms.
Does not know how the computed steps were chosen nor what is done about the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ertacache.core.plan import Reuse, check_compute_steps
from ertacache.core.solver import Denoise, SolverFactory

__all__ = [
    "Cache",
    "ReusedStep",
    "accumulated_deviation",
    "relative_l1",
    "residual",
    "reuse_residual",
    "reuse_velocity",
    "safe_ratio",
    "shift_error",
    "walk_schedule",
]


def residual(model_output: Tensor, sample: Tensor) -> Tensor:
    """Eq. 5: ``r = v - x``, what the network adds to its input.

    Example:
        >>> residual(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([2.])
    """
    return model_output - sample


def reuse_residual(sample: Tensor, residual: Tensor) -> Tensor:
    """Eq. 6: ``v~ = x + r~``. Under Euler this is a damped output, ``(1 + d) v`` one step later.

    Example:
        >>> reuse_residual(torch.tensor([0.5]), torch.tensor([2.0]))
        tensor([2.5000])
    """
    return sample + residual


def reuse_velocity(sample: Tensor, model_output: Tensor) -> Tensor:
    """Plain reuse in place of eq. 6: ``v~ = v`` of the last computed step, wherever ``sample`` is.

    Example:
        >>> reuse_velocity(torch.tensor([0.5]), torch.tensor([3.0]))
        tensor([3.])
    """
    return model_output


@dataclass(frozen=True, eq=False)
class Cache:
    """What a computed step leaves for the reused steps after it.

    Attributes:
        kind: ``"residual"`` (eq. 5, 6) or ``"velocity"`` (plain reuse).
        feature: the residual or the output of the computed step, shape of a sample.

    Example:
        >>> x, v = torch.tensor([1.0]), torch.tensor([3.0])
        >>> Cache.of(v, x, reuse="residual").reuse(torch.tensor([0.5]))
        tensor([2.5000])
        >>> Cache.of(v, x, reuse="velocity").reuse(torch.tensor([0.5]))
        tensor([3.])
    """

    kind: Reuse
    feature: Tensor

    @classmethod
    def of(cls, model_output: Tensor, sample: Tensor, *, reuse: Reuse) -> Cache:
        """Remember a computed step."""
        if reuse == "residual":
            return cls(reuse, residual(model_output, sample))
        if reuse == "velocity":
            return cls(reuse, model_output)
        raise ValueError(f"reuse must be 'residual' or 'velocity', got {reuse!r}")

    def reuse(self, sample: Tensor) -> Tensor:
        """Return the output v~ of a reused step at ``sample``."""
        again = reuse_residual if self.kind == "residual" else reuse_velocity
        return again(sample, self.feature)


def shift_error(reused_output: Tensor, model_output: Tensor) -> Tensor:
    """Eq. 7: the feature shift error ``eps = v~ - v``.

    Example:
        >>> shift_error(torch.tensor([2.5]), torch.tensor([3.0]))
        tensor([-0.5000])
    """
    return reused_output - model_output


def accumulated_deviation(shift_errors: Tensor | Sequence[Tensor], intervals: Tensor) -> Tensor:
    """Eq. 11: ``delta[k+1] = sum_{j <= k} d[j] eps[j]``, shift errors after step amplification.

    Exact under Euler when ``eps[j] = v~[j] - v[j]`` is taken against the reference run's outputs.

    Args:
        shift_errors: eps of consecutive steps, shape (m, ...); zero on computed steps.
        intervals: their ``sigmas[k + 1] - sigmas[k]``, shape (m,).

    Returns:
        The deviation of the latent after each of the m steps, shape (m, ...).

    Example:
        >>> accumulated_deviation(torch.tensor([[1.0], [2.0]]), torch.tensor([-0.5, -0.25]))
        tensor([[-0.5000],
                [-1.0000]])
    """
    eps = shift_errors if isinstance(shift_errors, Tensor) else torch.stack(list(shift_errors))
    d = intervals.to(eps).reshape(-1, *[1] * (eps.ndim - 1))
    return torch.cumsum(d * eps, dim=0)


def safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient of two non-negative tensors, where nothing over nothing is nothing.

    Example:
        >>> safe_ratio(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([2.0, 0.0, 0.0]))
        tensor([0.5000, 0.0000,    inf])
    """
    return torch.where(numerator == 0, torch.zeros_like(numerator), numerator / denominator)


def relative_l1(cached: Tensor, computed: Tensor, *, reference: Tensor) -> float:
    """Eq. 12: ``|cached - computed|_1 / |reference|_1``, both summed over all prompts.

    Example:
        >>> a, b = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])
        >>> relative_l1(a, b, reference=torch.tensor([2.0, -2.0]))
        0.25
    """
    distance = (cached - computed).abs().sum(dtype=torch.float64)
    return safe_ratio(distance, reference.abs().sum(dtype=torch.float64)).item()


@dataclass(frozen=True, eq=False)
class ReusedStep:
    """A reused step of a calibration run, together with what the network would have said.

    Attributes:
        step: its number k.
        reused: v~, the output the cache gives.
        computed: v, the network's output at the same latent.
        previous: the output that step k - 1 used.
    """

    step: int
    reused: Tensor
    computed: Tensor
    previous: Tensor


def walk_schedule(
    denoise: Denoise,
    sample: Tensor,
    *,
    sigmas: Tensor,
    compute_steps: Sequence[int],
    reuse: Reuse,
    solver: SolverFactory,
    visit: Callable[[ReusedStep], Tensor],
) -> Tensor:
    """Run a schedule as inference does, but ask the network on reused steps too.

    Args:
        denoise: the network; called once per step.
        sample: the noise of the calibration prompts, shape (P, ...).
        sigmas: the table of the run, adjusted or not, shape (T + 1,).
        compute_steps: the computed steps, ascending, the first is 0.
        reuse: what a reused step returns.
        solver: makes the solver for the table.
        visit: sees every reused step in order and returns the output that the run uses there.

    Returns:
        The final latent.

    Example:
        >>> table = torch.tensor([1.0, 0.5, 0.0])
        >>> from ertacache.core.solver import Euler
        >>> walk_schedule(
        ...     lambda x, sigma: x, torch.tensor([[4.0]]), sigmas=table, compute_steps=[0],
        ...     reuse="velocity", solver=Euler, visit=lambda step: step.reused,
        ... )
        tensor([[0.]])
    """
    computed = frozenset(check_compute_steps(compute_steps, len(sigmas) - 1))
    run, x = solver(sigmas), sample
    for k in range(len(sigmas) - 1):
        v = denoise(x, sigmas[k])
        if k in computed:
            cache, used = Cache.of(v, x, reuse=reuse), v
        else:
            used = visit(ReusedStep(k, cache.reuse(x), v, used))
        x = run.step(used, k, x)
    return x
