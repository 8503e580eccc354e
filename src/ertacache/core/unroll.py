"""What a sampling loop does, read off the loop itself.

A deterministic sampler is linear in its start and in the outputs of the network. So it is run once
on unit vectors, with outputs that are unit vectors too: the latents of that run are the
coefficients of every latent. A step is one evaluation of the network; a sampler that evaluates it
twice per interval has twice as many steps. Knows neither networks nor files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ertacache.core.gram import Schedule
from ertacache.core.sampler import Denoise, SolverFactory, run_reference
from ertacache.core.steppers import combine

__all__ = [
    "Integrate",
    "LinearSolver",
    "LoopRun",
    "check_loop_sigmas",
    "integrate_with",
    "read_loop",
]

Integrate = Callable[[Denoise, Tensor, Tensor], Tensor]
"""``integrate(denoise, sample, sigmas)``: a full run on a sigma schedule; returns its last latent.

``denoise`` returns the velocity ``(x - x0) / sigma``.
"""

STAGES = 4  # evaluations of the network per interval that a sampler may need
TOLERANCE = 1e-3  # of the sum of magnitudes: float32 constants of a sampler round
PURE_NOISE = 0.9  # share of noise above which a start counts as pure noise


@dataclass(frozen=True, eq=False)
class LoopRun:
    """A full run of a loop: where the network is evaluated, and what is made of its outputs.

    Attributes:
        sigmas: noise level of every evaluation and of the result, as the loop has them, shape
            (T + 1,), float64.
        schedule: the run as linear algebra, its noise levels as shares of noise.
    """

    sigmas: Tensor
    schedule: Schedule

    @property
    def num_steps(self) -> int:
        """Number of evaluations of the network T."""
        return self.schedule.num_steps


def integrate_with(solver: SolverFactory) -> Integrate:
    """The full run of a solver that takes one step after the other."""

    def integrate(denoise: Denoise, sample: Tensor, sigmas: Tensor) -> Tensor:
        return run_reference(denoise, sample, sigmas=sigmas, solver=solver).latents[-1]

    return integrate


def read_loop(
    integrate: Integrate, sigmas: Tensor, *, flow: bool, ndim: int = 4, begun: bool | None = None
) -> LoopRun:
    """Read off what a full run of a loop is.

    Args:
        integrate: the full run.
        sigmas: the sigma schedule that it is called with, descending.
        flow: whether sigmas are shares of noise, from 1 to 0; otherwise the data is not scaled,
            and sigmas are the standard deviation of the noise.
        ndim: number of axes of a batch of latents.
        begun: whether the run begins with pure noise; None takes the first sigma for an answer.

    Raises:
        ValueError: if the loop adds noise, is not linear, or its noise levels do not descend.

    Example:
        >>> from ertacache.core.sampler import Euler
        >>> run = read_loop(integrate_with(Euler), torch.tensor([1.0, 0.75, 0.0]), flow=True)
        >>> run.schedule.latents
        tensor([[ 1.0000,  0.0000,  0.0000],
                [ 1.0000, -0.2500,  0.0000],
                [ 1.0000, -0.2500, -0.7500]], dtype=torch.float64)
    """
    sigmas = check_loop_sigmas(sigmas, flow=flow)
    try:
        latents, raw = _read(integrate, sigmas, ndim, torch.float64)
    except RuntimeError:  # constants of its own may be float32, as those of ComfyUI's uni_pc
        latents, raw = _read(integrate, sigmas, ndim, torch.float32)
    if bool((raw.diff() >= 0).any()):
        raise ValueError(
            "the sampler evaluates the network twice at one noise level, or at a higher one than "
            "before: use one whose noise levels descend, such as euler or dpmpp_2m"
        )
    share = raw if flow else raw / (1 + raw)
    schedule = Schedule(
        sigmas=share,
        # Euler is the first-order step of both kinds: the velocity is dx / dsigma.
        nominal=torch.stack([torch.ones_like(raw[1:]), raw.diff()], dim=1),
        latents=latents,
        scale=torch.ones_like(raw) if flow else torch.hypot(raw, torch.ones_like(raw)),
        begun=float(share[0]) >= PURE_NOISE if begun is None else begun,
    )
    return LoopRun(raw, schedule)


def _read(
    integrate: Integrate, sigmas: Tensor, ndim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The latents of a run on unit vectors of a type, and its noise levels."""
    probe = _Probe(rows=STAGES * len(sigmas), ndim=ndim, dtype=dtype)
    levels = sigmas.to(dtype, copy=True)  # a sampler may write to its sigmas, as uni_pc does
    with torch.random.fork_rng(devices=[]):
        last = integrate(probe, probe.start, levels)
    raw = torch.tensor([*probe.sigmas, float(levels[-1])], dtype=torch.float64)
    return probe.latents(last), raw


def check_loop_sigmas(sigmas: Tensor, *, flow: bool) -> Tensor:
    """A sigma schedule on the CPU; raise unless it descends to 0 or above, from 1 in a flow."""
    given = torch.as_tensor(sigmas).detach().cpu()
    if given.ndim != 1 or len(given) < 2:
        raise ValueError(
            f"sigmas must be one row of at least two numbers, got shape {tuple(given.shape)}"
        )
    if not bool(torch.isfinite(given).all()) or bool((given.diff() >= 0).any()):
        raise ValueError("sigmas must descend at every step, and be finite")
    if float(given[-1]) < 0 or (flow and float(given[0]) > 1 + 1e-6):
        ends = f"{float(given[0]):g} to {float(given[-1]):g}"
        low = "from at most 1 to 0, as those of a flow" if flow else "at least 0"
        raise ValueError(f"sigmas must be {low}, got {ends}")
    return given


class _Probe:
    """A network that outputs unit vectors, one more with every evaluation.

    Rows of the batch: the unit vectors, then nothing at all, which shows noise, then a mixture that
    is large enough for clipping to show.
    """

    def __init__(self, *, rows: int, ndim: int, dtype: torch.dtype) -> None:
        self._shape = (rows + 2, *[1] * (ndim - 1))
        self._rows, self._dtype = rows, dtype
        place = torch.arange(rows, dtype=torch.float64)
        self._mixture = (20 + place % 7) * (1 - 2 * (place % 2))
        self.sigmas: list[float] = []
        self._inputs: list[Tensor] = []
        self.start = self._unit(0)

    def _unit(self, place: int) -> Tensor:
        unit = torch.zeros(self._rows + 2, dtype=self._dtype)
        unit[place], unit[-1] = 1, self._mixture[place]
        return unit.view(self._shape)

    def __call__(self, sample: Tensor, sigma: Tensor) -> Tensor:
        place = 1 + len(self.sigmas)
        if place >= self._rows:
            raise ValueError(
                f"the sampler evaluates the network more than {STAGES} times per step: use one "
                "with a fixed number of evaluations, such as euler or dpmpp_2m"
            )
        self.sigmas.append(float(torch.as_tensor(sigma).flatten()[0]))
        self._inputs.append(sample.double().flatten())
        return self._unit(place)

    def latents(self, last: Tensor) -> Tensor:
        """The latents of the run in its start and outputs, (T + 1, T + 1)."""
        T = len(self.sigmas)
        found = torch.stack([*self._inputs, last.double().flatten()])  # (T + 1, rows + 2)
        if not bool(torch.isfinite(found).all()):
            raise ValueError("the sampler divides by zero on these sigmas: choose other ones")
        if bool((found[:, -2] != 0).any()):
            raise ValueError(
                "the sampler adds noise on its way: use a deterministic one, such as euler or "
                "dpmpp_2m, or set eta and s_churn to 0"
            )
        rows, mixture = found[:, : T + 1], self._mixture[: T + 1]
        size = 1 + rows.abs() @ mixture.abs()
        if bool(((rows @ mixture - found[:, -1]).abs() > TOLERANCE * size).any()):
            raise ValueError(
                "the sampler is not linear in the outputs of the network, as one that adapts its "
                "steps or clips is not: use another, such as euler or dpmpp_2m"
            )
        start = rows[0] - torch.eye(T + 1, dtype=torch.float64)[0]
        if bool((start.abs() > TOLERANCE).any()):
            raise ValueError("the sampler does not begin by evaluating the network at its start")
        return rows.tril()


class LinearSolver:
    """A run that was read off, as a solver: each latent from the start and all outputs so far.

    After steps that were not its own it takes those of Euler.
    """

    def __init__(self, run: LoopRun) -> None:
        """Keep the coefficients as Python numbers."""
        self._rows: list[list[float]] = run.schedule.latents.tolist()
        self._nominal: list[list[float]] = run.schedule.nominal.tolist()
        self._start: Tensor | None = None
        self._outputs: list[Tensor] = []

    def step(self, model_output: Tensor, step: int, sample: Tensor) -> Tensor:
        """Return the latent after ``step``."""
        if step == 0:
            self._start, self._outputs = sample, []
        if self._start is None or len(self._outputs) != step:
            return combine(sample, [model_output], self._nominal[step])
        self._outputs.append(model_output)
        return combine(self._start, self._outputs, self._rows[step + 1])
