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

from ertacache.core.gram import Gram, RunStatistics
from ertacache.core.plans import TrajectoryPlan, check_compute_steps

__all__ = [
    "Fit",
    "Simulation",
    "State",
    "System",
    "fit_plans",
    "schedule_mask",
    "solve_positive",
    "solve_ridge",
]

JITTER = 1e-12  # of the diagonal: keeps systems of nearly parallel outputs solvable


@dataclass(frozen=True)
class Fit:
    """How the coefficients of a step are fitted.

    Attributes:
        history: number of computed outputs a step combines, H.
        ridge: pull towards the nominal update, as a fraction of the Gram diagonal.
        sensitivity: standard deviation of the assumed error of an output, per error of the latent
            at which it was computed, in units of the output's rate of change along the full run.
            0 assumes that outputs at accelerated latents equal those of the full run.
    """

    history: int = 4
    ridge: float = 1e-3
    sensitivity: float = 1.0

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1 <= self.history <= 16:
            raise ValueError(f"history must be between 1 and 16, got {self.history}")
        if not (self.ridge >= 0 and self.sensitivity >= 0):
            raise ValueError("ridge and sensitivity must not be negative")


@dataclass(eq=False)
class State:
    """B simulated runs before some step, in the notation of the module's docstring.

    Attributes:
        inner: p, products of each latent with every reference vector and with zero, (B, R + 1).
        square: q, mean square of each latent without noise, (B,).
        error: expected mean square of its distance to the reference latent, (B,).
        past: computed steps, newest first, -1 where there is none, (B, H).
        noise: n, variance of the noise in each past output, (B, H).
        carried: w, weight of that noise in the latent, (B, H).
        faded: f, variance in the latent of the noise of outputs no longer kept, (B,).
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
    """Fitted coefficients and expected errors of B compute schedules.

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
        gram: M Gram matrices; each run of a batch refers to one of them by its index ``which``.
        nominal: the scheduler's first-order update, shape (T, 2).
        fit: how coefficients are fitted.
    """

    def __init__(self, gram: Gram, nominal: Tensor, fit: Fit) -> None:
        """Lay the matrices out for row look-ups and measure the outputs' rates of change."""
        self.num_steps = T = len(nominal)
        self.size = gram.size
        if gram.num_steps != T:
            raise ValueError(f"a profile of {gram.num_steps} steps, but a nominal update of {T}")
        self.fit = fit
        self.nominal = nominal
        self._target = gram.squares
        self._rows = gram.padded_rows()
        self._rate = fit.sensitivity**2 * gram.output_rate()

    def start(self, which: Tensor) -> State:
        """B runs at the noise x_0; ``which`` is the index of the Gram matrix of each, (B,)."""
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
            which: index of the Gram matrix of each run, (B,).
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
        """Evaluate the network in the marked runs; their oldest output leaves the history."""
        fresh = computed[:, None]

        def push(newest: Tensor, kept: Tensor) -> Tensor:
            return torch.where(fresh, torch.cat([newest[:, None], kept[:, :-1]], dim=1), kept)

        noise = self._rate[which, step] * state.error  # n of the new output
        # The noise of an output that leaves the history stays in the latent: w^2 n goes to f.
        lost = state.carried[:, -1] ** 2 * state.noise[:, -1] * computed
        return replace(
            state,
            past=push(torch.full_like(state.past[:, 0], step), state.past),
            noise=push(noise, state.noise),
            carried=push(torch.zeros_like(noise), state.carried),
            faded=state.faded + lost,
        )

    def _solve(self, state: State, step: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Coefficients (B, 1 + H) of latent and outputs that minimise the expected error."""
        B, H = columns.shape
        A = rows.new_empty(B, H + 1, H + 1)  # expected products of latent and outputs
        A[:, 0, 0] = state.square + (state.carried**2 * state.noise).sum(1) + state.faded
        cross = state.inner.gather(1, columns) + state.carried * state.noise
        A[:, 0, 1:] = A[:, 1:, 0] = cross
        A[:, 1:, 1:] = rows.gather(2, columns[:, None].expand(-1, H, -1)) + state.noise.diag_embed()
        rhs = torch.cat([state.inner[:, step + 1, None], rows[:, :, step + 1]], dim=1)
        return solve_ridge(A, rhs, self.nominal[step], ridge=self.fit.ridge)

    def _advance(
        self, state: State, step: int, z: Tensor, *, rows: Tensor, columns: Tensor, which: Tensor
    ) -> State:
        """The runs after ``step``."""
        c, a = z[:, 0], z[:, 1:]
        moved = torch.bmm(a[:, None], rows)[:, 0]  # <sum_j a_j v_j, every reference vector>
        along = (a * state.inner.gather(1, columns)).sum(1)  # <x, sum_j a_j v_j>
        own = (a * moved.gather(1, columns)).sum(1)  # |sum_j a_j v_j|^2
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
        """Simulate B compute schedules, fitting their coefficients unless they are given.

        Args:
            computed: their step masks, (B, T).
            which: index of the Gram matrix of each, (B,).
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
    """Step masks (B, T) of several compute schedules."""
    mask = torch.zeros(len(schedules), num_steps, dtype=torch.bool)
    for row, steps in zip(mask, schedules, strict=True):
        row[list(check_compute_steps(steps, num_steps))] = True
    return mask


def fit_plans(
    statistics: RunStatistics, nominal: Tensor, *, schedules: Sequence[Sequence[int]], fit: Fit
) -> list[TrajectoryPlan]:
    """Plans of several compute schedules, fitted on all prompts of a profile.

    Args:
        statistics: the profile.
        nominal: the scheduler's first-order update, shape (T, 2).
        schedules: the computed steps of each.
        fit: how coefficients are fitted.
    """
    system = System(statistics.gram.mean(), nominal, fit)
    mask = schedule_mask(schedules, system.num_steps)
    z = system.simulate(mask, torch.zeros(len(mask), dtype=torch.long)).coefficients
    return [
        TrajectoryPlan(tuple(steps), row[:, None].clone())
        for steps, row in zip(schedules, z, strict=True)
    ]


def solve_ridge(A: Tensor, rhs: Tensor, nominal: Tensor, *, ridge: float) -> Tensor:
    """Minimise ``z A z - 2 rhs z + ridge diag(A) (z - nominal)^2`` for B steps at once.

    The latent's coefficient stays the nominal one.

    Args:
        A: products of latent and outputs with each other, (B, 1 + H, 1 + H).
        rhs: their products with the latent to be reached, (B, 1 + H).
        nominal: coefficients of latent and newest output in the nominal update, (2,).
        ridge: strength of the pull towards it.

    Returns:
        The coefficients, (B, 1 + H); 0 for an output that does not exist (a zero row of ``A``).
    """
    diagonal = A.diagonal(dim1=1, dim2=2)
    floor = JITTER * diagonal.amax(1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    pull = ridge * diagonal + floor
    prior = torch.zeros_like(rhs)
    prior[:, :2] = nominal
    A = A + pull.diag_embed()
    rhs = rhs + pull * prior
    c = prior[:, :1]
    return torch.cat([c, solve_positive(A[:, 1:, 1:], rhs[:, 1:] - c * A[:, 1:, 0])], dim=1)


def solve_positive(A: Tensor, b: Tensor) -> Tensor:
    """Solve B small positive definite systems by elimination over the batch.

    Example:
        >>> solve_positive(torch.tensor([[[4.0, 2.0], [2.0, 2.0]]]), torch.tensor([[8.0, 6.0]]))
        tensor([[1., 2.]])
    """
    M = torch.cat([A, b[..., None]], dim=-1).permute(1, 2, 0).contiguous()  # (n, n + 1, B)
    n = len(M)
    for i in range(n):
        row = M[i, i:] / M[i, i]
        M[:, i:] -= M[:, i, None] * row
        M[i, i:] = row
    return M[:, n].T
