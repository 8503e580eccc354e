"""The paper's method on one step of a run, and the two runs that calibrate it.

Each class is a ``Stepper`` of ``sampler``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ertacache.core.paper import (
    Cache,
    RectifyMode,
    RectifySums,
    fit_rectification,
    rectify,
    safe_ratio,
    step_scale,
)
from ertacache.core.plans import PaperPlan, Reuse
from ertacache.core.sampler import Advance

__all__ = ["GainFit", "PaperStepper", "ThresholdSearch"]


class PaperStepper:
    """Algorithm 1: a reused, rectified output in the scheduler's step on the plan's sigmas.

    Example:
        >>> plan = PaperPlan((0, 2), "velocity", torch.tensor([1.0, 0.5, 0.25, 0.0]).double())
        >>> stepper = PaperStepper(plan)
        >>> x = stepper.step(0, torch.tensor([3.0]), torch.tensor([2.0]), lambda v: 3 - v / 2)
        >>> stepper.step(1, x, None, lambda v: x - v / 4)
        tensor([1.5000])
    """

    flexible = True  # every reused step stands alone

    def __init__(self, plan: PaperPlan, *, cache_device: torch.device | None = None) -> None:
        """Keep the plan."""
        self.num_steps = plan.num_steps
        self.sigmas: Tensor | None = plan.sigmas
        self._computed, self._reuse = frozenset(plan.compute_steps), plan.reuse
        self._gain, self._bias = plan.gain, plan.bias
        self._device = cache_device
        self._cache: Cache | None = None

    def computes(self, k: int) -> bool:
        """Whether the network is evaluated on step ``k``."""
        return k in self._computed

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """Take the scheduler's step with the computed or reused output."""
        if v is None:
            return advance(self._reused(k, x))
        cache = Cache.of(_precise(v), x, reuse=self._reuse)
        if self._device is not None:
            cache = Cache(cache.kind, cache.feature.to(self._device))
        self._cache = cache
        return advance(v)

    def _reused(self, k: int, x: Tensor) -> Tensor:
        if self._cache is None:
            raise ValueError(f"step {k} is to be reused, but no step was computed before it")
        v = Cache(self._cache.kind, self._cache.feature.to(x.device)).reuse(x)
        if self._gain is None or self._bias is None:
            return v
        if self._gain.device != v.device:  # once per run, not once per step
            self._gain, self._bias = self._gain.to(v.device), self._bias.to(v.device)
        return rectify(v, gain=self._gain[k], bias=self._bias[k])

    def note_branch(self, raw: Tensor) -> None:
        """Nothing is made of it."""

    def switch(self) -> None:
        """Drop the cache: a feature of one network is not reused for another."""
        self._cache = None

    def held(self) -> Iterable[Tensor]:
        """The cached feature."""
        return [] if self._cache is None else [self._cache.feature]


class ThresholdSearch:
    """Algorithm 2 for one threshold: the network is evaluated on every step, and reuse decided.

    Step k is reused while eq. 12 is below the threshold; the first and the last step are always
    computed. The run goes on with the reused outputs, not rectified, on the nominal sigmas, so it
    measures phi of eq. 13 as well.

    Attributes:
        threshold: lambda.
        compute_steps: the steps that were computed so far.
        errors: eq. 12 of every step, shape (T,), float64; 0 on the first and the last.
        step_scales: phi of every step, shape (T,), float64; 1 on computed steps.
    """

    sigmas = None
    flexible = True

    def __init__(self, threshold: float, *, norms: Tensor, reuse: Reuse = "residual") -> None:
        """Prepare a run.

        Args:
            threshold: lambda.
            norms: mean absolute residual (with velocity reuse: output) of the full run on every
                step, which eq. 12 divides by, shape (T,).
            reuse: what a reused step returns, and what eq. 12 compares.
        """
        self.num_steps = len(norms)
        self.threshold = threshold
        self.compute_steps: tuple[int, ...] = ()
        self.errors = torch.zeros(len(norms), dtype=torch.float64)
        self.step_scales = torch.ones(len(norms), dtype=torch.float64)
        self._norms, self._reuse = norms, reuse
        self._cache: Cache | None = None
        self._previous = norms

    def computes(self, k: int) -> bool:
        """True: the network is evaluated on every step."""
        return True

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """Decide on step ``k`` and take it."""
        used = v = _computed(k, v)
        fresh = Cache.of(v, x, reuse=self._reuse)
        if self._cache is None or not self._is_close(k, self._cache, fresh):
            self.compute_steps += (k,)
            self._cache = fresh
        else:
            used = self._cache.reuse(x)
            self.step_scales[k] = step_scale(used, v, previous=self._previous)
        self._previous = used
        return advance(used)

    def _is_close(self, k: int, cache: Cache, fresh: Cache) -> bool:
        if k == self.num_steps - 1:
            return False
        distance = (cache.feature - fresh.feature).abs().mean(dtype=torch.float64).cpu()
        self.errors[k] = safe_ratio(distance, self._norms[k])
        return self.errors[k].item() < self.threshold

    def note_branch(self, raw: Tensor) -> None:
        """Nothing is made of it."""

    def switch(self) -> None:
        """Drop the cache: a feature of one network is not reused for another."""
        self._cache = None

    def held(self) -> Iterable[Tensor]:
        """The cached feature."""
        return [] if self._cache is None else [self._cache.feature]


class GainFit:
    """K and B of eq. 21, fitted in the run that will use them.

    The network is evaluated on every step; a reused step is fitted at the latent to which the
    rectified steps before it lead.
    """

    flexible = True

    def __init__(
        self, plan: PaperPlan, *, mode: RectifyMode = "scalar", channel_dim: int = 1
    ) -> None:
        """Prepare a run.

        Args:
            plan: compute schedule, kind of reuse and sigmas; its gain and bias are not used.
            mode: what shares one gain and bias. ``"element"`` binds them to the sample's shape and
                needs many prompts: with one prompt K is 0 everywhere.
            channel_dim: the dimension of channels in a batch, for mode ``"channel"``.
        """
        self.num_steps = plan.num_steps
        self.sigmas: Tensor | None = plan.sigmas
        self._plan, self._mode, self._channel_dim = plan, mode, channel_dim
        self._fits: dict[int, tuple[Tensor, Tensor]] = {}
        self._cache: Cache | None = None

    def computes(self, k: int) -> bool:
        """True: the network is evaluated on every step."""
        return True

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """Fit step ``k``, if it is reused, and take it."""
        v = _computed(k, v)
        if self._cache is None or k in self._plan.compute_steps:
            self._cache = Cache.of(v, x, reuse=self._plan.reuse)
            return advance(v)
        reused = self._cache.reuse(x)
        sums = RectifySums.of(reused, v, mode=self._mode, channel_dim=self._channel_dim)
        K, B = fit_rectification(sums)
        self._fits[k] = K.cpu(), B.cpu()
        return advance(rectify(reused, gain=K, bias=B))

    def plan(self) -> PaperPlan:
        """The plan with gain and bias, shape (T, ...); 0 and -2, no change, on computed steps."""
        T, zero = self.num_steps, torch.zeros((), dtype=torch.float64)
        none = next((torch.zeros_like(K) for K, _ in self._fits.values()), zero)
        rows = [self._fits.get(k, (none, none - 2)) for k in range(T)]
        gain, bias = (torch.stack(column) for column in zip(*rows, strict=True))
        plan = self._plan
        return PaperPlan(plan.compute_steps, plan.reuse, plan.sigmas, gain, bias)

    def note_branch(self, raw: Tensor) -> None:
        """Nothing is made of it."""

    def switch(self) -> None:
        """Drop the cache: a feature of one network is not reused for another."""
        self._cache = None

    def held(self) -> Iterable[Tensor]:
        """The cached feature."""
        return [] if self._cache is None else [self._cache.feature]


def _precise(tensor: Tensor) -> Tensor:
    """Half precision as float32, in which schedulers add up their steps."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _computed(k: int, v: Tensor | None) -> Tensor:
    if v is None:
        raise ValueError(f"step {k} was reused, but a calibration run evaluates every step")
    return _precise(v)
