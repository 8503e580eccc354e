"""Trajectory rectification as linear algebra: fit and simulate compute schedules offline.

Without the network: a step is fitted and simulated from inner products of the full run's vectors.

Letters: u = (x_0 ... x_T, v_0 ... v_{T-1}) are the vectors of the full run, G their Gram matrix,
<,> the mean over elements of a product, |a|^2 = <a, a>, E an expectation. y is the latent of the
accelerated run, y_0 = x_0. Prompts that share coefficients are one long vector, so G is the mean
of theirs.

Step k combines the latent and the H newest computed outputs w_j, computed at the steps past_j. With
the index j, v_j and n_j are short for those of step past_j:

    y' = c y + sum_j a_j w_j                       z = (c, a_1 ... a_H)

An output is the reference output plus a disturbance, w_j = v_j + n_j, because it was computed at a
latent with an error. Its direction is not in the profile. Either it is modelled as independent
noise of mean 0. With ``error`` = E|y - x_k|^2 at the step k that computes it,

    E|n|^2 = noise = rate[k] * error               rate[k] = sensitivity^2 |v_k - v_{k-1}|^2
                                                             / |x_k - x_{k-1}|^2,  rate[0] = 0

Or how the network responds to errors was measured: its output follows the latent, with a slope
``response[k]`` (``steppers.ResponseStepper``). Then the output w of step k is, but for noise,

    m = v_k + response[k] (p - x_k)                bend = m - v_k;  0 without a response

Every latent has a deterministic part p, a combination of reference vectors, and a random one:

    y = p + sum_j carried_j n_j + f                E|f|^2 = faded

where f holds the disturbances whose outputs have left the history. Of p and m_j only products are
needed, never the vectors: ``inner`` = <p, u_b> for all b, ``square`` = <p, p>, ``along_j`` =
<p, m_j>, ``among_ij`` = <m_i, m_j>, ``bends_j`` = <m_j - v_j, u_b> for all b.

1. A computed step pushes m into the history with noise = rate[k] * error and carried = 0: the
   latent before the step does not contain n_k. The evicted output leaves its part in the latent:

       faded += carried_H^2 noise_H

2. The coefficients minimise E|y' - x_{k+1}|^2 plus a ridge towards the update z0, the scheduler's
   first-order step with the polynomial of some order through the newest outputs; of order 0 that
   is the newest output itself, plain reuse if k is reused:

       A[y, y] = square + sum_j carried_j^2 noise_j + faded
       A[y, j] = <p, m_j> + carried_j noise_j      n_j is both in the latent and in its output
       A[i, j] = <m_i, m_j> + (i == j) noise_j
       rhs     = <p, x_{k+1}>, <m_j, x_{k+1}>      noise does not correlate with the target
       (A + diag(pull)) z = rhs + pull * z0        pull_i = ridge A[i, i] + a small floor

   c stays nominal; the rows of the outputs are solved for a. An output that does not exist yet is
   a zero row and column, and gets the coefficient 0.

3. Inserting y = p + sum_j carried_j n_j + f into the step propagates each part:

       inner'   = c inner + sum_j a_j <m_j, u>
       square'  = c^2 square + 2 c sum_j a_j <p, m_j> + sum_ij a_i a_j <m_i, m_j>
       along'_i = c along_i + sum_j a_j <m_i, m_j>
       carried' = c carried + a
       faded'   = c^2 faded
       error'   = |p' - x_{k+1}|^2 + sum_j carried'_j^2 noise_j + faded'
                  with |p' - x_{k+1}|^2 = square' - 2 inner'[x_{k+1}] + <x_{k+1}, x_{k+1}>

A step costs O(H T + H^3), whatever the size of the latent, and B runs are simulated as a batch.
Real disturbances follow the Jacobian of the network; the closed-loop refit measures them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ertacache.core.gram import Gram
from ertacache.core.groups import ONE_GROUP, Groups
from ertacache.core.plans import TrajectoryPlan, check_compute_steps

__all__ = [
    "Fit",
    "Simulation",
    "State",
    "System",
    "fit_plans",
    "prior_weights",
    "schedule_mask",
    "solve_ridge",
]

MAX_ORDER = 2
JITTER = 1e-12  # of the diagonal: keeps systems of nearly parallel outputs solvable


@dataclass(frozen=True)
class Fit:
    """How the coefficients of a step are fitted.

    Attributes:
        history: number of computed outputs a step combines, H.
        ridge: pull towards the nominal update, as a fraction of the Gram diagonal.
        order: of the polynomial through the newest computed outputs that the ridge pulls towards,
            0 to 2; 0 is plain reuse.
        groups: parts of the latent that have coefficients of their own.
        branch: combine as many raw outputs of one guidance branch as well; in a refit only.
        sensitivity: standard deviation of the assumed error of an output, per error of the latent
            at which it was computed, in units of the output's rate of change along the full run.
            0 assumes that outputs at accelerated latents equal those of the full run.
        response: outputs follow errors of the latent as was measured, in place of that assumption.
    """

    history: int = 4
    ridge: float = 1e-3
    sensitivity: float = 1.0
    order: int = 0
    groups: Groups = ONE_GROUP
    branch: bool = False
    response: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 1 <= self.history <= 16:
            raise ValueError(f"history must be between 1 and 16, got {self.history}")
        if not (self.ridge >= 0 and self.sensitivity >= 0):
            raise ValueError("ridge and sensitivity must not be negative")
        if self.order not in range(MAX_ORDER + 1):
            raise ValueError(f"order must be from 0 to {MAX_ORDER}, got {self.order}")


@dataclass(eq=False)
class State:
    """B simulated runs before some step k, in the notation of the module's docstring.

    Attributes:
        inner: <p, u_b> for every reference vector, and 0 in the last column, (B, R + 1).
        square: <p, p>, (B,).
        error: E|y - x_k|^2, (B,).
        past: the steps past_j, newest first, -1 where there is none, (B, H).
        noise: E|n_j|^2 of each past output, (B, H).
        carried: weight of n_j in the latent, (B, H).
        faded: E|f|^2, (B,).
        along: <p, m_j>, (B, H).
        among: <m_i, m_j>, (B, H, H).
        bends: <m_j - v_j, u_b>, (B, H, R + 1); (B, H, 0) without a response.
    """

    inner: Tensor
    square: Tensor
    error: Tensor
    past: Tensor
    noise: Tensor
    carried: Tensor
    faded: Tensor
    along: Tensor
    among: Tensor
    bends: Tensor

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
        coefficients: of the latent and of the H outputs, (B, T, groups, 1 + H).
        errors: root mean square distance to the reference latents x_0 ... x_T, (B, T + 1).
        states: the runs before every step, T entries; with groups, one run for each.
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
        response: the measured one, shape (T,); needed if the fit takes it into account.
    """

    def __init__(
        self, gram: Gram, nominal: Tensor, fit: Fit, response: Tensor | None = None
    ) -> None:
        """Lay the matrices out for row look-ups and measure the outputs' rates of change."""
        self.num_steps = T = len(nominal)
        self.size = gram.size
        if gram.num_steps != T:
            raise ValueError(f"a profile of {gram.num_steps} steps, but a nominal update of {T}")
        if fit.response and (response is None or len(response) != T):
            raise ValueError(f"the fit needs the response of the outputs on {T} steps")
        self.fit = fit
        self.groups = gram.groups
        self._nominal: list[list[float]] = nominal.tolist()
        self._target = gram.squares
        self._rows = gram.padded_rows()
        self._noisy = fit.sensitivity > 0 and not fit.response
        self._rate = fit.sensitivity**2 * gram.output_rate()
        found = response if fit.response else None
        self._response: list[float] | None = None if found is None else found.tolist()

    def start(self, which: Tensor) -> State:
        """B runs at the noise x_0; ``which`` is the index of the Gram matrix of each, (B,)."""
        B, H = len(which), self.fit.history
        inner = self._rows[which * (self.size + 1)]
        none = inner.new_zeros(B)
        past, empty = torch.full((B, H), -1), inner.new_zeros(B, H)
        among = inner.new_zeros(B, H, H)
        bends = inner.new_zeros(B, H, 0 if self._response is None else self.size + 1)
        square = inner[:, 0].clone()
        return State(inner, square, none, past, empty, empty, none, empty, among, bends)

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
        rows = self._outputs(state, which)
        if z is None:
            z = self._solve(state, step, rows)
        return self._advance(state, step, z, rows=rows, which=which), z

    def _places(self, past: Tensor, which: Tensor) -> Tensor:
        """Rows of past outputs among those of all matrices, (B, H)."""
        columns = torch.where(past < 0, self.size, self.num_steps + 1 + past)
        return which[:, None] * (self.size + 1) + columns

    def _outputs(self, state: State, which: Tensor) -> Tensor:
        """<m_j, u_b> of the history, (B, H, R + 1)."""
        places = self._places(state.past, which)
        rows = self._rows.index_select(0, places.flatten()).view(*places.shape, self.size + 1)
        return rows if self._response is None else rows.add_(state.bends)

    def _compute(self, state: State, step: int, computed: Tensor, which: Tensor) -> State:
        """Evaluate the network in the marked runs; their oldest output leaves the history."""
        fresh = computed[:, None]

        def push(newest: Tensor, kept: Tensor) -> Tensor:
            chosen = fresh.view(-1, *[1] * (kept.ndim - 1))
            return torch.where(chosen, torch.cat([newest[:, None], kept[:, :-1]], dim=1), kept)

        if self._noisy:
            noise = self._rate[which, step] * self._whole(state.error)
            # The disturbance of an output that leaves the history stays in the latent.
            lost = state.carried[:, -1].square() * state.noise[:, -1] * computed
            state = replace(
                state,
                noise=push(noise, state.noise),
                carried=push(torch.zeros_like(noise), state.carried),
                faded=state.faded + lost,
            )
        bend, along, products = self._evaluate(state, step, which)
        # Of the new output with itself and those that stay; these keep their own products.
        among = torch.empty_like(state.among)
        among[:, 1:, 1:] = state.among[:, :-1, :-1]
        among[:, 0], among[:, :, 0] = products, products
        return replace(
            state,
            past=push(torch.full_like(state.past[:, 0], step), state.past),
            along=push(along, state.along),
            among=torch.where(fresh[:, :, None], among, state.among),
            bends=state.bends if self._response is None else push(bend, state.bends),
        )

    def _evaluate(self, state: State, step: int, which: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The output m of a step: its bend (B, R + 1), <p, m> (B,), and its products (B, H).

        The products are those with itself and with the newest H - 1 outputs.
        """
        v, first = self.num_steps + 1 + step, which * (self.size + 1)
        old, bends = self._places(state.past[:, :-1], which), state.bends[:, :-1]  # one leaves
        along, with_old = state.inner[:, v], self._rows[old, v]
        itself = self._rows[first + v, v]
        if self._response is None:
            return state.bends[:, 0], along, torch.cat([itself[:, None], with_old], dim=1)
        slope, row = self._response[step], self._rows[first + step]
        bend = slope * (state.inner - row)
        follows = state.along[:, :-1] - self._rows[old, step] - bends[:, :, step]
        with_old = with_old + bends[:, :, v] + slope * follows
        off = state.square - 2 * state.inner[:, step] + row[:, step]  # |p - x_k|^2
        itself = itself + 2 * slope * (along - row[:, v]) + slope**2 * off
        along = along + slope * (state.square - state.inner[:, step])
        return bend, along, torch.cat([itself[:, None], with_old], dim=1)

    def _whole(self, error: Tensor) -> Tensor:
        """The error of all groups of a run, for each of them: a network mixes what it is given."""
        if self.groups == 1:
            return error
        return error.view(-1, self.groups).sum(1).repeat_interleave(self.groups)

    def _solve(self, state: State, step: int, rows: Tensor) -> Tensor:
        """Coefficients (B, 1 + H) of latent and outputs that minimise the expected error."""
        B, H = state.past.shape
        A = rows.new_empty(B, H + 1, H + 1)  # expected products of latent and outputs
        A[:, 0, 0], A[:, 0, 1:], A[:, 1:, 1:] = state.square, state.along, state.among
        if self._noisy:
            A[:, 0, 0] += (state.carried.square() * state.noise).sum(1) + state.faded
            A[:, 0, 1:] += state.carried * state.noise
            A[:, 1:, 1:] += state.noise.diag_embed()
        A[:, 1:, 0] = A[:, 0, 1:]
        rhs = torch.cat([state.inner[:, step + 1, None], rows[:, :, step + 1]], dim=1)
        c, a = self._nominal[step]
        prior = torch.zeros_like(rhs)
        prior[:, 0] = c
        prior[:, 1:] = a * prior_weights(state.past, step, order=self.fit.order)
        return solve_ridge(A, rhs, prior, ridge=self.fit.ridge)

    def _advance(self, state: State, step: int, z: Tensor, *, rows: Tensor, which: Tensor) -> State:
        """The runs after ``step``."""
        c, a = z[:, 0], z[:, 1:]
        moved = torch.bmm(a[:, None], rows)[:, 0]  # <sum_j a_j m_j, u_b> for all b
        own = torch.bmm(a[:, None], state.among)[:, 0]  # <sum_j a_j m_j, m_i>
        square = c.square() * state.square + 2 * c * (a * state.along).sum(1) + (a * own).sum(1)
        inner = c[:, None] * state.inner + moved
        y = step + 1
        error = (square - 2 * inner[:, y] + self._target[which, y]).clamp_min(0)
        if self._noisy:
            carried, faded = c[:, None] * state.carried + a, c.square() * state.faded
            error = error + (carried.square() * state.noise).sum(1) + faded
            state = replace(state, carried=carried, faded=faded)
        along = c[:, None] * state.along + own
        return replace(state, inner=inner, square=square, error=error, along=along)

    def simulate(
        self, computed: Tensor, which: Tensor, coefficients: Tensor | None = None
    ) -> Simulation:
        """Simulate B compute schedules, fitting their coefficients unless they are given.

        The groups of a run are simulated on their own; its error is that of all of them.

        Args:
            computed: their step masks, (B, T).
            which: index of the prompt of each, (B,).
            coefficients: (B, T, groups, 1 + H).
        """
        G = self.groups
        rows = (which[:, None] * G + torch.arange(G)).flatten()
        mask = computed.repeat_interleave(G, 0)
        given = None if coefficients is None else coefficients.movedim(2, 1).flatten(0, 1)
        states, zs = [self.start(rows)], []
        for k in range(self.num_steps):
            z = None if given is None else given[:, k]
            state, z = self.take(states[-1], k, computed=mask[:, k], which=rows, z=z)
            states.append(state)
            zs.append(z)
        errors = torch.stack([state.error for state in states], dim=1)
        B, H = len(which), self.fit.history
        found = torch.stack(zs, dim=1).view(B, G, self.num_steps, 1 + H).movedim(1, 2)
        total = errors.view(B, G, self.num_steps + 1).sum(1).sqrt()
        return Simulation(found, total, tuple(states[:-1]))


def schedule_mask(schedules: Sequence[Sequence[int]], num_steps: int) -> Tensor:
    """Step masks (B, T) of several compute schedules."""
    mask = torch.zeros(len(schedules), num_steps, dtype=torch.bool)
    for row, steps in zip(mask, schedules, strict=True):
        row[list(check_compute_steps(steps, num_steps))] = True
    return mask


def fit_plans(
    gram: Gram,
    nominal: Tensor,
    *,
    schedules: Sequence[Sequence[int]],
    fit: Fit,
    response: Tensor | None = None,
) -> list[TrajectoryPlan]:
    """Plans of several compute schedules, fitted on all prompts of a profile.

    Args:
        gram: the profile, one matrix per prompt.
        nominal: the scheduler's first-order update, shape (T, 2).
        schedules: the computed steps of each.
        fit: how coefficients are fitted.
        response: as that of ``System``.
    """
    system = System(gram.mean(), nominal, fit, response)
    mask = schedule_mask(schedules, system.num_steps)
    z = system.simulate(mask, torch.zeros(len(mask), dtype=torch.long)).coefficients
    return [
        TrajectoryPlan(tuple(steps), row.clone(), fit.groups)
        for steps, row in zip(schedules, z, strict=True)
    ]


def prior_weights(past: Tensor, step: int, *, order: int) -> Tensor:
    """Weights of the past outputs in the polynomial through the newest, at the present step.

    Lagrange's, in the numbers of the steps. With fewer outputs than it needs, of a lower order.

    Args:
        past: steps of the outputs, newest first, -1 where there is none, (B, H).
        step: the present step.
        order: of the polynomial.

    Example:
        >>> prior_weights(torch.tensor([[4, 2, 0], [4, 2, -1], [5, 2, 0]]), 5, order=2)
        tensor([[ 1.8750, -1.2500,  0.3750],
                [ 1.5000, -0.5000,  0.0000],
                [ 1.0000, -0.0000,  0.0000]], dtype=torch.float64)
    """
    weights = torch.zeros(past.shape, dtype=torch.float64)
    count = min(order + 1, past.shape[1])
    if count == 1:
        weights[:, 0] = 1.0
        return weights
    nodes, there = past[:, :count].double(), past[:, :count] >= 0
    factors = (step - nodes)[:, None] / (nodes[:, :, None] - nodes[:, None])
    used = there[:, None] & ~torch.eye(count, dtype=torch.bool)
    weights[:, :count] = factors.where(used, 1.0).prod(2) * there
    return weights


def solve_ridge(A: Tensor, rhs: Tensor, prior: Tensor, *, ridge: float) -> Tensor:
    """Minimise ``z A z - 2 rhs z + ridge diag(A) (z - prior)^2`` for B steps at once.

    The latent's coefficient stays that of the prior.

    Args:
        A: products of latent and outputs with each other, (B, 1 + H, 1 + H).
        rhs: their products with the latent to be reached, (B, 1 + H).
        prior: coefficients of latent and outputs that are pulled towards, (B, 1 + H).
        ridge: strength of the pull.

    Returns:
        The coefficients, (B, 1 + H); 0 for an output that does not exist (a zero row of ``A``).
    """
    diagonal = A.diagonal(dim1=1, dim2=2)
    floor = JITTER * diagonal.amax(1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
    pull = ridge * diagonal + floor
    A = A + pull.diag_embed()
    rhs = rhs + pull * prior
    c = prior[:, :1]
    a = torch.linalg.solve_ex(A[:, 1:, 1:], rhs[:, 1:] - c * A[:, 1:, 0]).result
    return torch.cat([c, a], dim=1)
