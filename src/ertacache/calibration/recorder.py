"""Profiles of loops that are not diffusers': latents and outputs in, a policy with a profile out.

A ``Recorder`` looks on while somebody's own loop runs in full. Whether the loop takes the steps
that it is said to take is read off the recorded inner products.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ertacache
from ertacache.core.gram import RunStatistics, Schedule, Trajectory, fit_weights, profile_run
from ertacache.core.groups import FOLDS, GroupStatistics, Layout
from ertacache.core.sampler import Denoise, Euler, SolverFactory
from ertacache.core.steppers import combine
from ertacache.core.unroll import LoopRun, integrate_with
from ertacache.formats.fingerprint import Fingerprint
from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile, ProfiledPrompt
from ertacache.integration.sample import (
    Sampler,
    integrate_sampler,
    is_flow,
    loop_fingerprint,
    read_run,
)
from ertacache.integration.solve import with_frontier

__all__ = ["Recorder", "profile_trajectory"]

TOLERANCE = 1e-3  # of a latent: how far it may be from what the solver makes of the outputs
ROUGH = 5e-2  # the same in half precision


class Recorder:
    """Records full runs of a loop that is not diffusers', and makes a policy of them.

    Wrap the function that your loop calls, once for every prompt, and run the loop as it is.

    Example:
        >>> from ertacache.core.flows import GaussianRing
        >>> flow, sigmas = GaussianRing(radius=2.0, width=0.3), torch.linspace(1, 0, 11)
        >>> recorder = Recorder(sigmas)
        >>> for seed in range(3):
        ...     x, denoise = flow.noise(64, seed)[None], recorder.wrap(flow.velocity, seed=seed)
        ...     for k in range(10):
        ...         x = x + (sigmas[k + 1] - sigmas[k]) * denoise(x, sigmas[k])
        >>> policy = recorder.policy()
        >>> policy
        <policy for loop: a profile of 3 runs of 10 steps, 0 plans>
        >>> noise = flow.noise(64, seed=9)[None]
        >>> ertacache.sample(flow.velocity, noise, sigmas, policy, speedup=2).shape
        torch.Size([1, 64, 2])
    """

    def __init__(
        self,
        sigmas: Tensor,
        *,
        solver: SolverFactory = Euler,
        sampler: Sampler | None = None,
        prediction: str | None = None,
        layout: Layout | None = None,
        model: str | None = None,
        guidance_scale: float | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        """Say what the loop is.

        Args:
            sigmas: its sigma schedule, descending, shape (T + 1,).
            solver: makes the solver whose steps it takes; Euler by default.
            sampler: the sampler function that it is, in place of a solver: ``sampler(model, x,
                sigmas, extra_args, callback, disable)``.
            prediction: ``"flow"`` or ``"epsilon"``; None takes sigmas of at most 1 for a flow's.
            layout: which axes of the latents are channels; by default axis 1 of four or five.
            model: name of the network's class, which policies are compared by.
            guidance_scale: guidance of the runs, if they have any.
            path: file to write after every run. If it is there, it is continued.

        Raises:
            PolicyError: if the file at ``path`` is damaged.
        """
        first = float(torch.as_tensor(sigmas).flatten()[0])
        self._prediction = prediction or ("flow" if first <= 1 + 1e-6 else "epsilon")
        is_flow(self._prediction)  # it raises if a loop cannot have it
        self._sigmas, self._solver, self._sampler = torch.as_tensor(sigmas), solver, sampler
        self._layout, self._model = layout, model
        self._guidance = {} if guidance_scale is None else {"guidance_scale": (guidance_scale,)}
        self._path = path
        self._known = Policy.load(path) if path is not None and Path(path).exists() else None
        self._read: LoopRun | None = None
        self._like: object = None
        self._runs: list[ProfiledPrompt] = []  # of the present batch
        self._latents: list[Tensor] = []
        self._outputs: list[Tensor] = []

    @property
    def runs(self) -> tuple[ProfiledPrompt, ...]:
        """The runs recorded so far."""
        profile = None if self._known is None else self._known.profile
        return () if profile is None else profile.runs

    def has(self, prompt: str = "", seed: int = 0) -> bool:
        """Whether a run was recorded already, as in a file that is continued."""
        return ProfiledPrompt(prompt, seed) in self.runs

    def wrap(self, denoise: Denoise, prompt: str | Sequence[str] = "", *, seed: int = 0) -> Denoise:
        """Begin a run; returns the function to call in place of ``denoise(x, sigma) -> v``.

        Args:
            denoise: the network, with its conditioning.
            prompt: what the run is of; a list for a batch of several.
            seed: of the noise; samples of a batch count up.
        """
        self.begin(prompt, seed=seed)

        def recorded(sample: Tensor, sigma: Tensor) -> Tensor:
            v = denoise(sample, sigma)
            self.step(sample, v)
            return v

        return recorded

    def wrap_model(self, model: Any, prompt: str | Sequence[str] = "", *, seed: int = 0) -> Any:
        """The same for ``model(x, sigma, **extra_args) -> x0``; its attributes are still there."""
        self.begin(prompt, seed=seed)
        self._like = model
        return _RecordedModel(model, self.step)

    def begin(self, prompt: str | Sequence[str] = "", *, seed: int = 0) -> None:
        """Begin a run by hand; one that was not finished is dropped."""
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        self._runs = [ProfiledPrompt(p, seed + k) for k, p in enumerate(prompts)]
        twice = next((run for run in self._runs if run in self.runs), None)
        if twice is not None:
            raise PolicyError(
                f"{twice.prompt[:60]!r} with seed {twice.seed} was recorded already: give every "
                "run its own prompt or seed, and leave those out for which has() is true"
            )
        self._latents, self._outputs = [], []

    def step(self, sample: Tensor, velocity: Tensor) -> None:
        """Record one step by hand: the latent before it, and the velocity there.

        The last step of a run completes it.
        """
        if not self._runs:
            raise PolicyError("no run has begun: call begin, or wrap the function of the loop")
        if sample.shape != velocity.shape or (
            self._latents and sample.shape != self._latents[0].shape
        ):
            raise PolicyError(
                f"the latent has shape {tuple(sample.shape)} and the velocity "
                f"{tuple(velocity.shape)}: they must be equal, and stay so during a run"
            )
        if self._read is None:
            self._read = self._read_loop(sample)
            self._check_known(self._read.schedule, sample)
        # Copies: what a loop does to its latents later must not reach the record.
        self._latents.append(sample.detach().clone().cpu())
        self._outputs.append(velocity.detach().clone().cpu())
        if len(self._outputs) == self._read.num_steps:
            self._finish(self._read)

    def policy(self) -> Policy:
        """The policy of all runs so far; it takes some seconds to search its frontier.

        Raises:
            PolicyError: if no run was completed.
        """
        if self._known is None:
            steps = "" if self._read is None else f" of {self._read.num_steps} steps"
            raise PolicyError(f"no full run{steps} was recorded yet: run the loop to its end")
        return with_frontier(self._known)

    def _read_loop(self, sample: Tensor) -> LoopRun:
        integrate = integrate_with(self._solver)
        if self._sampler is not None:
            integrate = integrate_sampler(self._sampler, like=self._like)
        return read_run(integrate, self._sigmas, flow=is_flow(self._prediction), sample=sample)

    def _check_known(self, schedule: Schedule, sample: Tensor) -> None:
        """Raise unless the file that is there can be continued by this loop."""
        known = self._known
        if known is None:
            return
        reasons = [str(d) for d in known.fingerprint.compare(self._facts(sample))]
        if known.plans or known.fits:
            reasons.append("it holds fitted plans or measured fits, which would be lost")
        if known.profile is None or not known.profile.schedule.same_run(schedule):
            reasons.append("its runs had another sigma schedule or solver")
        if reasons:
            listed = ", ".join(reasons)
            raise PolicyError(
                f"the profile there cannot be continued: {listed}; write to another file"
            )

    def _facts(self, sample: Tensor) -> Fingerprint:
        return loop_fingerprint(
            sample, prediction=self._prediction, model=self._model, guidance=self._guidance
        )

    def _finish(self, read: LoopRun) -> None:
        """Add the present batch to the profile."""
        x, runs = self._latents[0], _numbered(self._runs, len(self._latents[0]))
        last = combine(x, self._outputs, read.schedule.target.tolist())
        run = Trajectory((*self._latents, last), tuple(self._outputs))
        self._runs, self._latents, self._outputs = [], [], []
        layout = self._layout or (Layout() if x.ndim in (4, 5) else None)
        before = len(self.runs)
        profile = profile_trajectory(
            run,
            read.schedule,
            runs,
            folds=[(before + place) % FOLDS for place in range(len(runs))],
            layout=layout,
        )
        check_steps(profile.statistics, read.schedule, rough=x.dtype.itemsize < 4)
        origin = {"ertacache": ertacache.__version__}
        fresh = Policy(self._facts(x), profile=profile, provenance=origin)
        self._known = fresh if self._known is None else self._known.merge(fresh)
        if self._path is not None:
            self._known.save(self._path)


class _RecordedModel:
    """A model that returns x0, whose velocities are recorded."""

    def __init__(self, model: Any, step: Callable[[Tensor, Tensor], None]) -> None:
        self._model, self._step = model, step

    def __call__(self, x: Tensor, sigma: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x0: Tensor = self._model(x, sigma, *args, **kwargs)
        level = sigma.to(x).view(-1, *[1] * (x.ndim - 1))
        self._step(x, (x - x0) / level)
        return x0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _numbered(runs: Sequence[ProfiledPrompt], rows: int) -> list[ProfiledPrompt]:
    """One run for every sample of a batch; one prompt stands for all of them."""
    if len(runs) == 1:
        return [ProfiledPrompt(runs[0].prompt, runs[0].seed + k) for k in range(rows)]
    if len(runs) != rows:
        raise PolicyError(f"{len(runs)} prompts, but a batch of {rows} latents")
    return list(runs)


def profile_trajectory(
    run: Trajectory,
    schedule: Schedule,
    runs: Sequence[ProfiledPrompt],
    *,
    folds: Sequence[int],
    layout: Layout | None,
    expert_steps: Sequence[int] = (),
) -> Profile:
    """The profile of a batch of full runs.

    Args:
        run: latents and outputs, on the CPU.
        schedule: of all of them.
        runs: what they are of.
        folds: of every run.
        layout: of the latents; None if it is not known.
        expert_steps: the steps after 0 at which another network takes over.

    Raises:
        PolicyError: if a latent or an output is not finite.
    """
    statistics, by_group = _statistics(run), None
    if layout is not None:
        by_group = GroupStatistics.of(
            run.latents[0],
            run.outputs,
            layout,
            folds=list(folds),
            weights=fit_weights(statistics.gram, schedule.nominal).tolist(),
        )
    return Profile(schedule, statistics, tuple(runs), tuple(expert_steps), tuple(folds), by_group)


def _statistics(run: Trajectory) -> RunStatistics:
    for step, output in enumerate(run.outputs):
        if not bool(torch.isfinite(output).all()):
            raise PolicyError(
                f"the network's output on step {step} holds NaN or infinity: nothing can be made "
                "of such a run; try bfloat16 or float32"
            )
    return profile_run(run)


def check_steps(statistics: RunStatistics, schedule: Schedule, *, rough: bool = False) -> None:
    """Raise unless recorded latents are what the solver makes of their outputs.

    Args:
        statistics: of the runs.
        schedule: of the solver.
        rough: whether the loop rounds to half precision.
    """
    T, G = schedule.num_steps, statistics.inner  # noqa: N806
    basis = torch.eye(2 * T + 1, dtype=torch.float64)[[0, *range(T + 1, 2 * T + 1)]]
    apart = torch.eye(2 * T + 1, dtype=torch.float64)[: T + 1] - schedule.latents @ basis
    squared = torch.einsum("kr,prs,ks->pk", apart, G, apart).clamp_min(0)
    size = statistics.gram.squares[:, : T + 1].clamp_min(torch.finfo(torch.float64).tiny)
    errors: list[float] = (squared / size).sqrt().max(0).values.tolist()
    limit = ROUGH if rough else TOLERANCE
    step = next((k for k, error in enumerate(errors) if error > limit), None)
    if step is not None:
        raise PolicyError(
            f"the latent before step {step} is {100 * errors[step]:.2g} % off what the solver "
            "makes of the recorded velocities: give the solver= or sampler= of this loop, its own "
            "sigmas, and velocities (x - x0) / sigma"
        )
