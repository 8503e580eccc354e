from __future__ import annotations

import torch
from torch import Tensor

from ertacache.core.least_squares import solve_positive, solve_ridge


def random_problem(batch: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(batch, size + 1, 40, generator=generator, dtype=torch.float64)
    G = rows @ rows.mT
    return G[:, :size, :size], G[:, :size, size]


def test_elimination_agrees_with_lapack() -> None:
    for size in (1, 2, 5):
        A, b = random_problem(20, size)
        assert torch.allclose(solve_positive(A, b), torch.linalg.solve(A, b), atol=1e-10)


def test_without_a_pull_it_is_least_squares() -> None:
    A, b = random_problem(3, 4)
    nominal = torch.tensor([1.0, -0.1], dtype=torch.float64)
    z = solve_ridge(A, b, nominal, ridge=0.0, free_latent=True)
    assert torch.allclose(z, torch.linalg.solve(A, b), atol=1e-8)


def test_a_fixed_latent_keeps_its_coefficient_and_the_rest_is_optimal() -> None:
    A, b = random_problem(3, 4)
    nominal = torch.tensor([0.7, -0.1], dtype=torch.float64)
    z = solve_ridge(A, b, nominal, ridge=0.0, free_latent=False)
    assert torch.equal(z[:, 0], torch.full((3,), 0.7, dtype=torch.float64))
    gradient = torch.einsum("bij,bj->bi", A, z) - b
    assert gradient[:, 1:].abs().max() < 1e-8


def test_a_strong_pull_ends_at_the_nominal_update() -> None:
    A, b = random_problem(3, 4)
    nominal = torch.tensor([0.7, -0.1], dtype=torch.float64)
    for free in (True, False):
        z = solve_ridge(A, b, nominal, ridge=1e9, free_latent=free)
        assert torch.allclose(z, torch.tensor([0.7, -0.1, 0, 0]).double(), atol=1e-8)


def test_an_output_that_does_not_exist_gets_no_weight() -> None:
    A, b = random_problem(2, 4)
    A[:, 3, :] = A[:, :, 3] = b[:, 3] = 0
    nominal = torch.tensor([1.0, -0.1], dtype=torch.float64)
    z = solve_ridge(A, b, nominal, ridge=1e-3, free_latent=False)
    shorter = solve_ridge(A[:, :3, :3], b[:, :3], nominal, ridge=1e-3, free_latent=False)
    assert torch.equal(z[:, 3], torch.zeros(2, dtype=torch.float64))
    assert torch.allclose(z[:, :3], shorter, atol=1e-10)
