"""What each method does on one step of a run: ``step(k, x, v, advance)``, one class per method.

v is None on a reused step; ``advance`` is the scheduler's own step. The same objects run in a
pipeline, driven by ``integration``, and over a plain function, driven by ``sampler``. A stepper is
made fresh for every run and knows neither pipelines nor files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ertacache.core.distance import distances
from ertacache.core.gram import gram_of
from ertacache.core.paper import (
    Cache,
    RectifyMode,
    RectifySums,
    fit_rectification,
    rectify,
    safe_ratio,
    step_scale,
)
from ertacache.core.plans import PaperPlan, Reuse, TrajectoryPlan, check_compute_steps
from ertacache.core.simulate import Fit, solve_ridge

__all__ = [
    "Advance",
    "FullStepper",
    "GainFit",
    "PaperStepper",
    "RefitStepper",
    "Stepper",
    "ThresholdSearch",
    "TrajectoryStepper",
    "combine",
    "fit_step",
    "make_stepper",
]

Advance = Callable[[Tensor], Tensor]
"""The scheduler's own step from the present latent: the output to use in, the next latent out."""


class Stepper(Protocol):
    """One run of one method."""

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T that it was made for."""
        ...

    @property
    def sigmas(self) -> Tensor | None:
        """The sigma schedule that the run has to have, (T + 1,); None keeps the scheduler's."""
        ...

    @property
    def flexible(self) -> bool:
        """Whether a step that is to be reused may be computed instead."""
        ...

    def computes(self, k: int) -> bool:
        """Whether the network is evaluated on step ``k``."""
        ...

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """Return the latent after step ``k``.

        Args:
            k: number of the step.
            x: the latent before it, in float32 or finer.
            v: the network's output at x; None on a reused step.
            advance: the scheduler's own step.
        """
        ...

    def switch(self) -> None:
        """Note that the next output is that of another network."""
        ...

    def held(self) -> Iterable[Tensor]:
        """The tensors kept between steps."""
        ...


def make_stepper(
    plan: TrajectoryPlan | PaperPlan, *, cache_device: torch.device | None = None
) -> Stepper:
    """The stepper of a plan; ``cache_device`` is where outputs are kept, None leaves them."""
    if isinstance(plan, TrajectoryPlan):
        return TrajectoryStepper(plan, cache_device=cache_device)
    return PaperStepper(plan, cache_device=cache_device)


class FullStepper:
    """A full run: every step is computed, and the scheduler's own."""

    sigmas = None
    flexible = True

    def __init__(self, num_steps: int) -> None:
        """Keep the number of steps."""
        self.num_steps = num_steps

    def computes(self, k: int) -> bool:
        """True: the network is evaluated on every step."""
        return True

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """The scheduler's step with the output as it is."""
        if v is None:
            raise ValueError(f"step {k} was reused in a full run")
        return advance(v)

    def switch(self) -> None:
        """Nothing is kept."""

    def held(self) -> Iterable[Tensor]:
        """Nothing."""
        return ()


class TrajectoryStepper:
    """Trajectory rectification: the plan is the solver, on computed and reused steps alike.

    Example:
        >>> z = torch.tensor([[[1.0, -0.5]], [[1.0, -0.5]]], dtype=torch.float64)
        >>> stepper = TrajectoryStepper(TrajectoryPlan((0,), z))
        >>> x = stepper.step(0, torch.tensor([3.0]), torch.tensor([2.0]), advance=torch.clone)
        >>> stepper.step(1, x, None, advance=torch.clone)
        tensor([1.])
    """

    sigmas = None
    flexible = False  # the coefficients are for the planned outputs, and no other

    def __init__(self, plan: TrajectoryPlan, *, cache_device: torch.device | None = None) -> None:
        """Turn the plan's coefficients into Python numbers: a step must not read a device."""
        self._computed = frozenset(plan.compute_steps)
        self._rows: list[list[float]] = plan.coefficients[:, 0].tolist()
        self.num_steps = plan.num_steps
        self._device = cache_device
        self._past: list[Tensor] = []

    def computes(self, k: int) -> bool:
        """Whether the network is evaluated on step ``k``."""
        return k in self._computed

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """The rectified update ``c x + sum_j a_j v_j`` of step ``k``."""
        if v is not None:
            self._past = [_keep(v, self._device), *self._past][: len(self._rows[k]) - 1]
        past = self._past
        if self._device is not None:
            past = [output.to(x.device) for output in past]
        return combine(x, past, self._rows[k])

    def switch(self) -> None:
        """Keep the history: the coefficients were fitted across the change of networks."""

    def held(self) -> Iterable[Tensor]:
        """The history."""
        return self._past


class RefitStepper:
    """Closed-loop refit: the rectified update, fitted on every step to the latents reached there.

    All calibration prompts run in lockstep, in one batch; if they run in several, ``reduce`` joins
    the normal equations of all batches.

    Attributes:
        coefficients: those fitted so far, shape (T, 1, 1 + H), float64.
        distances: root mean square distance of every prompt to its reference latent after the last
            step, shape (P,), float64.
    """

    sigmas = None
    flexible = False

    def __init__(
        self,
        latents: Sequence[Tensor],
        *,
        compute_steps: Sequence[int],
        nominal: Tensor,
        fit: Fit,
        fitted: Tensor | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Prepare to fit a compute schedule.

        Args:
            latents: the reference latents x_0 ... x_T, each of shape (P, ...).
            compute_steps: the computed steps.
            nominal: the scheduler's first-order update, shape (T, 2).
            fit: history and ridge.
            fitted: numbers of the prompts that are fitted on; the others run along. None fits on
                all.
            reduce: adds up the inner products of several batches of prompts.
        """
        self._latents, self._nominal, self._fit, self._fitted = latents, nominal, fit, fitted
        self._reduce = reduce
        self._computed = frozenset(check_compute_steps(compute_steps, len(nominal)))
        self._past: list[Tensor] = []
        self.num_steps = len(nominal)
        self.coefficients = torch.zeros(len(nominal), 1, 1 + fit.history, dtype=torch.float64)
        self.distances = torch.full((len(latents[0]),), torch.inf, dtype=torch.float64)

    def computes(self, k: int) -> bool:
        """Whether the network is evaluated on step ``k``."""
        return k in self._computed

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """Fit step ``k`` and take it."""
        if v is not None:
            self._past = [v, *self._past][: self._fit.history]
        target = self._latents[k + 1].to(x.device)
        z = fit_step(
            self._chosen(x),
            [self._chosen(output) for output in self._past],
            self._chosen(target),
            nominal=self._nominal[k],
            ridge=self._fit.ridge,
            reduce=self._reduce,
        )
        self.coefficients[k, 0, : len(z)] = z
        reached = combine(x, self._past, z.tolist())
        if k + 1 == self.num_steps:
            self.distances = distances(reached, target)
        return reached

    def _chosen(self, batch: Tensor) -> Tensor:
        return batch if self._fitted is None else batch[self._fitted.to(batch.device)]

    def plan(self) -> TrajectoryPlan:
        """The plan that was fitted."""
        return TrajectoryPlan(tuple(sorted(self._computed)), self.coefficients.clone())

    def switch(self) -> None:
        """Keep the history, as ``TrajectoryStepper`` does."""

    def held(self) -> Iterable[Tensor]:
        """The history."""
        return self._past


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
        self._cache = Cache(cache.kind, _keep(cache.feature, self._device))
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

    def switch(self) -> None:
        """Drop the cache: a feature of one network is not reused for another."""
        self._cache = None

    def held(self) -> Iterable[Tensor]:
        """The cached feature."""
        return [] if self._cache is None else [self._cache.feature]


def combine(sample: Tensor, outputs: Sequence[Tensor], coefficients: Sequence[float]) -> Tensor:
    """The rectified update ``c x + sum_j a_j v_j``; ``coefficients`` are c, a_1, a_2, ...

    Coefficients beyond the available outputs are not used.

    Example:
        >>> x, v = torch.tensor([1.0]), torch.tensor([10.0])
        >>> combine(x, [v, 2 * v], [0.5, 1.0, -0.5])
        tensor([0.5000])
    """
    x = coefficients[0] * sample
    for v, a in zip(outputs, coefficients[1:], strict=False):
        x = x.add(v, alpha=a)
    return x


def fit_step(
    sample: Tensor,
    outputs: Sequence[Tensor],
    target: Tensor,
    *,
    nominal: Tensor,
    ridge: float,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Coefficients c, a_1 ... a_h that bring ``c x + sum_j a_j v_j`` nearest to ``target``.

    Args:
        sample: the latents reached, shape (P, ...).
        outputs: the computed outputs in the history, newest first.
        target: the reference latents of the next step.
        nominal: the scheduler's first-order update of this step, shape (2,).
        ridge: pull towards it, as a fraction of the Gram diagonal.
        reduce: adds up the inner products of several batches.

    Example:
        >>> x, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
        >>> nominal = torch.tensor([1.0, -0.5], dtype=torch.float64)
        >>> fit_step(x, [v], torch.tensor([[1.0, 1.0]]), nominal=nominal, ridge=0.0)
        tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    vectors = [sample, *outputs, target]
    G = sample.numel() * gram_of([vector.flatten() for vector in vectors])
    if reduce is not None:
        G = reduce(G)
    n = len(vectors) - 1
    return solve_ridge(G[None, :n, :n], G[None, :n, n], nominal, ridge=ridge)[0]


def _precise(tensor: Tensor) -> Tensor:
    """Half precision as float32, in which schedulers add up their steps."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _computed(k: int, v: Tensor | None) -> Tensor:
    if v is None:
        raise ValueError(f"step {k} was reused, but a calibration run evaluates every step")
    return _precise(v)


def _keep(tensor: Tensor, device: torch.device | None) -> Tensor:
    return tensor if device is None else tensor.to(device)
