"""The paper's calibration run on a pipeline: as inference runs it, but with the network always on.

On every step the network is asked at the latent that the accelerated run reached, and what reuse
would have said is compared with it: eq. 12 of the policy search, phi of eq. 13, K and B of eq. 21.
Knows neither how a threshold is chosen nor what becomes of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ertacache.core.plan import PaperPlan, Reuse
from ertacache.core.rectify import RectifyMode, RectifySums, fit_rectification, rectify
from ertacache.core.residual import Cache, ReusedStep, safe_ratio
from ertacache.core.timesteps import step_scale
from ertacache.formats.policy import Policy
from ertacache.integration.attach import Handle
from ertacache.integration.batches import MicroBatches, micro_batches
from ertacache.integration.compat import Pipeline
from ertacache.integration.scheduler import StepCall
from ertacache.integration.updates import PaperUpdate, precise

__all__ = ["Search", "Visitor", "Walk", "fit_gain_run", "search_run"]


@dataclass(frozen=True, eq=False)
class Search:
    """What one run of Algorithm 2 found.

    Attributes:
        threshold: lambda.
        compute_steps: the computed steps, first and last included.
        errors: eq. 12 of every step, shape (T,); 0 on the first and the last.
        step_scales: phi of every step, shape (T,), float64, 1 on computed steps.
    """

    threshold: float
    compute_steps: tuple[int, ...]
    errors: Tensor
    step_scales: Tensor


@dataclass(frozen=True, eq=False)
class Walk:
    """Where a calibration run goes.

    Attributes:
        policy: any policy for the pipeline: its fingerprint and nominal table are used.
        reuse: what a reused step returns.
        norms: mean absolute residual (with velocity reuse: output) of the reference runs on every
            step, which eq. 12 divides by, shape (T,).
        prompts: number of prompts, all in one call of the pipeline.
        arguments: makes the arguments of that call, prompts and fresh generators among them.
        batch_size: prompts per call of the network; None is all of them.
        count: told how often the network was asked, once per prompt and step.
    """

    policy: Policy
    reuse: Reuse
    norms: Tensor
    prompts: int
    arguments: Callable[[], dict[str, Any]]
    batch_size: int | None = None
    count: Callable[[int], None] | None = None

    def run(self, pipe: Pipeline, plan: PaperPlan, visitor: Visitor) -> Any:
        """Run the pipeline on a plan's table, every output through ``visitor``; its latents."""
        every = tuple(range(plan.num_steps))
        listening = PaperPlan(every, plan.reuse, self.policy.sigmas)
        asked = Policy(listening, self.policy.sigmas, fingerprint=self.policy.fingerprint)
        inner = PaperUpdate(plan, pipe.scheduler, nominal=self.policy.sigmas, cache_device=None)
        with micro_batches(pipe, self.batch_size, prompts=self.prompts) as network:
            update = _WalkUpdate(inner, visitor, plan.reuse, network)
            with Handle(pipe, asked, update=update) as handle:
                result = pipe(**(self.arguments() | {"output_type": "latent"}))
        if self.count is not None:
            self.count(handle.stats.last.computed_steps * self.prompts)
        return result[0]


class Visitor(Protocol):
    """Decides what a calibration run uses on each step."""

    def computes(self, k: int, cached: Tensor, fresh: Tensor) -> bool:
        """Tell whether step ``k`` is computed, given the cached and the fresh feature."""
        ...

    def reuses(self, at: ReusedStep) -> Tensor:
        """Return the output that a reused step uses."""
        ...


def search_run(pipe: Pipeline, walk: Walk, *, threshold: float) -> Search:
    """Algorithm 2 on a pipeline, for one threshold, all prompts in lockstep; T calls per prompt.

    The latent is that of the accelerated run, the norm that eq. 12 divides by that of the reference
    run. The same run measures phi: reused outputs, not rectified, on the nominal table.

    Args:
        pipe: the pipeline, nothing attached.
        walk: where the run goes.
        threshold: lambda.
    """
    every = tuple(range(walk.policy.num_steps))
    plan = PaperPlan(every, walk.reuse, walk.policy.sigmas)
    visitor = _Searching(threshold, walk.norms)
    walk.run(pipe, plan, visitor)
    steps = tuple(k for k in every if k not in visitor.reused)
    return Search(threshold, steps, visitor.errors, visitor.scales)


def fit_gain_run(
    pipe: Pipeline, walk: Walk, *, plan: PaperPlan, mode: RectifyMode = "scalar"
) -> tuple[Tensor, Tensor]:
    """K and B of every step, fitted in the rectified run on the plan's table; T calls per prompt.

    Args:
        pipe: the pipeline, nothing attached.
        walk: where the run goes.
        plan: schedule and table; its own gain and bias are not used.
        mode: ``"scalar"`` or ``"element"``; channels have no one place in pipelines' latents.

    Returns:
        Gain and bias, shape (T, ...); 0 and -2, which change nothing, on computed steps.
    """
    if mode == "channel":
        raise ValueError("mode must be 'scalar' or 'element'")
    visitor = _Fitting(frozenset(plan.compute_steps), mode)
    walk.run(pipe, PaperPlan(plan.compute_steps, plan.reuse, plan.sigmas), visitor)
    if not visitor.fits:
        none = torch.zeros(plan.num_steps, dtype=torch.float64)
        return none, none - 2
    none = torch.zeros_like(next(iter(visitor.fits.values()))[0])
    rows = [visitor.fits.get(k, (none, none - 2)) for k in range(plan.num_steps)]
    gain, bias = (torch.stack(column) for column in zip(*rows, strict=True))
    return gain, bias


class _WalkUpdate:
    """The paper's update, told on every step what output to go on with."""

    def __init__(
        self, inner: PaperUpdate, visitor: Visitor, reuse: Reuse, network: MicroBatches
    ) -> None:
        self._inner, self._visitor, self._reuse, self._network = inner, visitor, reuse, network
        self._cache: Cache | None = None
        self._previous: Tensor | None = None
        self._owner: object = None

    def start(self) -> None:
        """Begin a run."""
        self._inner.start()

    def step(self, k: int, call: StepCall, *, computed: bool) -> Any:
        """Take step ``k`` with the output that the visitor chooses."""
        x, v = precise(call.sample), precise(call.model_output.detach())
        fresh = Cache.of(v, x, reuse=self._reuse)
        used = self._choose(k, x, v, fresh)
        self._previous, self._owner = used, self._network.owner
        call.arguments["model_output"] = used.to(call.model_output.dtype)
        return self._inner.step(k, call, computed=True)

    def _choose(self, k: int, x: Tensor, v: Tensor, fresh: Cache) -> Tensor:
        cache, previous = self._cache, self._previous
        # What one expert said is not reused for another: inference computes there, too.
        if cache is None or previous is None or self._network.owner is not self._owner:
            self._cache = fresh
            return v
        if self._visitor.computes(k, cache.feature, fresh.feature):
            self._cache = fresh
            return v
        return self._visitor.reuses(ReusedStep(k, cache.reuse(x), v, previous))

    def held(self) -> Iterable[Tensor]:
        """Return the cached feature."""
        return [] if self._cache is None else [self._cache.feature]

    def close(self, *, restore: bool) -> None:
        """Let go of what is remembered, and put the scheduler's table back."""
        self._cache = self._previous = self._owner = None
        self._inner.close(restore=restore)


class _Searching:
    def __init__(self, threshold: float, norm: Tensor) -> None:
        self._threshold, self._norm, self._last = threshold, norm, len(norm) - 1
        self.reused: set[int] = set()
        self.errors = torch.zeros(len(norm), dtype=torch.float64)
        self.scales = torch.ones(len(norm), dtype=torch.float64)

    def computes(self, k: int, cached: Tensor, fresh: Tensor) -> bool:
        if k == self._last:
            return True
        distance = (cached - fresh).abs().mean(dtype=torch.float64).cpu()
        self.errors[k] = safe_ratio(distance, self._norm[k])
        return not self.errors[k].item() < self._threshold

    def reuses(self, at: ReusedStep) -> Tensor:
        self.reused.add(at.step)
        self.scales[at.step] = step_scale(at.reused, at.computed, previous=at.previous)
        return at.reused


class _Fitting:
    def __init__(self, compute_steps: frozenset[int], mode: RectifyMode) -> None:
        self._computed, self._mode = compute_steps, mode
        self.fits: dict[int, tuple[Tensor, Tensor]] = {}

    def computes(self, k: int, cached: Tensor, fresh: Tensor) -> bool:
        return k in self._computed

    def reuses(self, at: ReusedStep) -> Tensor:
        sums = RectifySums.of(at.reused, at.computed, mode=self._mode)
        K, B = fit_rectification(sums)  # noqa: N806
        self.fits[at.step] = K.cpu(), B.cpu()
        return rectify(at.reused, gain=K, bias=B)
