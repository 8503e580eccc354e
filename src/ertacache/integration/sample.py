"""Run a policy in loops that are not diffusers': ``sample``, and samplers as k-diffusion has them.

The network is a function, ``denoise(x, sigma) -> v`` with ``v = (x - x0) / sigma``, or
``model(x, sigma) -> x0``. The base sampler is what a full run would take: a solver, or a sampler
function. If every step is computed, it runs itself. Needs no diffusers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ertacache.core.groups import ONE_GROUP, Layout
from ertacache.core.plans import PaperPlan, Target
from ertacache.core.sampler import Denoise, Euler, SolverFactory, StepTaken, run_steps
from ertacache.core.steppers import FullStepper, make_stepper
from ertacache.core.unroll import Integrate, LoopRun, integrate_with, read_loop
from ertacache.formats.fingerprint import UNKNOWN, UNKNOWN_HASH, Fingerprint
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.choose import PlanChooser, remember
from ertacache.integration.warnings import RunWarnings

__all__ = [
    "Callback",
    "Guidance",
    "PolicySampler",
    "Sampler",
    "denoise_of",
    "integrate_sampler",
    "is_flow",
    "loop_fingerprint",
    "read_run",
    "sample",
]

Callback = Callable[[dict[str, Any]], None]
"""Called on every step with ``x``, ``i``, ``sigma``, ``sigma_hat`` and ``denoised`` (x0).

An exception from it ends the run.
"""

Sampler = Callable[..., Tensor]
"""``sampler(model, x, sigmas, extra_args=None, callback=None, disable=None, **options)``.

``model(x, sigma, **extra_args)`` returns x0; sigma has one entry per sample of the batch.
"""

LOOP = "loop"
"""The pipeline and the scheduler in the fingerprint of a loop."""

Guidance = Mapping[str, float]
"""Guidance of a run by the name of the argument."""

_PREDICTIONS = ("flow", "epsilon")
_POLICIES = 8  # whose plans are kept


def sample(
    denoise: Denoise,
    noise: Tensor,
    sigmas: Tensor,
    policy: Policy | str | os.PathLike[str],
    *,
    speedup: float | None = None,
    compute_steps: int | None = None,
    min_psnr: float | None = None,
    solver: SolverFactory = Euler,
    prediction: str | None = None,
    layout: Layout | None = None,
    model: str | None = None,
    guidance: Guidance | None = None,
    callback: Callback | None = None,
    cache_device: str | torch.device | None = None,
) -> Tensor:
    """Sample with fewer evaluations of the network, under a policy.

    The policy may come from a ``Recorder``, which has an example, from ``calibrate`` on a ``Loop``,
    or from a diffusers pipeline of the same model. Load its file once, with ``Policy.load``: plans
    are kept with it, so that the second run on a sigma schedule starts at once.

    Args:
        denoise: ``denoise(x, sigma) -> v``, the velocity ``(x - x0) / sigma``: noise minus data for
            a flow, the noise for an epsilon model. sigma is a 0-dim tensor.
        noise: the latents that the loop begins with, shape (P, ...).
        sigmas: the sigma schedule, descending, shape (T + 1,).
        policy: the policy, or the path of its file.
        speedup: at least this many times fewer computed steps than steps.
        compute_steps: this many computed steps, in place of a speed-up.
        min_psnr: the fewest computed steps with this PSNR in dB; without any, the first plan.
        solver: makes the solver of a full run for a sigma schedule; Euler by default.
        prediction: ``"flow"`` (1 to 0) or ``"epsilon"`` (unscaled data); None: the policy's.
        layout: which axes of the latents are channels; by default axis 1 of four or five.
        model: name of the network's class, compared with that of the policy if both are known.
        guidance: of the run, such as ``{"guidance_scale": 5}``, if several values were calibrated.
        callback: called on every step.
        cache_device: where outputs are kept between steps; None leaves them where they are.

    Returns:
        The latents at the last sigma.

    Raises:
        PolicyError: if it cannot be followed: another model, prediction or number of channels, or
            a solver that is not linear; a ValueError if a shape or target is out of range.
    """
    known = policy if isinstance(policy, Policy) else Policy.load(policy)
    plans = _plans_of(known, Target(speedup, compute_steps, min_psnr), prediction, model)
    run = plans.read(integrate_with(solver), sigmas, noise, key=solver)
    return _follow(
        denoise,
        noise,
        plans.choose(run, noise, layout, guidance),
        sigmas=torch.as_tensor(sigmas),
        solver=solver,
        layout=layout,
        callback=callback,
        cache_device=None if cache_device is None else torch.device(cache_device),
    )


class PolicySampler:
    """A sampler function, as k-diffusion and ComfyUI have them, that follows a policy.

    Where no step can be reused, the base sampler itself runs. Plans are kept, so that the second
    run on a sigma schedule starts at once.

    Attributes:
        guidance: of the next runs by the name of the argument, as in ``sample``; empty where it is
            not known.
        plan: of the present or last run; None before it, and if all was computed.
        computed: evaluations of the network in the present or last run under a plan.
    """

    def __init__(
        self,
        policy: Policy,
        base: Sampler,
        *,
        speedup: float | None = None,
        compute_steps: int | None = None,
        min_psnr: float | None = None,
        prediction: str | None = None,
        layout: Layout | None = None,
        model: str | None = None,
        cache_device: torch.device | None = None,
    ) -> None:
        """Keep what runs have in common; the arguments are those of ``sample``.

        Args:
            policy: the policy.
            base: the sampler function of a full run, which must be deterministic.
            speedup: at least this many times fewer computed steps than steps.
            compute_steps: this many computed steps.
            min_psnr: the fewest computed steps with this PSNR to the full run, in dB.
            prediction: ``"flow"`` or ``"epsilon"``; None takes that of the policy.
            layout: which axes of the latents are channels.
            model: name of the network's class.
            cache_device: where outputs are kept between steps.
        """
        target = Target(speedup, compute_steps, min_psnr)
        self._plans = _Plans(policy, target, prediction, model)
        self._base, self._layout, self._device = base, layout, cache_device
        self.guidance: Guidance = {}
        self.plan: FittedPlan | None = None
        self.computed = 0

    def __call__(
        self,
        model: Any,
        x: Tensor,
        sigmas: Tensor,
        extra_args: Mapping[str, Any] | None = None,
        callback: Callback | None = None,
        disable: bool | None = None,
        **options: Any,
    ) -> Tensor:
        """Sample; the arguments are those of every sampler function."""
        extra = dict(extra_args or {})
        integrate = integrate_sampler(self._base, like=model, extra_args=extra, **options)
        run = self._plans.read(integrate, sigmas, x, key=repr(sorted(options.items())))
        self.plan, self.computed = self._plans.choose(run, x, self._layout, self.guidance), 0
        if self.plan is None:
            return self._base(
                model,
                x,
                sigmas,
                extra_args=extra_args,
                callback=callback,
                disable=disable,
                **options,
            )
        if isinstance(self.plan.plan, PaperPlan):
            raise PolicyError(
                "the plan is of the paper's method, which takes the steps of a solver one by one: "
                "give a speed-up, or calibrate trajectory rectification"
            )
        denoise = denoise_of(model, **extra)

        def counted(sample: Tensor, sigma: Tensor) -> Tensor:
            self.computed += 1
            return denoise(sample, sigma)

        return _follow(
            counted,
            x,
            self.plan,
            sigmas=run.sigmas.to(sigmas),
            layout=self._layout,
            callback=_numbered(callback, run, sigmas),
            cache_device=self._device,
        )


class _Plans:
    """The plans of one policy and target for the runs of a loop."""

    def __init__(
        self, policy: Policy, target: Target, prediction: str | None, model: str | None
    ) -> None:
        # The second history of a plan is that of guidance, which a loop does not show.
        self._chooser = PlanChooser(policy, target).without_branch()
        self._prediction, self._model = prediction or policy.fingerprint.prediction, model
        self._runs: dict[object, LoopRun] = {}

    def read(self, integrate: Integrate, sigmas: Tensor, sample: Tensor, *, key: object) -> LoopRun:
        """Check a run against the policy, and read it off; once for runs that are alike."""
        if not isinstance(sample, Tensor):
            raise ValueError(
                f"the latents must be one tensor, not a {type(sample).__name__}: run every part "
                "by itself"
            )
        facts = self._chooser.policy.fingerprint
        now = loop_fingerprint(sample, prediction=self._prediction, model=self._model)
        fatal = [str(d) for d in facts.compare(now) if d.level == "fatal"]
        if fatal:
            raise PolicyError(f"the policy was calibrated for another model: {', '.join(fatal)}")
        flow = is_flow(self._prediction)
        levels = torch.as_tensor(sigmas).detach().cpu().double()
        place = key, levels.numpy().tobytes(), sample.ndim
        if place not in self._runs:
            begun = self._begun(levels, flow)
            found = read_run(integrate, sigmas, flow=flow, sample=sample, begun=begun)
            remember(self._runs, place, found)
        return self._runs[place]

    def _begun(self, levels: Tensor, flow: bool) -> bool | None:
        """Whether a run begins with pure noise: where the profiled ones do, or above."""
        profile = self._chooser.policy.profile
        if profile is None or not profile.schedule.begun or not len(levels):
            return None
        share = levels[0] if flow else levels[0] / (1 + levels[0])
        return bool(share >= profile.schedule.sigmas[0] - 1e-3)

    def choose(
        self, run: LoopRun, sample: Tensor, layout: Layout | None, guidance: Guidance | None
    ) -> FittedPlan | None:
        """The plan of a run; None if every step is computed."""
        plan = self._chooser.choose_for(run.schedule)
        if plan is None:
            return None
        plan = plan.at({name: (float(value),) for name, value in (guidance or {}).items()})
        shape = tuple(sample.shape)
        try:
            plan.plan.check_shape(shape[1:])
        except ValueError as cause:
            raise PolicyError(str(cause)) from None
        grouped = getattr(plan.plan, "groups", ONE_GROUP) != ONE_GROUP
        if grouped and (layout is None and len(shape) not in (4, 5)):
            raise PolicyError(
                "the plan divides the latent into channels and bands, but those of a latent of "
                f"shape {shape} are not known: give layout="
            )
        if grouped and layout is not None and not layout.fits(shape):
            raise PolicyError(f"{layout} is not the layout of latents of shape {shape}")
        return plan


@functools.lru_cache(maxsize=_POLICIES)
def _plans_of(policy: Policy, target: Target, prediction: str | None, model: str | None) -> _Plans:
    return _Plans(policy, target, prediction, model)


def read_run(
    integrate: Integrate,
    sigmas: Tensor,
    *,
    flow: bool,
    sample: Tensor,
    begun: bool | None = None,
) -> LoopRun:
    """``read_loop`` for some latents; what cannot be followed is a ``PolicyError``."""
    try:
        return read_loop(integrate, sigmas, flow=flow, ndim=sample.ndim, begun=begun)
    except ValueError as cause:
        raise PolicyError(str(cause)) from None
    except (TypeError, AttributeError, RuntimeError, UnboundLocalError) as cause:
        raise PolicyError(
            f"the sampler cannot be run on unit vectors ({type(cause).__name__}: {cause}): use "
            "another, such as euler or dpmpp_2m"
        ) from cause


def _follow(
    denoise: Denoise,
    noise: Tensor,
    plan: FittedPlan | None,
    *,
    sigmas: Tensor,
    solver: SolverFactory = Euler,
    layout: Layout | None,
    callback: Callback | None,
    cache_device: torch.device | None,
) -> Tensor:
    """Run a plan, or every step; latents are kept in float32 or finer in between."""
    watch, x = RunWarnings(), noise
    step = 0

    def checked(sample: Tensor, sigma: Tensor) -> Tensor:
        v = denoise(sample.to(noise.dtype), sigma)
        if not isinstance(v, Tensor) or v.shape != sample.shape:
            found = tuple(v.shape) if isinstance(v, Tensor) else type(v).__name__
            raise ValueError(
                f"denoise returned {found} for latents of shape {tuple(sample.shape)}: it must "
                "return a velocity of the shape of the latents"
            )
        watch.watch_output(step, v)
        return v

    if plan is None:
        stepper: Any = FullStepper(len(sigmas) - 1)
    else:
        known = layout or Layout()
        stepper = make_stepper(plan.plan, layout=lambda _: known, cache_device=cache_device)
        x = noise.to(torch.promote_types(noise.dtype, torch.float32))
    for taken in run_steps(checked, x, stepper, sigmas=sigmas, solver=solver):
        x, step = taken.latent, taken.step + 1
        if callback is not None:
            callback(_report(taken))
    watch.watch_latent(x)
    watch.report()
    return x.to(noise.dtype)


def _report(taken: StepTaken) -> dict[str, Any]:
    """What a callback receives; on a reused step x0 is where the step leads to."""
    v = taken.model_output
    if v is None:
        v = (taken.latent - taken.sample) / (taken.next_sigma - taken.sigma)
    return {
        "x": taken.sample,
        "i": taken.step,
        "sigma": taken.sigma,
        "sigma_hat": taken.sigma,
        "denoised": taken.sample - taken.sigma * v,
    }


def _numbered(callback: Callback | None, run: LoopRun, sigmas: Tensor) -> Callback | None:
    """A callback that counts the intervals of the schedule, not the evaluations of the network."""
    if callback is None:
        return None
    levels = sigmas.detach().cpu().double()[:-1]
    places = [int((levels >= sigma * (1 - 1e-6)).sum()) - 1 for sigma in run.sigmas[:-1]]

    def numbered(report: dict[str, Any]) -> None:
        callback(report | {"i": places[report["i"]]})

    return numbered


def denoise_of(model: Callable[..., Tensor], **extra_args: Any) -> Denoise:
    """The velocity of a model that returns x0: ``v = (x - x0) / sigma``.

    Example:
        >>> denoise = denoise_of(lambda x, sigma: 0 * x)  # all data is 0
        >>> denoise(torch.tensor([[3.0]]), torch.tensor(0.5))
        tensor([[6.]])
    """

    def denoise(sample: Tensor, sigma: Tensor) -> Tensor:
        level = sigma.to(sample)
        return (sample - model(sample, level * sample.new_ones(len(sample)), **extra_args)) / level

    return denoise


def integrate_sampler(
    sampler: Sampler,
    *,
    like: object = None,
    extra_args: Mapping[str, Any] | None = None,
    **options: Any,
) -> Integrate:
    """The full run of a sampler function.

    Args:
        sampler: the function.
        like: the model that it is to be used with, for functions that read its attributes.
        extra_args: what the model is called with.
        **options: of the function.
    """

    def integrate(denoise: Denoise, sample: Tensor, sigmas: Tensor) -> Tensor:
        model = _Model(denoise, like)
        given = {"extra_args": dict(extra_args or {}), "callback": None, "disable": True}
        return sampler(model, sample, sigmas, **given, **options)

    return integrate


class _Model:
    """A model that returns x0, made of a velocity; whatever else it has is that of another."""

    def __init__(self, denoise: Denoise, like: object) -> None:
        self._denoise, self._like = denoise, like

    def __call__(self, x: Tensor, sigma: Tensor, **extra_args: Any) -> Tensor:
        level = sigma.to(x.dtype).flatten()[0]
        return x - level * self._denoise(x, level)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._like, name)


def is_flow(prediction: str) -> bool:
    """Whether a prediction is that of a flow; raise if a loop cannot have it."""
    if prediction not in _PREDICTIONS:
        raise PolicyError(
            f"the policy is for a network that predicts {prediction!r}; a loop of velocities "
            f"(x - x0) / sigma is {' or '.join(map(repr, _PREDICTIONS))}: calibrate this loop"
        )
    return prediction == "flow"


def loop_fingerprint(
    latents: Tensor,
    *,
    prediction: str,
    model: str | None = None,
    guidance: Mapping[str, tuple[float, ...]] | None = None,
) -> Fingerprint:
    """What is known of a loop: its latents, what the network predicts, and a name if given."""
    return Fingerprint(
        pipeline=model or LOOP,
        denoiser=model or UNKNOWN,
        denoiser_hash=UNKNOWN_HASH,
        prediction=prediction,
        scheduler=LOOP,
        scheduler_config={},
        guidance=guidance or {},
        dtype=str(latents.dtype).removeprefix("torch."),
        latent_shape=tuple(latents.shape[1:]),
        versions={"torch": torch.__version__},
    )
