"""A sampling loop of one's own as a pipeline, so that all that works with pipelines works with it.

The smallest pipeline that there is: a scheduler that takes the steps of a solver or of a sampler
function, and a network that calls one function per prompt. Needs no diffusers by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.core.gram import Schedule
from ertacache.core.groups import Layout
from ertacache.core.sampler import Denoise, Euler, Solver, SolverFactory
from ertacache.core.unroll import Integrate, LinearSolver, LoopRun, integrate_with
from ertacache.formats.fingerprint import Fingerprint
from ertacache.integration.sample import (
    Sampler,
    integrate_sampler,
    is_flow,
    loop_fingerprint,
    read_run,
)

__all__ = ["Loop", "LoopScheduler"]

DenoiseFor = Callable[..., Denoise]
"""``denoise_for(prompt, **arguments) -> denoise``: the network with its conditioning."""

Start = Sequence[int] | Callable[[torch.Generator], Tensor]
"""The shape of one latent, without the batch, or a function that draws one."""

SPREAD = 0.25  # of values from 0 to 1 that stand for latents of spread 1, if nothing decodes them


class Loop:
    """A sampling loop as a pipeline: pass it to ``calibrate``, ``refit``, ``profile``, ``attach``.

    Example:
        >>> import ertacache
        >>> from ertacache.core.flows import GaussianRing
        >>> ring = GaussianRing(radius=2.0, width=0.3)
        >>> loop = Loop(lambda prompt: ring.velocity, torch.linspace(1, 0, 13), (64, 2))
        >>> policy = ertacache.calibrate(loop, ["a", "b", "c", "d"], speedup=2)
        >>> policy
        <policy for loop: a profile of 3 runs of 12 steps, 1 plan>
        >>> with ertacache.attach(loop, policy):
        ...     loop("e", output_type="latent").shape
        torch.Size([1, 64, 2])
    """

    def __init__(
        self,
        denoise_for: DenoiseFor,
        sigmas: Tensor | Callable[[int], Tensor],
        start: Start,
        *,
        solver: SolverFactory = Euler,
        sampler: Sampler | None = None,
        like: object = None,
        decode: Callable[[Tensor], Tensor] | None = None,
        prediction: str | None = None,
        layout: Layout | None = None,
        model: str | None = None,
    ) -> None:
        """Say what the loop is.

        Args:
            denoise_for: ``denoise_for(prompt, **arguments) -> denoise``; ``denoise(x, sigma)``
                returns the velocity ``(x - x0) / sigma`` of latents of shape (1, ...). Arguments
                are those that ``calibrate`` is given, such as ``guidance_scale``.
            sigmas: the sigma schedule, or a function from a number of steps to one.
            start: the shape of one latent without the batch, which then is noise times the first
                sigma; or a function that draws one with a ``torch.Generator``.
            solver: makes the solver of a full run; Euler by default.
            sampler: a sampler function in place of a solver: ``sampler(model, x, sigmas,
                extra_args, callback, disable)``. A step is one evaluation of the network.
            like: a model whose attributes the sampler function reads.
            decode: makes images or videos with values from 0 to 1 of latents; without it, PSNR
                is that of the latents.
            prediction: ``"flow"`` or ``"epsilon"``; None takes sigmas of at most 1 for a flow's.
            layout: which axes of the latents are channels; by default axis 1 of four or five.
            model: name of the network's class, which policies are compared by.

        Raises:
            PolicyError: if the sampler cannot be followed.
        """
        draw = start if callable(start) else _draw_noise(tuple(start))
        first = draw(torch.Generator("cpu").manual_seed(0))
        integrate = integrate_with(solver)
        if sampler is not None:
            integrate = integrate_sampler(sampler, like=like)
        self.scheduler = LoopScheduler(
            sigmas,
            integrate,
            solver=None if sampler is not None else solver,
            prediction=prediction,
            example=first[None],
        )
        self.transformer = _LoopNetwork()
        self.latent_layout = layout or (Layout() if first.ndim in (3, 4) else None)
        self._denoise_for, self._draw, self._decode = denoise_for, draw, decode
        self._scales, self._model = not callable(start), model

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        *,
        num_inference_steps: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str = "pt",
        **arguments: Any,
    ) -> Tensor:
        """Sample.

        Args:
            prompt: one or several.
            num_inference_steps: evaluations of the network; by default those of the sigmas given.
            generator: draws the noise, one for every prompt.
            output_type: ``"latent"``, or anything else for decoded results.
            **arguments: of ``denoise_for``.
        """
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        denoisers = [self._denoise_for(one, **arguments) for one in prompts]
        self.scheduler.set_timesteps(num_inference_steps)
        x = torch.stack([self._draw(one) for one in _generators(generator, len(prompts))])
        if self._scales:
            x = x * self.scheduler.sigmas[0].to(x)
        rows = torch.arange(len(prompts))
        for sigma in self.scheduler.timesteps:
            v = self.transformer(hidden_states=x, sigma=sigma, rows=rows, denoisers=denoisers)
            x = self.scheduler.step(v, sigma, x)[0]
        if output_type == "latent":
            return x
        return 0.5 + SPREAD * x if self._decode is None else self._decode(x)

    def fingerprint(
        self, *, latent_shape: Sequence[int], guidance: Mapping[str, tuple[float, ...]]
    ) -> Fingerprint:
        """What is known of the loop."""
        example = self.scheduler.example.new_empty((1, *latent_shape), device="meta")
        return loop_fingerprint(
            example, prediction=self.scheduler.prediction, model=self._model, guidance=guidance
        )


class LoopScheduler:
    """The steps of a loop, in the form of a diffusers scheduler.

    Attributes:
        sigmas: noise level of every evaluation of the network and of the result.
        timesteps: those of the evaluations.
        config: what the sigmas mean.
        prediction: ``"flow"`` or ``"epsilon"``.
        example: a latent of the loop, with its batch.
    """

    def __init__(
        self,
        sigmas: Tensor | Callable[[int], Tensor],
        integrate: Integrate,
        *,
        solver: SolverFactory | None,
        prediction: str | None,
        example: Tensor,
    ) -> None:
        """Read the loop off, if its sigmas are known.

        Args:
            sigmas: the sigma schedule, or a function from a number of steps to one.
            integrate: the full run.
            solver: makes its solver; None has one read off the full run.
            prediction: what the network predicts; None is read off the sigmas.
            example: a latent of the loop, with its batch.
        """
        self._levels, self._integrate, self._make_solver = sigmas, integrate, solver
        own = sigmas(10) if callable(sigmas) else torch.as_tensor(sigmas)
        self.prediction = prediction or ("flow" if float(own[0]) <= 1 + 1e-6 else "epsilon")
        flow = is_flow(self.prediction)
        self.config = {"prediction_type": self.prediction, "use_flow_sigmas": flow}
        self.example = example
        self._runs: dict[int | None, LoopRun] = {}
        self._run = self._read(own)
        self.sigmas, self.timesteps = torch.empty(0), torch.empty(0)
        if not callable(sigmas):
            self._runs |= {None: self._run, self._run.num_steps: self._run}
        self._step_index: int | None = None
        self._solver: Solver | None = None
        self._install()

    def __deepcopy__(self, memo: dict[int, Any]) -> LoopScheduler:
        """A copy with a state of its own, of the same loop: its functions may hold a model."""
        twin = object.__new__(LoopScheduler)
        patched = ("step", "set_timesteps")
        vars(twin).update({name: v for name, v in vars(self).items() if name not in patched})
        twin._solver = None
        return twin

    def set_timesteps(self, num_inference_steps: int | None = None, **unused: Any) -> None:
        """Begin a run of so many evaluations of the network; by default, of the sigmas given."""
        if num_inference_steps not in self._runs:
            self._runs[num_inference_steps] = self._find(num_inference_steps)
        self._run = self._runs[num_inference_steps]
        self._install()

    def step(
        self, model_output: Tensor, timestep: Any, sample: Tensor, return_dict: bool = False
    ) -> tuple[Tensor]:
        """The step of the loop."""
        k = self._step_index or 0
        if k == 0 or self._solver is None:
            self._solver = self._new_solver()
        self._step_index = k + 1
        return (self._solver.step(model_output, k, sample),)

    def read(self) -> Schedule:
        """The present run as linear algebra."""
        return self._run.schedule

    def _install(self) -> None:
        levels = self._levels if isinstance(self._levels, Tensor) else self.example
        dtype = levels.dtype if levels.dtype.is_floating_point else torch.float32
        self.sigmas = self._run.sigmas.to(torch.promote_types(dtype, torch.float32))
        self.timesteps = self.sigmas[:-1]
        self._step_index, self._solver = None, None

    def _new_solver(self) -> Solver:
        """A fresh solver; a plan may have adjusted the sigmas."""
        if self._make_solver is not None:
            return self._make_solver(self.sigmas)
        same = torch.equal(self.sigmas.double(), self._run.sigmas.to(self.sigmas).double())
        return LinearSolver(self._run if same else self._read(self.sigmas))

    def _find(self, steps: int | None) -> LoopRun:
        """The run of so many evaluations, or the next one with fewer."""
        if steps is None:
            raise ValueError("sigmas is a function of the number of steps: num_inference_steps=")
        for intervals in range(steps, 0, -1):
            run = self._read(self._schedule(intervals))
            if run.num_steps <= steps:
                return run
        raise ValueError(f"the sampler needs more than {steps} evaluations of the network")

    def _schedule(self, intervals: int) -> Tensor:
        """The sigmas of another number of intervals: those given, interpolated, if no function."""
        if callable(self._levels):
            return self._levels(intervals)
        own = torch.as_tensor(self._levels).double()
        place = torch.linspace(0, len(own) - 1, intervals + 1, dtype=torch.float64)
        left = place.floor().long().clamp_max(len(own) - 2)
        return own[left] + (place - left) * (own[left + 1] - own[left])

    def _read(self, sigmas: Tensor) -> LoopRun:
        flow = is_flow(self.prediction)
        return read_run(self._integrate, sigmas, flow=flow, sample=self.example)


class _LoopNetwork(nn.Module):
    """One function per prompt, as a network that hooks can be put on."""

    def forward(
        self, hidden_states: Tensor, sigma: Tensor, rows: Tensor, denoisers: Sequence[Denoise]
    ) -> Tensor:
        """The velocities of a batch; ``rows`` are the places of its prompts."""
        return torch.cat(
            [
                denoisers[row](hidden_states[place : place + 1], sigma)
                for place, row in enumerate(rows.tolist())
            ]
        )


def _draw_noise(shape: tuple[int, ...]) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(shape, generator=generator)


def _generators(
    given: torch.Generator | Sequence[torch.Generator] | None, count: int
) -> list[torch.Generator]:
    if given is None:
        seeds: list[int] = torch.randint(2**31, (count,)).tolist()
        return [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    return [given] * count if isinstance(given, torch.Generator) else list(given)
