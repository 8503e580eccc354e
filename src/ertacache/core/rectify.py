"""Explicit error rectification: the closed-form gain K and bias B of every reused step.

The shift error eps = v~ - v is modelled as ``(K v~ + B) / 4 + 1/2``, the line that the paper fits.
K and B are fitted from sums that can be streamed and merged. Knows no schedule search and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ertacache.core.gram import RunStatistics
from ertacache.core.plan import Reuse, check_compute_steps
from ertacache.core.residual import ReusedStep, shift_error, walk_schedule
from ertacache.core.solver import Denoise, Euler, SolverFactory

__all__ = [
    "RectifyMode",
    "RectifySums",
    "calibrate_rectification",
    "fit_rectification",
    "profile_rectification",
    "rectify",
]

RectifyMode = Literal["scalar", "channel", "element"]
"""What shares one gain and bias: the whole sample, one channel, or nothing."""

FLAT = 16 * torch.finfo(torch.float64).eps  # relative spread below which a mean is all rounding


@dataclass(frozen=True, eq=False)
class RectifySums:
    """Eq. 20: the moments of reused outputs v~ and their shift errors eps; ``a + b`` merges two.

    All tensors are float64 and broadcast against one sample: shape () for ``"scalar"``, for
    example (C, 1, 1) for ``"channel"``, the sample's own for ``"element"``.

    Attributes:
        count: n, how many values each entry was summed over.
        mean_output: the mean of v~.
        mean_shift: the mean of eps.
        output_moment: S_vv, the sum of squares of v~ about its mean.
        cross_moment: S_ve, the sum of products of v~ and eps about their means.

    Example:
        >>> v_tilde, v = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 1.0, 1.5]])
        >>> sums = RectifySums.of(v_tilde, v, mode="scalar")
        >>> sums.count, sums.output_moment.item(), sums.cross_moment.item()
        (3, 2.0, 1.0)
    """

    count: int
    mean_output: Tensor
    mean_shift: Tensor
    output_moment: Tensor
    cross_moment: Tensor

    @classmethod
    def of(
        cls, reused: Tensor, computed: Tensor, *, mode: RectifyMode, channel_dim: int = 1
    ) -> RectifySums:
        """Sum over a batch of reused outputs v~ and computed outputs v, shape (P, ...).

        ``channel_dim`` counts the batch dimension as 0 and is used by mode ``"channel"`` only.
        """
        dims = _summed_dims(reused.ndim, mode, channel_dim)
        v = reused.double()
        eps = shift_error(v, computed.double())
        v_bar, eps_bar = v.mean(dims, keepdim=True), eps.mean(dims, keepdim=True)
        S_vv = (v - v_bar).square().sum(dims, keepdim=True)
        S_ve = ((v - v_bar) * (eps - eps_bar)).sum(dims, keepdim=True)
        moments = [
            m[0] if mode != "scalar" else m.reshape(()) for m in (v_bar, eps_bar, S_vv, S_ve)
        ]
        return cls(v.numel() // S_vv.numel(), *moments)

    def __add__(self, other: RectifySums) -> RectifySums:
        """Merge two disjoint sets of samples (Chan, Golub and LeVeque's update)."""
        if self.mean_output.shape != other.mean_output.shape:
            raise ValueError(
                f"sums of shapes {tuple(self.mean_output.shape)} and "
                f"{tuple(other.mean_output.shape)} do not merge"
            )
        n = self.count + other.count
        share = other.count / n
        dv = other.mean_output - self.mean_output
        deps = other.mean_shift - self.mean_shift
        return RectifySums(
            n,
            self.mean_output + share * dv,
            self.mean_shift + share * deps,
            self.output_moment + other.output_moment + self.count * share * dv * dv,
            self.cross_moment + other.cross_moment + self.count * share * dv * deps,
        )


def _summed_dims(ndim: int, mode: RectifyMode, channel_dim: int) -> tuple[int, ...]:
    if mode == "scalar":
        return tuple(range(ndim))
    if mode == "element":
        return (0,)
    if mode != "channel":
        raise ValueError(f"mode must be 'scalar', 'channel' or 'element', got {mode!r}")
    kept = channel_dim % ndim
    if kept == 0:
        raise ValueError("channel_dim 0 is the batch of prompts; name the channels' dimension")
    return tuple(i for i in range(ndim) if i != kept)


def fit_rectification(sums: RectifySums) -> tuple[Tensor, Tensor]:
    """Eq. 21, corrected: ``K = 4 S_ve / S_vv`` and ``B = 4 (eps_bar - 1/2) - K v_bar``.

    Where v~ does not vary, K = 0 and the bias alone removes the mean error.

    Example:
        >>> v_tilde, v = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 1.0, 1.5]])
        >>> gain, bias = fit_rectification(RectifySums.of(v_tilde, v, mode="scalar"))
        >>> gain.item(), bias.item()
        (2.0, -2.0)
    """
    S_vv, v_bar = sums.output_moment, sums.mean_output
    # Equal values leave a rounding in the mean, and S_vv would be noise that K divides by.
    varies = S_vv > sums.count * (FLAT * v_bar).square()
    K = torch.where(varies, 4 * sums.cross_moment / S_vv, torch.zeros_like(S_vv))
    B = 4 * (sums.mean_shift - 0.5) - K * v_bar
    return K, B


def rectify(reused_output: Tensor, *, gain: Tensor, bias: Tensor) -> Tensor:
    """Eq. 17 in place of eq. 15: ``v~ - ((K v~ + B) / 4 + 1/2)``; K = 0, B = -2 changes nothing.

    Example:
        >>> gain, bias = torch.tensor(2.0), torch.tensor(-2.0)
        >>> rectify(torch.tensor([1.0, 3.0]), gain=gain, bias=bias)
        tensor([0.5000, 1.5000])
    """
    # B is near -2, so B/4 + 1/2 is taken before a cast to half precision would eat it.
    slope, offset = gain.double() / 4, bias.double() / 4 + 0.5
    return reused_output - (slope.to(reused_output) * reused_output + offset.to(reused_output))


def calibrate_rectification(
    denoise: Denoise,
    sample: Tensor,
    *,
    sigmas: Tensor,
    compute_steps: Sequence[int],
    reuse: Reuse = "residual",
    solver: SolverFactory = Euler,
    mode: RectifyMode = "scalar",
    channel_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Gain and bias of every step, measured on calibration noise in the run that will use them.

    Each reused step is fitted on the latents that the rectified steps before it lead to.

    Args:
        denoise: the network; called once per step.
        sample: the noise of the calibration prompts, shape (P, ...).
        sigmas: the table of the run, adjusted or not, shape (T + 1,).
        compute_steps: the computed steps.
        reuse: what a reused step returns.
        solver: makes the solver for the table.
        mode: what shares one gain and bias. ``"element"`` binds them to the sample's shape and
            needs many prompts: with one prompt K is 0 everywhere.
        channel_dim: the dimension of channels in a batch, for mode ``"channel"``.

    Returns:
        K and B, float64, shape (T, ...) where row k broadcasts against one sample. Rows of
        computed steps hold 0 and -2, which change nothing.

    Example:
        >>> table = torch.tensor([1.0, 0.5, 0.0])
        >>> gain, bias = calibrate_rectification(
        ...     lambda x, sigma: x, torch.tensor([[1.0], [2.0]]), sigmas=table,
        ...     compute_steps=[0], reuse="velocity",
        ... )
        >>> gain.tolist(), bias.tolist()
        ([0.0, 2.0], [-2.0, -2.0])
    """
    fits: dict[int, tuple[Tensor, Tensor]] = {}

    def visit(at: ReusedStep) -> Tensor:
        sums = RectifySums.of(at.reused, at.computed, mode=mode, channel_dim=channel_dim)
        K, B = fits[at.step] = fit_rectification(sums)
        return rectify(at.reused, gain=K, bias=B)

    walk_schedule(
        denoise,
        sample,
        sigmas=sigmas,
        compute_steps=compute_steps,
        reuse=reuse,
        solver=solver,
        visit=visit,
    )
    none = RectifySums.of(sample, sample, mode=mode, channel_dim=channel_dim).mean_shift
    identity = (none, none - 2)
    rows = [fits.get(k, identity) for k in range(len(sigmas) - 1)]
    gain, bias = (torch.stack(column) for column in zip(*rows, strict=True))
    return gain, bias


def profile_rectification(
    statistics: RunStatistics, *, compute_steps: Sequence[int], reuse: Reuse = "residual"
) -> tuple[Tensor, Tensor]:
    """Scalar K and B without the network: every output is taken to be the reference run's.

    A reused output is then a combination of the profile's vectors, ``x_k - x_j + v_j`` or ``v_j``
    with j the last computed step, and the moments of eq. 20 follow from Gram matrix and means.

    Args:
        statistics: the profile; its prompts count alike.
        compute_steps: the computed steps.
        reuse: what a reused step returns.

    Returns:
        Gain and bias, shape (T,); K = 0 and B = -2, which change nothing, on computed steps.
    """
    T = statistics.num_steps
    C = torch.tensor(check_compute_steps(compute_steps, T))
    G, means = statistics.inner.mean(0), statistics.means.mean(0)
    gain, bias = torch.zeros(T, dtype=torch.float64), torch.full((T,), -2.0, dtype=torch.float64)
    for k in sorted(set(range(T)) - set(C.tolist())):
        j = int(C[k > C][-1])
        v = torch.zeros(2 * T + 1, dtype=torch.float64)
        v[T + 1 + j] = 1
        if reuse == "residual":
            v[k], v[j] = 1, -1
        eps = v.clone()
        eps[T + 1 + k] -= 1
        v_bar, eps_bar = v @ means, eps @ means
        moments = (v @ G @ v - v_bar**2).clamp_min(0), v @ G @ eps - v_bar * eps_bar
        gain[k], bias[k] = fit_rectification(RectifySums(1, v_bar, eps_bar, *moments))
    return gain, bias
