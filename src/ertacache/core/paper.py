"""The paper's equations: reuse (5-7), thresholds (12), phi (13, 14), gain K and bias B (17-21).

Everything here is a formula on tensors or on a profile's statistics. What a run does with them on
each step stands in ``steppers``: on the network, the threshold search, phi, K and B are measured
there. Differences from the printed text are listed in ``docs/corrections.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from ertacache.core.gram import RunStatistics
from ertacache.core.plans import PaperPlan, Reuse, check_compute_steps

__all__ = [
    "Cache",
    "RectifyMode",
    "RectifySums",
    "adjusted_sigmas",
    "fit_rectification",
    "pick_schedule",
    "profile_plan",
    "profile_rectification",
    "profile_step_scales",
    "rectify",
    "relative_l1",
    "residual",
    "reuse_distances",
    "safe_ratio",
    "search_profile",
    "shift_error",
    "step_scale",
    "sweep_profile",
]

RectifyMode = Literal["scalar", "channel", "element"]
"""What shares one gain and bias: the whole sample, one channel, or nothing."""

FLAT = 16 * torch.finfo(torch.float64).eps  # relative spread below which a mean is all rounding


def residual(model_output: Tensor, sample: Tensor) -> Tensor:
    """Eq. 5: ``r = v - x``, what the network adds to its input.

    Example:
        >>> residual(torch.tensor([3.0]), torch.tensor([1.0]))
        tensor([2.])
    """
    return model_output - sample


@dataclass(frozen=True, eq=False)
class Cache:
    """What a computed step leaves for the reused steps after it.

    Eq. 6 is ``v~ = x + r~``; under Euler that is a damped output, ``(1 + d) v`` one step later.
    Plain reuse is ``v~ = v`` of the last computed step, whatever the latent.

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
        """The output v~ of a reused step at ``sample``: eq. 6, or plain reuse."""
        return sample + self.feature if self.kind == "residual" else self.feature


def shift_error(reused_output: Tensor, model_output: Tensor) -> Tensor:
    """Eq. 7: the feature shift error ``eps = v~ - v``.

    Example:
        >>> shift_error(torch.tensor([2.5]), torch.tensor([3.0]))
        tensor([-0.5000])
    """
    return reused_output - model_output


def safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient of two non-negative tensors, with 0/0 defined as 0.

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


def search_profile(l1: Tensor, norm: Tensor, *, threshold: float) -> tuple[int, ...]:
    """Algorithm 2 without the network, on the outputs of the full run.

    Args:
        l1: L1 distance of the residuals (or outputs) of any two steps, shape (P, T, T).
        norm: L1 norm of each step's residual (or output), shape (P, T).
        threshold: lambda.

    Example:
        >>> import torch
        >>> position = torch.tensor([0.0, 1.0, 3.0, 4.0, 9.0])
        >>> l1 = (position[:, None] - position).abs()[None]
        >>> search_profile(l1, torch.ones(1, 5), threshold=1.5)
        (0, 2, 4)
    """
    steps, _ = _walk_profile(_relative(l1, norm), threshold)
    return steps


def sweep_profile(l1: Tensor, norm: Tensor) -> dict[float, tuple[int, ...]]:
    """Every schedule that ``search_profile`` can return, by the smallest threshold that gives it.

    Decisions change at finitely many thresholds, so the sweep is complete. The number of computed
    steps need not fall with every threshold: a skipped refresh may cost two later ones.

    Example:
        >>> import torch
        >>> position = torch.tensor([0.0, 1.0, 3.0, 4.0, 9.0])
        >>> l1 = (position[:, None] - position).abs()[None]
        >>> for threshold, steps in sweep_profile(l1, torch.ones(1, 5)).items():
        ...     print(round(threshold, 3), steps)
        0.0 (0, 1, 2, 3, 4)
        1.0 (0, 2, 4)
        3.0 (0, 3, 4)
        4.0 (0, 4)
    """
    D = _relative(l1, norm)
    schedules: dict[float, tuple[int, ...]] = {}
    lam, change = 0.0, 0.0
    while change < math.inf:
        schedules[lam], change = _walk_profile(D, lam)
        lam = math.nextafter(change, math.inf)  # reuse means strictly below lambda
    return schedules


def _relative(l1: Tensor, norm: Tensor) -> list[list[float]]:
    D: list[list[float]] = safe_ratio(l1.double().sum(0), norm.double().sum(0)).tolist()
    return D


def _walk_profile(D: list[list[float]], lam: float) -> tuple[tuple[int, ...], float]:
    """Return the schedule, and the smallest distance at which a step was computed."""
    last = len(D) - 1
    steps, change = [0], math.inf
    for k in range(1, last):
        error = D[steps[-1]][k]
        if not error < lam:
            steps.append(k)
            change = min(change, error)
    return (*steps, last) if last else (0,), change


def pick_schedule(
    schedules: Mapping[float, tuple[int, ...]], budget: int
) -> tuple[float, tuple[int, ...]]:
    """The threshold and schedule with the most computed steps within ``budget``.

    Among equals the smallest threshold wins. ``schedules`` are those of ``sweep_profile``.

    Example:
        >>> pick_schedule({0.1: (0, 1, 2, 3), 0.2: (0, 2, 3), 0.3: (0, 3)}, 3)
        (0.2, (0, 2, 3))
    """
    within = [(-len(steps), lam) for lam, steps in schedules.items() if len(steps) <= budget]
    if not within:
        raise ValueError(f"no schedule computes at most {budget} steps; try larger thresholds")
    _, lam = min(within)
    return lam, schedules[lam]


def step_scale(reused: Tensor, computed: Tensor, *, previous: Tensor) -> float:
    """Phi of eq. 13: ``clip(1 - |v~ - v|_1 / |v - v_previous|_1, 0, 1)``.

    Where the output did not change (both norms zero) the step keeps its length.

    Args:
        reused: v~, what the step reuses.
        computed: v, the network's output at the same latent.
        previous: the output used by the step before. With velocity reuse it is v~ itself, the
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

    Eq. 14 is read as "remaining budget over remaining steps"; on a non-uniform schedule the
    remaining nominal intervals share one factor. A step with phi = 0 has length zero.

    Args:
        sigmas: the nominal sigma schedule, strictly descending, shape (T + 1,).
        step_scales: phi of every step, shape (T,); 1 on computed steps, the last one included.

    Returns:
        The adjusted schedule, float64, never increasing, with the same two ends.

    Example:
        >>> sigmas = torch.tensor([1.0, 0.75, 0.5, 0.25, 0.0])
        >>> adjusted_sigmas(sigmas, torch.tensor([1.0, 0.0, 1.0, 1.0])).tolist()
        [1.0, 0.75, 0.75, 0.375, 0.0]
    """
    nominal: list[float] = sigmas.double().tolist()
    scales: list[float] = step_scales.double().tolist()
    _check_scales(nominal, scales)
    end, adjusted = nominal[-1], [nominal[0]]
    for start, following, phi in zip(nominal, nominal[1:], scales, strict=False):
        sigma = adjusted[-1]
        stretch = (sigma - end) / (start - end)
        full = following + (stretch - 1) * (following - end)
        # This form is exact for phi = 0 and phi = 1; the minimum undoes an upward rounding.
        adjusted.append(min(sigma, phi * full + (1 - phi) * sigma))
    return torch.tensor(adjusted, dtype=torch.float64)


def _check_scales(sigmas: list[float], scales: list[float]) -> None:
    if len(scales) != len(sigmas) - 1:
        raise ValueError(f"{len(sigmas) - 1} steps need as many step_scales, got {len(scales)}")
    if any(not a > b for a, b in pairwise(sigmas)):
        raise ValueError("sigmas must be strictly descending")
    if any(not 0 <= phi <= 1 for phi in scales):
        raise ValueError("step_scales must lie between 0 and 1")
    if scales[-1] != 1:
        raise ValueError("the last step must be computed: its step scale has to be 1")


def profile_step_scales(l1: Tensor, output_l1: Tensor, *, compute_steps: Sequence[int]) -> Tensor:
    """Phi of eq. 13 without the network, on the outputs of the full run.

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


def profile_rectification(
    statistics: RunStatistics, *, compute_steps: Sequence[int], reuse: Reuse = "residual"
) -> tuple[Tensor, Tensor]:
    """Scalar K and B without the network, on the outputs of the full run.

    A reused output is then a combination of the profile's vectors, ``x_k - x_j + v_j`` or ``v_j``
    with j the last computed step, and the moments of eq. 20 follow from Gram matrix and means.

    Args:
        statistics: the profile; its prompts count alike.
        compute_steps: the computed steps.
        reuse: what a reused step returns.

    Returns:
        Gain and bias, shape (T,); K = 0 and B = -2, which change nothing, on computed steps.
    """
    T, gram = statistics.num_steps, statistics.gram
    C = torch.tensor(check_compute_steps(compute_steps, T))
    G, means = gram.mean().products[0], statistics.means.mean(0)
    gain, bias = torch.zeros(T, dtype=torch.float64), torch.full((T,), -2.0, dtype=torch.float64)
    for k in sorted(set(range(T)) - set(C.tolist())):
        j = int(C[k > C][-1])
        v = torch.zeros(gram.size, dtype=torch.float64)  # v~ in terms of the full run's vectors
        v[gram.v(j)] = 1
        if reuse == "residual":
            v[gram.x(k)], v[gram.x(j)] = 1, -1
        eps = v.clone()
        eps[gram.v(k)] -= 1
        v_bar, eps_bar = v @ means, eps @ means
        moments = (v @ G @ v - v_bar**2).clamp_min(0), v @ G @ eps - v_bar * eps_bar
        gain[k], bias[k] = fit_rectification(RectifySums(1, v_bar, eps_bar, *moments))
    return gain, bias


def reuse_distances(statistics: RunStatistics, reuse: Reuse) -> tuple[Tensor, Tensor]:
    """What eq. 12 compares: L1 distances (P, T, T) of cached features, and their norms (P, T)."""
    if reuse == "velocity":
        return statistics.output_l1, statistics.output_norm
    return statistics.residual_l1, statistics.residual_norm


def profile_plan(
    statistics: RunStatistics,
    sigmas: Tensor,
    *,
    compute_steps: tuple[int, ...],
    reuse: Reuse = "residual",
    adjust_timesteps: bool = True,
    rectify: bool = True,
) -> PaperPlan:
    """The paper's plan of a compute schedule, all of it from a profile.

    Args:
        statistics: the profile.
        sigmas: the nominal sigma schedule.
        compute_steps: the computed steps, first and last included.
        reuse: what a reused step returns.
        adjust_timesteps: adjust the sigma schedule by phi.
        rectify: rectify reused outputs by K and B.
    """
    if adjust_timesteps:
        l1, _ = reuse_distances(statistics, reuse)
        phi = profile_step_scales(l1, statistics.output_l1, compute_steps=compute_steps)
        sigmas = adjusted_sigmas(sigmas, phi)
    if not rectify:
        return PaperPlan(compute_steps, reuse, sigmas)
    gain, bias = profile_rectification(statistics, compute_steps=compute_steps, reuse=reuse)
    return PaperPlan(compute_steps, reuse, sigmas, gain, bias)
