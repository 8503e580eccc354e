"""Trajectory rectification as linear algebra: fit and simulate schedules without the network.

Every accelerated latent is a combination of the reference run's vectors, so its inner products
with them (a Gram matrix) are all that is needed. Many schedules are simulated at once. Knows no
search strategy, no file and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ertacache.core.gram import RunStatistics
from ertacache.core.least_squares import solve_ridge
from ertacache.core.plan import TrajectoryPlan, check_compute_steps

__all__ = [
    "Fit",
    "Simulation",
    "State",
    "System",
    "fit_plans",
    "predict_errors",
    "schedule_mask",
]


@dataclass(frozen=True)
class Fit:
    """How the coefficients of a step are fitted.

    Attributes:
        history: number of computed outputs a step combines, H.
        ridge: pull towards the nominal update, as a fraction of the Gram diagonal.
        free_latent: fit the latent's coefficient too; otherwise it stays the scheduler's.
        sensitivity: how strongly an output is taken to suffer from the error of the latent it was
            computed at, in units of the output's own rate of change along the reference run.
            0 is the idealisation that it does not suffer at all.
    """

    history: int = 4
    ridge: float = 1e-3
    free_latent: bool = False
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1 <= self.history <= 16:
            raise ValueError(f"history must be between 1 and 16, got {self.history}")
        if not (self.ridge >= 0 and self.sensitivity >= 0):
            raise ValueError("ridge and sensitivity must not be negative")


@dataclass(eq=False)
class State:
    """B simulated runs before some step.

    An output computed at a latent that is off by ``error`` is taken to be off too, by an amount
    of size ``noise`` that nothing else knows of; ``carried`` is its weight in the latent.

    Attributes:
        inner: products of each latent with every reference vector and with zero, (B, R + 1).
        square: mean square of each latent, without what disturbs it, (B,).
        error: expected mean square of its distance to the reference latent, (B,).
        past: computed steps, newest first, -1 where there is none, (B, H).
        noise: mean square of the disturbance of each past output, (B, H).
        carried: weight of that disturbance in the latent, (B, H).
        faded: mean square of the disturbances whose outputs are no longer kept, (B,).
    """

    inner: Tensor
    square: Tensor
    error: Tensor
    past: Tensor
    noise: Tensor
    carried: Tensor
    faded: Tensor

    def rows(self, index: Tensor) -> State:
        """The runs with the given indices."""
        return State(*(getattr(self, f.name)[index] for f in fields(self)))

    def stack(self, other: State) -> State:
        """These runs followed by others."""
        return State(
            *(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self))
        )


@dataclass(frozen=True, eq=False)
class Simulation:
    """Fitted coefficients and expected errors of B schedules.

    Attributes:
        coefficients: of the latent and of the H outputs, (B, T, 1 + H).
        errors: root mean square distance to the reference latents x_0 ... x_T, (B, T + 1).
        states: the runs before every step, T entries.
    """

    coefficients: Tensor
    errors: Tensor
    states: tuple[State, ...]


class System:
    """Gram matrices in the form in which steps are fitted and simulated.

    Args:
        inner: M Gram matrices, shape (M, R, R); the runs of a batch name theirs by index.
        nominal: the scheduler's first-order update, shape (T, 2).
        fit: how coefficients are fitted.
    """

    def __init__(self, inner: Tensor, nominal: Tensor, fit: Fit) -> None:
        """Lay the matrices out for row look-ups and measure the outputs' rates of change."""
        self.num_steps = T = len(nominal)
        self.size = R = inner.shape[-1]
        if R != 2 * T + 1:
            raise ValueError(f"a profile of {(R - 1) // 2} steps, but a nominal update of {T}")
        self.fit = fit
        self.nominal = nominal
        self._target = inner.diagonal(dim1=1, dim2=2)
        # A row and a column of zeros stand for the outputs that a short history lacks.
        self._rows = torch.nn.functional.pad(inner, (0, 1, 0, 1)).reshape(-1, R + 1)
        self._rate = fit.sensitivity**2 * _rate_of_change(inner, T)

    def start(self, which: Tensor) -> State:
        """B runs at the noise x_0; ``which`` names the Gram matrix of each, shape (B,)."""
        inner = self._rows[which * (self.size + 1)]
        none = inner.new_zeros(len(which))
        past = torch.full((len(which), self.fit.history), -1)
        empty = inner.new_zeros(past.shape)
        return State(inner, inner[:, 0].clone(), none, past, empty, empty, none)

    def take(
        self, state: State, step: int, *, computed: Tensor, which: Tensor, z: Tensor | None = None
    ) -> tuple[State, Tensor]:
        """Take ``step`` with the coefficients ``z`` (B, 1 + H), fitted here if not given.

        Args:
            state: the runs before the step.
            step: its number.
            computed: which runs evaluate the network on it, (B,).
            which: the Gram matrix of each run, (B,).
            z: coefficients of the latent and of the past outputs, newest first.
        """
        state = self._compute(state, step, computed, which)
        columns = torch.where(state.past < 0, self.size, self.num_steps + 1 + state.past)
        index = which[:, None] * (self.size + 1) + columns
        rows = self._rows.index_select(0, index.flatten()).view(*columns.shape, self.size + 1)
        if z is None:
            z = self._solve(state, step, rows, columns)
        return self._advance(state, step, z, rows=rows, columns=columns, which=which), z

    def _compute(self, state: State, step: int, computed: Tensor, which: Tensor) -> State:
        """Let the marked runs evaluate the network; their oldest output makes room."""
        fresh = computed[:, None]

        def push(newest: Tensor, kept: Tensor) -> Tensor:
            return torch.where(fresh, torch.cat([newest[:, None], kept[:, :-1]], dim=1), kept)

        noise = self._rate[which, step] * state.error
        lost = state.carried[:, -1] ** 2 * state.noise[:, -1] * computed
        return replace(
            state,
            past=push(torch.full_like(state.past[:, 0], step), state.past),
            noise=push(noise, state.noise),
            carried=push(torch.zeros_like(noise), state.carried),
            faded=state.faded + lost,
        )

    def _solve(self, state: State, step: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Coefficients (B, 1 + H) of latent and outputs that land nearest to the reference."""
        B, H = columns.shape
        A = rows.new_empty(B, H + 1, H + 1)
        A[:, 0, 0] = state.square + (state.carried**2 * state.noise).sum(1) + state.faded
        cross = state.inner.gather(1, columns) + state.carried * state.noise
        A[:, 0, 1:] = A[:, 1:, 0] = cross
        A[:, 1:, 1:] = rows.gather(2, columns[:, None].expand(-1, H, -1)) + state.noise.diag_embed()
        rhs = torch.cat([state.inner[:, step + 1, None], rows[:, :, step + 1]], dim=1)
        nominal, fit = self.nominal[step], self.fit
        return solve_ridge(A, rhs, nominal, ridge=fit.ridge, free_latent=fit.free_latent)

    def _advance(
        self, state: State, step: int, z: Tensor, *, rows: Tensor, columns: Tensor, which: Tensor
    ) -> State:
        """The runs after ``step``."""
        c, a = z[:, 0], z[:, 1:]
        moved = torch.bmm(a[:, None], rows)[:, 0]  # products of the outputs' part with everything
        along = (a * state.inner.gather(1, columns)).sum(1)
        own = (a * moved.gather(1, columns)).sum(1)
        square = c**2 * state.square + 2 * c * along + own
        inner = c[:, None] * state.inner + moved
        carried = c[:, None] * state.carried + a
        faded = c**2 * state.faded
        y = step + 1
        distance = (square - 2 * inner[:, y] + self._target[which, y]).clamp_min(0)
        error = distance + (carried**2 * state.noise).sum(1) + faded
        return State(inner, square, error, state.past, state.noise, carried, faded)

    def simulate(
        self, computed: Tensor, which: Tensor, coefficients: Tensor | None = None
    ) -> Simulation:
        """Simulate B schedules, fitting their coefficients unless they are given.

        Args:
            computed: mask of the computed steps, (B, T).
            which: the Gram matrix of each schedule, (B,).
            coefficients: (B, T, 1 + H).
        """
        states, zs = [self.start(which)], []
        for k in range(self.num_steps):
            z = None if coefficients is None else coefficients[:, k]
            state, z = self.take(states[-1], k, computed=computed[:, k], which=which, z=z)
            states.append(state)
            zs.append(z)
        errors = torch.stack([state.error for state in states], dim=1).sqrt()
        return Simulation(torch.stack(zs, dim=1), errors, tuple(states[:-1]))


def schedule_mask(schedules: Sequence[Sequence[int]], num_steps: int) -> Tensor:
    """Mask (B, T) of the computed steps of several schedules."""
    mask = torch.zeros(len(schedules), num_steps, dtype=torch.bool)
    for row, steps in zip(mask, schedules, strict=True):
        row[list(check_compute_steps(steps, num_steps))] = True
    return mask


def fit_plans(
    statistics: RunStatistics, nominal: Tensor, *, schedules: Sequence[Sequence[int]], fit: Fit
) -> list[TrajectoryPlan]:
    """Plans of several schedules, their coefficients fitted on all prompts of a profile.

    Args:
        statistics: the profile.
        nominal: the scheduler's first-order update, shape (T, 2).
        schedules: the computed steps of each.
        fit: how coefficients are fitted.
    """
    system = System(statistics.inner.mean(0, keepdim=True), nominal, fit)
    mask = schedule_mask(schedules, system.num_steps)
    z = system.simulate(mask, torch.zeros(len(mask), dtype=torch.long)).coefficients
    return [
        TrajectoryPlan(tuple(steps), row[:, 0].clone(), row[:, 1:].clone())
        for steps, row in zip(schedules, z, strict=True)
    ]


def predict_errors(
    statistics: RunStatistics, nominal: Tensor, *, plan: TrajectoryPlan, sensitivity: float = 1.0
) -> Tensor:
    """Expected distance of each prompt's latents to its reference ones, shape (P, T + 1)."""
    P = statistics.num_prompts
    fit = Fit(history=plan.history, sensitivity=sensitivity)
    z = torch.cat([plan.latent[:, None], plan.outputs], dim=1).expand(P, -1, -1)
    mask = schedule_mask([plan.compute_steps], plan.num_steps).expand(P, -1)
    return System(statistics.inner, nominal, fit).simulate(mask, torch.arange(P), z).errors


def _rate_of_change(inner: Tensor, T: int) -> Tensor:
    """``|v_k - v_{k-1}|^2 / |x_k - x_{k-1}|^2`` per matrix and step, shape (M, T); 0 at step 0."""
    diagonal = inner.diagonal(dim1=1, dim2=2)
    squared = diagonal[:, 1:] + diagonal[:, :-1] - 2 * inner.diagonal(1, dim1=1, dim2=2)
    x, v = squared[:, : T - 1], squared[:, T + 1 :]
    rate = v.clamp_min(0) / x.clamp_min(torch.finfo(x.dtype).tiny)
    return torch.cat([torch.zeros_like(diagonal[:, :1]), rate.where(x > 0, 0.0)], dim=1)
