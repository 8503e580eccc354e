"""What a full run leaves in a profile, per prompt, and the same of runs that never happened.

Inner products, means and L1 distances do not grow with the latent. They are joined over prompts and
added up over pieces of a latent, so profiles can be streamed, merged and sharded.

**Resampling.** A run on another schedule (other sigmas, fewer steps, another scheduler, a later
start) consists of outputs at other noise levels, and of what its scheduler makes of them:

1. An output at sigma' is interpolated from the profiled outputs at the nearest sigmas: a row of
   weights over v_0 ... v_{T-1} (``interpolation_rows``).
2. A deterministic scheduler is linear in the start and the outputs, ``x'_k = L[k, 0] x'_0 +
   sum_j L[k, 1 + j] v'_j``. L is read off the scheduler itself (``Schedule.latents``).
3. So every vector of that run is a row of weights W over the profiled vectors, and its Gram matrix
   is ``W G W^T``. Everything that is solved from a profile can be solved from it.

The approximation is in 1: the outputs of the other run are taken for those of the profiled run at
the same noise level.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

__all__ = [
    "Gram",
    "RunStatistics",
    "Schedule",
    "Trajectory",
    "fit_weights",
    "gram_of",
    "interpolation_rows",
    "profile_run",
    "resample",
    "resample_response",
    "resampling_rows",
    "run_rows",
]

CHUNK = 1 << 16  # elements cast to float64 at a time: bounds memory for any latent
NEGLIGIBLE = 1e-3  # an error, as a share of the latent: smaller ones do not show
NODES = 4  # profiled outputs that an output at another noise level is interpolated from
TOLERANCE = 1e-4  # of the largest entry: other hardware rounds, another shift is far above


@dataclass(frozen=True, eq=False)
class Trajectory:
    """The latents and outputs of a run.

    Attributes:
        latents: x_0 ... x_T, each of shape (P, ...).
        outputs: v_0 ... v_{T-1}, like the latents.
    """

    latents: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return len(self.outputs)


@dataclass(frozen=True, eq=False, repr=False)
class Schedule:
    """A run of T steps as its scheduler takes it: noise levels, and the steps as linear algebra.

    Attributes:
        sigmas: share of noise before every step and after the last, shape (T + 1,), float64,
            strictly descending: ``s / (a + s)`` for a latent of ``a`` data and ``s`` noise.
        nominal: first-order update, ``x[k+1] = nominal[k, 0] x[k] + nominal[k, 1] v[k]``, shape
            (T, 2), float64.
        latents: L, coefficients of x_0 ... x_T in the start x_0 and the outputs v_0 ... v_{T-1} of
            a full run, shape (T + 1, T + 1), float64; not above the diagonal.
        scale: size of the latents before every step and after the last, in units in which data
            and noise have the variance that the network sees, shape (T + 1,), float64. 1 but for
            schedulers that scale the network's input.
        begun: whether x_0 is pure noise; otherwise the run begins later, with data in it.
    """

    sigmas: Tensor
    nominal: Tensor
    latents: Tensor
    scale: Tensor
    begun: bool = True

    def __repr__(self) -> str:
        """What it is in one line, without its tensors."""
        ends = f"{self.sigmas[0]:.4g} to {self.sigmas[-1]:.4g}"
        return f"<schedule of {self.num_steps} steps, sigma {ends}>"

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return len(self.nominal)

    @property
    def target(self) -> Tensor:
        """The final latent of a full run in its start and outputs, shape (T + 1,)."""
        return self.latents[-1]

    def same_run(self, other: Schedule) -> bool:
        """Whether two schedules take the same run, up to rounding."""
        return (
            self.num_steps == other.num_steps
            and self.begun == other.begun
            and close(self.sigmas, other.sigmas)
            and close(self.target, other.target)
        )


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two vectors are of one length and differ by rounding only.

    Example:
        >>> close(torch.ones(2), torch.ones(2) * 1.00001), close(torch.ones(2), torch.ones(3))
        (True, False)
    """
    if a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max())


@dataclass(frozen=True, eq=False)
class Gram:
    """Inner products of the vectors x_0 ... x_T, v_0 ... v_{T-1} of full runs.

    Attributes:
        products: mean over elements of the product of any two of the R = 2T + 1 vectors, one
            symmetric matrix per prompt (or mean of prompts), shape (M, R, R), float64. With
            groups, sums over those of a group, divided by all: one matrix after the other for
            the groups of a prompt, which add up to that of the prompt.
        groups: number of groups, a divisor of M.

    Example:
        >>> gram = Gram(torch.eye(5, dtype=torch.float64)[None])
        >>> gram.num_steps, gram.x(2), gram.v(0)
        (2, 2, 3)
        >>> gram.between(gram.x(1), gram.x(1))
        tensor([1.], dtype=torch.float64)
    """

    products: Tensor
    groups: int = 1

    @property
    def num_prompts(self) -> int:
        """Number of prompts, or of means of prompts."""
        return len(self.products) // self.groups

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return (self.size - 1) // 2

    @property
    def size(self) -> int:
        """Number of vectors R."""
        return self.products.shape[-1]

    def x(self, step: int) -> int:
        """Place of the latent before ``step``; T is the final one."""
        return step

    def v(self, step: int) -> int:
        """Place of the output of ``step``."""
        return self.num_steps + 1 + step

    def between(self, a: int | Tensor, b: int | Tensor) -> Tensor:
        """Products of vectors with the places ``a`` and ``b``, shape (M, ...)."""
        return self.products[:, a, b]

    @property
    def by_prompt(self) -> Tensor:
        """The products by prompt and group, (prompts, groups, R, R)."""
        return self.products.view(-1, self.groups, self.size, self.size)

    @property
    def squares(self) -> Tensor:
        """Mean square of every vector, shape (M, R)."""
        return self.products.diagonal(dim1=1, dim2=2)

    def mean(self) -> Gram:
        """One prompt, the mean of all."""
        return Gram(self.by_prompt.mean(0), self.groups)

    def folds(self, count: int) -> tuple[Gram, Gram, Tensor]:
        """Split the prompts into folds: the means of each fold, of the rest, and the fold sizes.

        Prompt p is in fold ``p % count``. With one prompt the rest is that prompt itself.
        """
        P, by_group = self.num_prompts, self.by_prompt
        fold = torch.arange(P) % count
        size = torch.bincount(fold).double()
        column = size[:, None, None, None]
        held = torch.zeros(count, *by_group.shape[1:], dtype=torch.float64)
        held.index_add_(0, fold, by_group)
        rest = (held.sum(0) - held) / (P - column) if P > 1 else held
        parts = (held / column, rest)
        mine, others = (Gram(part.flatten(0, 1), self.groups) for part in parts)
        return mine, others, size

    def output_rate(self) -> Tensor:
        """``|v_k - v_{k-1}|^2 / |x_k - x_{k-1}|^2``, shape (M, T); 0 at step 0.

        With groups v is that of a group, and x the whole latent.
        """
        T, squares = self.num_steps, self.squares
        moved = squares[:, 1:] + squares[:, :-1] - 2 * self.products.diagonal(1, dim1=1, dim2=2)
        x, v = moved[:, : T - 1], moved[:, T + 1 :]
        x = x.view(self.num_prompts, self.groups, T - 1).sum(1).repeat_interleave(self.groups, 0)
        rate = v.clamp_min(0) / x.clamp_min(torch.finfo(x.dtype).tiny)
        return torch.cat([torch.zeros_like(squares[:, :1]), rate.where(x > 0, 0.0)], dim=1)

    def weighted(self, weights: Tensor) -> Gram:
        """The matrices of every prompt times its weight, whose geometric mean is made 1.

        So the geometric mean of errors over prompts is as without weights.
        """
        factors = weights / weights.log().mean().exp()
        return Gram(
            self.products * factors.repeat_interleave(self.groups)[:, None, None], self.groups
        )

    def combined(self, rows: Tensor) -> Gram:
        """Products of combinations of the vectors: ``W G W^T`` for the rows of W, (R', R)."""
        return Gram(_symmetric(rows @ self.products @ rows.mT), self.groups)


@dataclass(frozen=True, eq=False, repr=False)
class RunStatistics:
    """Statistics of full runs; P prompts, T steps, R = 2T + 1 vectors x_0..x_T, v_0..v_{T-1}.

    Attributes:
        inner: products of ``Gram``, shape (P, R, R).
        means: mean of each vector's elements, shape (P, R).
        residual_l1: mean absolute difference of the residuals v - x of two steps, (P, T, T).
        residual_norm: mean absolute value of each step's residual, (P, T).
        output_l1: mean absolute difference of the outputs of two steps, (P, T, T).
        output_norm: mean absolute value of each step's output, (P, T).
        elements: number of elements averaged over, int64, (P,).
    """

    inner: Tensor
    means: Tensor
    residual_l1: Tensor
    residual_norm: Tensor
    output_l1: Tensor
    output_norm: Tensor
    elements: Tensor

    def __post_init__(self) -> None:
        """Check shapes, types, finiteness and symmetry."""
        if self.residual_norm.ndim != 2 or 0 in self.residual_norm.shape:
            raise ValueError("residual_norm must have shape (P, T) with P and T at least 1")
        P, T = self.residual_norm.shape
        R = 2 * T + 1
        shapes = ((P, R, R), (P, R), (P, T, T), (P, T), (P, T, T), (P, T), (P,))
        for field, shape in zip(fields(self), shapes, strict=True):
            value: Tensor = getattr(self, field.name)
            dtype = torch.int64 if field.name == "elements" else torch.float64
            if value.dtype != dtype or value.shape != shape:
                raise ValueError(f"{field.name} must be {dtype} of shape {shape}")
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{field.name} holds a number that is not finite")
        for name in ("inner", "residual_l1", "output_l1"):
            matrix: Tensor = getattr(self, name)
            if not torch.equal(matrix, matrix.mT):
                raise ValueError(f"{name} must be symmetric")
        if bool((self.elements < 1).any()):
            raise ValueError("elements must be positive")

    def __repr__(self) -> str:
        """What it is in one line, without its tensors."""
        return f"<statistics of {self.num_prompts} runs of {self.num_steps} steps>"

    @property
    def num_prompts(self) -> int:
        """Number of prompts P."""
        return self.residual_norm.shape[0]

    @property
    def num_steps(self) -> int:
        """Number of sampling steps T."""
        return self.residual_norm.shape[1]

    @property
    def gram(self) -> Gram:
        """The inner products, one matrix per prompt."""
        return Gram(self.inner)

    @property
    def final_spread(self) -> float:
        """Standard deviation of the elements of the final latents, over all prompts."""
        last = self.num_steps
        spread = (self.inner[:, last, last] - self.means[:, last].square()).mean()
        return math.sqrt(max(spread.item(), 0.0))

    def select(self, prompts: Sequence[int]) -> RunStatistics:
        """The statistics of some of the prompts, given by their numbers."""
        return RunStatistics(**{f.name: getattr(self, f.name)[list(prompts)] for f in fields(self)})

    def join(self, *others: RunStatistics) -> RunStatistics:
        """Put the prompts of several profiles of the same steps side by side."""
        if any(other.num_steps != self.num_steps for other in others):
            raise ValueError("statistics of different step counts cannot be joined")
        parts = (self, *others)
        joined = {f.name: torch.cat([getattr(p, f.name) for p in parts]) for f in fields(self)}
        return RunStatistics(**joined)

    def __add__(self, other: RunStatistics) -> RunStatistics:
        """Statistics of the same prompts over the elements of both: pieces of one latent."""
        if self.residual_norm.shape != other.residual_norm.shape:
            raise ValueError("pieces to be added must have the same prompts and steps")
        elements = self.elements + other.elements
        share = other.elements.double() / elements

        def blend(a: Tensor, b: Tensor) -> Tensor:
            return a + (b - a) * share.view(-1, *[1] * (a.ndim - 1))

        means = {
            f.name: blend(getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)
            if f.name != "elements"
        }
        return RunStatistics(**means, elements=elements)


def profile_run(run: Trajectory) -> RunStatistics:
    """Profile a full run in float64: one set of statistics per prompt of its batch.

    Example:
        >>> noise, v = torch.tensor([[1.0, 3.0], [2.0, 2.0]]), torch.zeros(2, 2)
        >>> stats = profile_run(Trajectory((noise, noise), (v,)))
        >>> stats.gram.between(0, 0)  # mean square of x_0, one per prompt
        tensor([5., 4.], dtype=torch.float64)
    """
    latents = [x.flatten(1) for x in run.latents]
    outputs = [v.flatten(1) for v in run.outputs]
    total: RunStatistics | None = None
    for start in range(0, latents[0].shape[1], CHUNK):
        part = slice(start, start + CHUNK)
        piece = _profile_piece([x[:, part] for x in latents], [v[:, part] for v in outputs])
        total = piece if total is None else total + piece
    if total is None:
        raise ValueError("the run's latents have no elements")
    return total


def fit_weights(gram: Gram, nominal: Tensor) -> Tensor:
    """How much each prompt counts in a fit, shape (P,): plain reuse costs all of them the same.

    The inverse of the squared error that it adds, reusing every output for one step. Without
    weights the few prompts that change fastest, as with a strong guidance, would decide alone.
    Errors below a thousandth of the final latent count as that.

    Args:
        gram: of full runs, one group.
        nominal: the scheduler's first-order update, shape (T, 2).
    """
    T, squares = gram.num_steps, gram.squares
    moved = squares[:, 1:] + squares[:, :-1] - 2 * gram.products.diagonal(1, dim1=1, dim2=2)
    error = (nominal[1:, 1].square() * moved[:, T + 1 :].clamp_min(0)).sum(1)
    least = (NEGLIGIBLE**2 * squares[:, T]).clamp_min(torch.finfo(torch.float64).tiny)
    return 1 / error.maximum(least)


def interpolation_rows(nodes: Tensor, at: Tensor) -> Tensor:
    """Weights of the values at ``nodes`` that interpolate the values at ``at``.

    Lagrange's polynomial through the four nearest nodes; outside of the nodes a line through the
    two nearest, because polynomials of a higher degree run away there.

    Args:
        nodes: strictly descending, shape (N,).
        at: shape (M,).

    Returns:
        The weights, shape (M, N), float64.

    Example:
        >>> nodes = torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64)
        >>> interpolation_rows(nodes, torch.tensor([0.75, 0.25]))
        tensor([[ 0.3750,  0.7500, -0.1250],
                [-0.1250,  0.7500,  0.3750]], dtype=torch.float64)
    """
    N = len(nodes)
    rows = nodes.new_zeros(len(at), N)
    for row, s in zip(rows, at.to(nodes), strict=True):
        inside = bool(nodes[-1] <= s <= nodes[0])
        count = min(N, NODES if inside else 2)
        above = int((nodes > s).sum())  # number of nodes before s
        first = min(max(above - count // 2, 0), N - count)
        near = nodes[first : first + count]
        for i in range(count):
            others = torch.cat([near[:i], near[i + 1 :]])
            row[first + i] = ((s - others) / (near[i] - others)).prod()
    return rows


def run_rows(schedule: Schedule) -> Tensor:
    """The vectors x_0 ... x_T, v_0 ... v_{T-1} of a run in its start and outputs, (R, T + 1)."""
    T = schedule.num_steps
    return torch.cat([schedule.latents, torch.eye(T + 1, dtype=schedule.latents.dtype)[1:]])


def resampling_rows(profiled: Schedule, run: Schedule) -> Tensor:
    """The vectors of full runs on another schedule in those of the profiled runs, (R', R)."""
    T, n = profiled.num_steps, run.num_steps
    outputs = profiled.sigmas.new_zeros(n, 2 * T + 1)
    outputs[:, T + 1 :] = interpolation_rows(profiled.sigmas[:-1], run.sigmas[:-1])
    start = outputs.new_zeros(2 * T + 1)
    if run.begun:
        start[0] = run.scale[0] / profiled.scale[0]
    else:
        weights = interpolation_rows(profiled.sigmas, run.sigmas[:1])[0]
        start[: T + 1] = run.scale[0] * weights / profiled.scale
    latents = run.latents[:, :1] * start + run.latents[:, 1:] @ outputs
    return torch.cat([latents, outputs])


def resample(gram: Gram, profiled: Schedule, run: Schedule) -> Gram:
    """The Gram matrices of full runs on another schedule.

    Args:
        gram: of the profiled runs.
        profiled: their schedule.
        run: the other one.
    """
    if profiled.same_run(run):
        return gram
    return gram.combined(resampling_rows(profiled, run))


def resample_response(response: Tensor, profiled: Schedule, run: Schedule) -> Tensor:
    """The response of outputs to errors of the latent on another schedule, shape (T',).

    Interpolated by noise level along straight lines, constant beyond the ends.

    Args:
        response: that of the profiled runs, shape (T,).
        profiled: their schedule.
        run: the other one.
    """
    if profiled.same_run(run):
        return response
    nodes, at = profiled.sigmas[:-1].flip(0), run.sigmas[:-1]
    values = (response * profiled.scale[:-1]).flip(0)
    after = torch.searchsorted(nodes, at).clamp(1, max(1, len(nodes) - 1))
    if len(nodes) == 1:
        found = values.expand(len(at))
    else:
        share = ((at - nodes[after - 1]) / (nodes[after] - nodes[after - 1])).clamp(0, 1)
        found = values[after - 1].lerp(values[after], share)
    return found / run.scale[:-1]


def gram_of(vectors: Sequence[Tensor]) -> Tensor:
    """Inner products of flat vectors per element, in float64, a chunk at a time.

    Example:
        >>> gram_of([torch.tensor([1.0, 1.0]), torch.tensor([2.0, 0.0])]).tolist()
        [[1.0, 1.0], [1.0, 2.0]]
    """
    n = len(vectors[0])
    total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
    for start in range(0, n, CHUNK):
        rows = torch.stack([v[start : start + CHUNK].double() for v in vectors])
        total += (rows @ rows.mT).cpu()
    return total / max(1, n)  # a batch without prompts adds nothing to a sum of batches


def _profile_piece(latents: Sequence[Tensor], outputs: Sequence[Tensor]) -> RunStatistics:
    x = torch.stack(list(latents), dim=1).double()  # (P, T + 1, n)
    v = torch.stack(list(outputs), dim=1).double()  # (P, T, n)
    P, n = x.shape[0], x.shape[-1]
    rows = torch.cat([x, v], dim=1)
    r = v - x[:, :-1]
    return RunStatistics(
        inner=_symmetric(rows @ rows.mT / n),
        means=rows.mean(-1),
        residual_l1=_symmetric(torch.cdist(r, r, p=1.0) / n),
        residual_norm=r.abs().mean(-1),
        output_l1=_symmetric(torch.cdist(v, v, p=1.0) / n),
        output_norm=v.abs().mean(-1),
        elements=torch.full((P,), n, dtype=torch.int64),
    )


def _symmetric(matrix: Tensor) -> Tensor:
    return (matrix + matrix.mT) / 2
