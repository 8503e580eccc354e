"""Trajectory rectification on one step of a run, and its refit; the full run.

Each class is a ``Stepper`` of ``sampler``. The update of step k combines the latent x and a
history: the last H computed outputs v, newest first, and, if the plan has a second history, as
many raw outputs r of one guidance branch:

    x' = c x + sum_j a_j v_j + sum_j b_j r_j

with one c, and a and b for each group of the latent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ertacache.core.distance import distances
from ertacache.core.gram import gram_of
from ertacache.core.groups import ONE_GROUP, GroupCombination, Groups, Layout, group_products
from ertacache.core.paper_steppers import PaperStepper
from ertacache.core.plans import PaperPlan, TrajectoryPlan, check_compute_steps
from ertacache.core.sampler import Advance, Stepper
from ertacache.core.simulate import Fit, prior_weights, solve_ridge

__all__ = [
    "FindLayout",
    "FullStepper",
    "RefitStepper",
    "ResponseStepper",
    "TrajectoryStepper",
    "combine",
    "fit_step",
    "make_stepper",
    "response_of",
]

NOTHING = 1e-12  # of the largest squared error: rounding

FindLayout = Callable[[Tensor], Layout]
"""The layout of a batch of latents; called on the first step of a run."""


def default_layout(latents: Tensor) -> Layout:
    """Channels behind the batch, the rest is the grid."""
    return Layout()


def make_stepper(
    plan: TrajectoryPlan | PaperPlan,
    *,
    layout: FindLayout = default_layout,
    cache_device: torch.device | None = None,
) -> Stepper:
    """The stepper of a plan.

    Args:
        plan: the plan.
        layout: finds the layout of the latents, if the plan has groups.
        cache_device: where outputs are kept; None leaves them where they are.
    """
    if isinstance(plan, TrajectoryPlan):
        return TrajectoryStepper(plan, layout=layout, cache_device=cache_device)
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

    def note_branch(self, raw: Tensor) -> None:
        """Nothing is made of it."""

    def switch(self) -> None:
        """Nothing is kept."""

    def held(self) -> Iterable[Tensor]:
        """Nothing."""
        return ()


class History:
    """The computed outputs that a run combines, newest first.

    Attributes:
        steps: on which they were computed.
    """

    def __init__(self, length: int, *, branch: bool, device: torch.device | None = None) -> None:
        """Keep up to ``length`` outputs, and as many of one branch if ``branch``."""
        self._length, self._branch, self._device = length, branch, device
        self._outputs: list[Tensor] = []
        self._raws: list[Tensor] = []
        self._raw: Tensor | None = None  # of the present step
        self.steps: list[int] = []

    def note_branch(self, raw: Tensor) -> None:
        """Keep the raw output of one branch until the step is pushed."""
        if self._branch:
            self._raw = raw

    def push(self, k: int, v: Tensor) -> None:
        """Keep the output of step ``k``; the oldest leaves."""
        self.steps = [k, *self.steps][: self._length]
        self._outputs = [self._keep(v), *self._outputs][: self._length]
        if not self._branch:
            return
        if self._raw is None or self._raw.shape != v.shape:
            found = "none" if self._raw is None else f"one of shape {tuple(self._raw.shape)}"
            raise ValueError(
                "the plan needs the output of one guidance branch, of the shape of the latent "
                f"{tuple(v.shape)}, but there is {found}: run with guidance, as calibrated"
            )
        self._raws = [self._keep(self._raw), *self._raws][: self._length]
        self._raw = None

    def vectors(self, device: torch.device) -> list[Tensor]:
        """The outputs, then those of one branch, on a device."""
        kept = [*self._outputs, *self._raws]
        return kept if self._device is None else [output.to(device) for output in kept]

    def held(self) -> list[Tensor]:
        """All that is kept."""
        return [*self._outputs, *self._raws]

    def _keep(self, output: Tensor) -> Tensor:
        return output if self._device is None else output.to(self._device)


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

    def __init__(
        self,
        plan: TrajectoryPlan,
        *,
        layout: FindLayout = default_layout,
        cache_device: torch.device | None = None,
    ) -> None:
        """Turn the plan's coefficients into Python numbers: a step must not read a device."""
        self._plan, self._find_layout = plan, layout
        self._computed = frozenset(plan.compute_steps)
        self._rows: list[list[float]] = plan.coefficients[:, 0].tolist()
        self.num_steps = plan.num_steps
        self._history = History(plan.history, branch=plan.branch, device=cache_device)
        self._combination: GroupCombination | None = None

    def computes(self, k: int) -> bool:
        """Whether the network is evaluated on step ``k``."""
        return k in self._computed

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """The rectified update of step ``k``."""
        if v is not None:
            self._history.push(k, v)
        vectors, row = self._history.vectors(x.device), self._rows[k]
        places = _places(len(self._history.steps), self._plan)
        if self._plan.groups == ONE_GROUP:
            return combine(x, vectors, [row[0], *(row[place] for place in places)])
        if self._combination is None:  # once per run: the coefficients go to the device
            self._combination = GroupCombination(
                self._plan.coefficients[..., 1:], self._plan.groups, self._find_layout(x), x
            )
        return row[0] * x + self._combination(k, vectors, [place - 1 for place in places])

    def note_branch(self, raw: Tensor) -> None:
        """Keep it, if the plan has a second history."""
        self._history.note_branch(raw)

    def switch(self) -> None:
        """Keep the history: the coefficients were fitted across the change of networks."""

    def held(self) -> Iterable[Tensor]:
        """The history."""
        return self._history.held()


def _places(length: int, plan: TrajectoryPlan) -> list[int]:
    """Columns of the coefficients of a history that may not be full yet."""
    parts = range(2 if plan.branch else 1)
    return [1 + part * plan.history + j for part in parts for j in range(length)]


class RefitStepper:
    """Closed-loop refit: the rectified update, fitted on every step to the latents reached there.

    All calibration prompts run in lockstep, in one batch; if they run in several, ``reduce`` joins
    the normal equations of all batches. Several fits may be made at once, in which prompts count
    differently; a batch takes its steps with one of them.

    Attributes:
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
        weights: Tensor | None = None,
        follows: int = 0,
        layout: FindLayout = default_layout,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Prepare to fit a compute schedule.

        Args:
            latents: the reference latents x_0 ... x_T, each of shape (P, ...).
            compute_steps: the computed steps.
            nominal: the scheduler's first-order update, shape (T, 2).
            fit: history, ridge, groups.
            weights: how much each prompt counts in each of K fits, shape (K, P), float64; those of
                weight 0 run along. By default all count alike, in one fit.
            follows: the fit that the steps are taken with.
            layout: finds the layout of the latents, if there are groups.
            reduce: adds up the inner products of several batches of prompts.
        """
        steps = check_compute_steps(compute_steps, len(nominal))
        columns = 1 + fit.history * (2 if fit.branch else 1)
        z = torch.zeros(len(nominal), fit.groups.count, columns, dtype=torch.float64)
        self._plan = TrajectoryPlan(steps, z, fit.groups, branch=fit.branch)
        self._latents, self._nominal, self._fit = latents, nominal, fit
        counted = torch.ones(1, len(latents[0])) if weights is None else weights
        self._some = (counted > 0).any(0)  # prompts that count in any fit
        self._weights, self._follows = counted[:, self._some], follows
        self._reduce, self._find_layout = reduce, layout
        self._history = History(fit.history, branch=fit.branch)
        self.num_steps = len(nominal)
        self.distances = torch.full((len(latents[0]),), torch.inf, dtype=torch.float64)

    @property
    def coefficients(self) -> Tensor:
        """Those of the steps taken so far, shape (T, groups, 1 + H), float64."""
        return self._plan.coefficients

    def computes(self, k: int) -> bool:
        """Whether the network is evaluated on step ``k``."""
        return k in self._plan.compute_steps

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """Fit step ``k`` and take it."""
        if v is not None:
            self._history.push(k, v)
        target, vectors = self._latents[k + 1].to(x.device), self._history.vectors(x.device)
        steps, groups = self._history.steps, self._fit.groups
        prior = torch.zeros(1 + len(vectors), dtype=torch.float64)
        weights = prior_weights(np.array([steps]), k, order=self._fit.order)[0]
        prior[0] = self._nominal[k, 0]
        prior[1 : 1 + len(steps)] = self._nominal[k, 1] * torch.from_numpy(weights)
        layout = Layout() if groups == ONE_GROUP else self._find_layout(x)
        z = fit_step(
            self._chosen(x),
            [self._chosen(output) for output in vectors],
            self._chosen(target),
            weights=self._weights,
            prior=prior,
            ridge=self._fit.ridge,
            groups=groups,
            layout=layout,
            reduce=self._reduce,
        )[self._follows]
        columns = _places(len(steps), self._plan)
        self._plan.coefficients[k, :, 0] = prior[0]
        self._plan.coefficients[k][:, columns] = z[:, 1:]
        if groups == ONE_GROUP:
            reached = combine(x, vectors, z[0].tolist())
        else:
            combination = GroupCombination(z[None, :, 1:], groups, layout, x)
            reached = prior[0].item() * x + combination(0, vectors, range(len(vectors)))
        if k + 1 == self.num_steps:
            self.distances = distances(reached, target)
        return reached

    def _chosen(self, batch: Tensor) -> Tensor:
        return batch[self._some.to(batch.device)]

    def plan(self) -> TrajectoryPlan:
        """The plan that was fitted."""
        plan = self._plan
        return TrajectoryPlan(
            plan.compute_steps, plan.coefficients.clone(), plan.groups, branch=plan.branch
        )

    def note_branch(self, raw: Tensor) -> None:
        """Keep it, if there is a second history."""
        self._history.note_branch(raw)

    def switch(self) -> None:
        """Keep the history, as ``TrajectoryStepper`` does."""

    def held(self) -> Iterable[Tensor]:
        """The history."""
        return self._history.held()


class ResponseStepper:
    """Follows a plan, and measures how outputs respond to the errors of its latents.

    The network is evaluated on every step, and its output w compared with that of the full run, v,
    as far as it follows the error of the latent: with e = y - x,

        response[k] = <w - v, e> / <e, e>

    Attributes:
        products: sums over elements of ``<w - v, e>`` and ``<e, e>``, shape (T, 2), float64.
    """

    sigmas = None
    flexible = False

    def __init__(self, plan: TrajectoryPlan, latents: Sequence[Tensor], *, run: Tensor) -> None:
        """Prepare to follow a plan of one group.

        Args:
            plan: the plan.
            latents: the reference latents x_0 ... x_T, each of shape (P, ...).
            run: their coefficients in x_0 and the outputs, ``Schedule.latents``. The outputs of
                the full run are found from them.
        """
        self._plan, self._latents, self._run = TrajectoryStepper(plan), latents, run
        self._outputs: list[Tensor] = []
        self.num_steps = plan.num_steps
        self.products = torch.zeros(plan.num_steps, 2, dtype=torch.float64)

    def computes(self, k: int) -> bool:
        """True: the network is evaluated on every step."""
        return True

    def step(self, k: int, x: Tensor, v: Tensor | None, advance: Advance) -> Tensor:
        """Compare the output of step ``k``, then take the step of the plan."""
        if v is None:
            raise ValueError(f"step {k} was reused in a run that measures the response")
        reference = self._reference_output(k)
        e = (x.cpu().double() - self._latents[k].cpu().double()).flatten()
        if reference is not None:
            d = (v.cpu().double() - reference).flatten()
            self.products[k] = torch.stack([d @ e, e @ e])
        return self._plan.step(k, x, v if self._plan.computes(k) else None, advance)

    def _reference_output(self, k: int) -> Tensor | None:
        """The output of a step of the full run; None if its next latent does not depend on it."""
        first, *weights = self._run[k + 1, : k + 2].tolist()
        left = self._latents[k + 1].cpu().double() - first * self._latents[0].cpu().double()
        for output, weight in zip(self._outputs, weights, strict=False):
            if weight:
                left = left.sub(output, alpha=weight)
        found = left / weights[-1] if weights[-1] else None
        self._outputs.append(torch.zeros_like(left) if found is None else found)
        return found

    def note_branch(self, raw: Tensor) -> None:
        """Nothing is made of it."""

    def switch(self) -> None:
        """Keep the history, as ``TrajectoryStepper`` does."""

    def held(self) -> Iterable[Tensor]:
        """The history."""
        return self._plan.held()


def response_of(products: Tensor) -> Tensor:
    """The response on every step from the products that were measured, shape (T,).

    Where the latent had no error, as before the first reused step, that of the next step.

    Args:
        products: of ``ResponseStepper``, added up over batches, shape (T, 2).

    Example:
        >>> response_of(torch.tensor([[0.0, 0.0], [1.0, 2.0], [3.0, 1.0]]))
        tensor([0.5000, 0.5000, 3.0000])
    """
    follows, error = products.unbind(1)
    found, known = torch.zeros_like(error), 0.0
    for k in reversed(range(len(error))):
        if error[k] > NOTHING * error.max():
            known = float(follows[k] / error[k])
        found[k] = known
    return found


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
    prior: Tensor,
    ridge: float,
    weights: Tensor | None = None,
    groups: Groups = ONE_GROUP,
    layout: Layout | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Coefficients c, a_1 ... a_h that bring ``c x + sum_j a_j v_j`` nearest to ``target``.

    Several fits of the same vectors are made at once, in which prompts count differently.

    Args:
        sample: the latents reached, shape (P, ...).
        outputs: what is combined with them.
        target: the reference latents of the next step.
        prior: the coefficients that the ridge pulls towards, shape (1 + h,); the first is kept.
        ridge: the pull, as a fraction of the Gram diagonal.
        weights: how much each prompt counts in each of K fits, shape (K, P); by default all count
            alike, in one fit.
        groups: parts of the latent that have coefficients of their own.
        layout: of the latents, if there are groups.
        reduce: adds up the inner products of several batches.

    Returns:
        The coefficients, shape (K, groups, 1 + h), float64.

    Example:
        >>> x, v = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])
        >>> prior = torch.tensor([1.0, -0.5], dtype=torch.float64)
        >>> fit_step(x, [v], torch.tensor([[1.0, 1.0]]), prior=prior, ridge=0.0)
        tensor([[[1.0000, 0.5000]]], dtype=torch.float64)
    """
    vectors = [sample, *outputs, target]
    if groups == ONE_GROUP:
        m = len(vectors)
        each = [gram_of([row.flatten() for row in rows]) for rows in zip(*vectors, strict=True)]
        products = torch.stack(each) if each else torch.zeros(0, m, m, dtype=torch.float64)
        products = products[:, None]
    else:
        products = group_products(vectors, groups, layout or Layout())
    counted = torch.ones(1, len(sample)) if weights is None else weights
    G = (counted.double()[:, :, None, None, None] * products).sum(1)
    if reduce is not None:
        G = reduce(G)
    n, A = len(vectors) - 1, G.flatten(0, 1).cpu().numpy()
    wanted = prior.expand(len(A), -1).numpy()
    z = solve_ridge(A[:, :n, :n], A[:, :n, n], wanted, ridge=ridge)
    return torch.from_numpy(z).view(*G.shape[:2], -1)
