"""What each method does in ``scheduler.step``, given the combined output and the latent.

Knows which step it is and whether the network ran; not who decided it, nor how.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ertacache.core.plan import PaperPlan, TrajectoryPlan
from ertacache.core.rectify import rectify
from ertacache.core.residual import Cache
from ertacache.core.sampler import combine
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.compat import Scheduler, clear_history, keeps_history, set_step_index
from ertacache.integration.probe import StepResult, nominal, probe_result
from ertacache.integration.scheduler import StepCall
from ertacache.integration.tables import install_sigmas, variance_preserving_update

__all__ = [
    "LinearStep",
    "PaperUpdate",
    "TrajectoryUpdate",
    "Update",
    "check_fits",
    "make_update",
    "precise",
]

# Of its nominal length. Divided differences over a reused step grow as one over its length: at 0.01
# UniPC is off by the size of the latent, at 0 it is NaN; above a half its own step is the better.
SHORT = 0.5


class Update(Protocol):
    """One method on one scheduler."""

    def start(self) -> None:
        """Begin a run; the scheduler's table is fresh, and the run before is closed."""
        ...

    def step(self, k: int, call: StepCall, *, computed: bool) -> Any:
        """Return what ``scheduler.step`` is to return on step ``k``."""
        ...

    def held(self) -> Iterable[Tensor]:
        """Return the tensors that are remembered."""
        ...

    def close(self, *, restore: bool) -> None:
        """Let go of them; ``restore`` the scheduler's table unless it has a new one already."""
        ...


def make_update(
    policy: Policy, scheduler: Scheduler, *, cache_device: torch.device | None, begin: int = 0
) -> Update:
    """Return the update of the policy's method; ``begin`` as in ``LinearStep``."""
    if isinstance(policy.plan, TrajectoryPlan):
        return TrajectoryUpdate(policy.plan, scheduler, cache_device=cache_device, begin=begin)
    return PaperUpdate(policy.plan, scheduler, nominal=policy.sigmas, cache_device=cache_device)


def check_fits(plan: TrajectoryPlan | PaperPlan, sample: Tensor) -> None:
    """Raise if a plan has a rectification that is for latents of another shape."""
    gain, shape = getattr(plan, "gain", None), sample.shape[1:]
    if gain is None:
        return
    sizes = zip(reversed(gain.shape[1:]), reversed(shape), strict=False)
    if gain.ndim - 1 > len(shape) or any(mine not in (1, size) for mine, size in sizes):
        raise PolicyError(
            f"the policy rectifies latents of shape {tuple(gain.shape[1:])}, the run has "
            f"{tuple(shape)}: generate at the calibrated size, or calibrate one number per step"
        )


class LinearStep:
    """A step of our own in place of the scheduler's: ``c x + sum_j a_j v_j``."""

    def __init__(self, scheduler: Scheduler, *, begin: int = 0) -> None:
        """Take steps of runs whose step 0 is step ``begin`` of the scheduler's table."""
        self._scheduler, self._begin = scheduler, begin
        # The forms of the scheduler's results, as they are met.
        self._results: dict[tuple[torch.dtype, torch.dtype, bool], StepResult] = {}

    def take(
        self, k: int, call: StepCall, outputs: Sequence[Tensor], coefficients: Sequence[float]
    ) -> Any:
        """Take step ``k`` with these outputs and coefficients."""
        return self.give(k, call, combine(precise(call.sample), outputs, coefficients))

    def give(self, k: int, call: StepCall, latent: Tensor) -> Any:
        """Return ``latent`` as the result of step ``k``, in the scheduler's form."""
        set_step_index(self._scheduler, self._begin + k + 1)
        return self._form(call).fill(latent)

    def _form(self, call: StepCall) -> StepResult:
        key = (call.model_output.dtype, call.sample.dtype, call.return_dict)
        if key not in self._results:
            self._results[key] = probe_result(
                self._scheduler, call.model_output, sample=call.sample, return_dict=call.return_dict
            )
        return self._results[key]


class TrajectoryUpdate:
    """Trajectory rectification: the plan is the solver, on computed and reused steps alike."""

    def __init__(
        self,
        plan: TrajectoryPlan,
        scheduler: Scheduler,
        *,
        cache_device: torch.device | None,
        begin: int = 0,
    ) -> None:
        """Turn the plan's coefficients into numbers; ``begin`` as in ``LinearStep``."""
        self._rows: list[list[float]] = torch.cat(
            [plan.latent[:, None], plan.outputs], dim=1
        ).tolist()
        self._history, self._device = plan.history, cache_device
        self._linear = LinearStep(scheduler, begin=begin)
        self._past: list[Tensor] = []

    def start(self) -> None:
        """Begin a run: nothing to do."""

    def step(self, k: int, call: StepCall, *, computed: bool) -> Any:
        """Return the rectified update of step ``k``."""
        if computed:
            v = call.model_output.detach()
            self._past = [_keep(v, self._device), *self._past][: self._history]
        past = self._past
        if self._device is not None:
            past = [v.to(call.sample.device) for v in past]
        return self._linear.take(k, call, past, self._rows[k])

    def held(self) -> Iterable[Tensor]:
        """Return the history."""
        return self._past

    def close(self, *, restore: bool) -> None:
        """Let go of the history."""
        self._past = []


class PaperUpdate:
    """The paper's method: a reused, rectified output in the scheduler's step on the plan's table.

    On an adjusted table two kinds of scheduler need a first-order step of ours: one that keeps a
    history, on short reused steps, after which it begins a new history; and one that ignores
    tables (DDIM), on all.
    """

    def __init__(
        self,
        plan: PaperPlan,
        scheduler: Scheduler,
        *,
        nominal: Tensor,
        cache_device: torch.device | None,
    ) -> None:
        """Note whether the table is adjusted."""
        self._plan, self._scheduler, self._device = plan, scheduler, cache_device
        self._adjusted = not torch.equal(plan.sigmas, nominal)
        short = plan.sigmas.diff() > SHORT * nominal.diff()  # both are negative
        self._short = frozenset(short.nonzero().flatten().tolist()) - {*plan.compute_steps}
        self._linear = LinearStep(scheduler)
        self._cache: Cache | None = None
        self._first_order: dict[int, list[float]] | None = None
        self._gain, self._bias = plan.gain, plan.bias
        self._tables: dict[str, Tensor] = {}

    def start(self) -> None:
        """Begin a run: install the plan's table."""
        if self._adjusted:
            names = ("sigmas", "timesteps")
            self._tables = {
                n: vars(self._scheduler)[n] for n in names if n in vars(self._scheduler)
            }
            install_sigmas(self._scheduler, self._plan.sigmas)
        if self._first_order is None:
            self._first_order = self._own_steps()

    def _own_steps(self) -> dict[int, list[float]]:
        if not self._adjusted:
            return {}
        if not isinstance(getattr(self._scheduler, "sigmas", None), Tensor):
            kind = self._scheduler.config["prediction_type"]
            rows = variance_preserving_update(self._plan.sigmas, kind)
            return dict(enumerate(rows.tolist()))
        if not keeps_history(self._scheduler):
            return {}
        rows = nominal(self._scheduler)
        return {k: rows[k].tolist() for k in self._short}

    def step(self, k: int, call: StepCall, *, computed: bool) -> Any:
        """Return the update of step ``k`` with the output that is computed or reused there."""
        v = self._output(k, call, computed=computed)
        own = (self._first_order or {}).get(k)
        if own is None:
            return call.stock(v.to(call.model_output.dtype))
        clear_history(self._scheduler)
        return self._linear.take(k, call, [v], own)

    def _output(self, k: int, call: StepCall, *, computed: bool) -> Tensor:
        x, v = precise(call.sample), call.model_output
        if computed or self._cache is None:
            cache = Cache.of(precise(v.detach()), x, reuse=self._plan.reuse)
            self._cache = Cache(cache.kind, _keep(cache.feature, self._device))
            return v
        v = Cache(self._cache.kind, self._cache.feature.to(x.device)).reuse(x)
        if self._gain is None or self._bias is None:
            return v
        if self._gain.device != v.device:  # once per device, not once per step
            self._gain, self._bias = self._gain.to(v.device), self._bias.to(v.device)
        return rectify(v, gain=self._gain[k], bias=self._bias[k])

    def held(self) -> Iterable[Tensor]:
        """Return the cached feature."""
        return [] if self._cache is None else [self._cache.feature]

    def close(self, *, restore: bool) -> None:
        """Let go of the feature, and put the scheduler's own table back."""
        if restore:
            vars(self._scheduler).update(self._tables)
        self._cache, self._tables = None, {}


def precise(tensor: Tensor) -> Tensor:
    """Half precision as float32, in which schedulers add up their steps."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _keep(tensor: Tensor, device: torch.device | None) -> Tensor:
    return tensor if device is None else tensor.to(device)
