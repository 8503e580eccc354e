"""The raw output of one guidance branch, in whichever way a pipeline has its branches evaluated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.integration.branch import branch_output, tensors_of
from ertacache.integration.record import record
from tests.compatibility.matrix import GREEN

LATENT = torch.zeros(2, 4, 3, 3)
ROWS = {row.title: row for row in GREEN}


def outputs(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def test_sequential_guidance() -> None:
    """The first of two calls; also of three, and in whatever structure the network returns it."""
    raw = outputs(2, 4, 3, 3)
    for output in (raw, (raw,), [raw, None], {"sample": raw}):
        for calls in (2, 3):
            found = branch_output(output, LATENT, calls=calls)
            assert found is not None
            assert torch.equal(found, raw)
            assert found.data_ptr() == raw.data_ptr()  # it is kept anyway


@pytest.mark.parametrize("branches", [2, 3])
def test_guidance_in_one_batch(branches: int) -> None:
    raw = outputs(2 * branches, 4, 3, 3)
    found = branch_output((raw,), LATENT, calls=1)
    assert found is not None
    assert torch.equal(found, raw[:2])
    assert found.untyped_storage().nbytes() == LATENT.nbytes  # the other branches are not kept


def test_no_guidance() -> None:
    """One call with as many outputs as latents: there is no branch besides the output."""
    assert branch_output(outputs(2, 4, 3, 3), LATENT, calls=1) is None
    assert branch_output((outputs(2, 8, 3, 3),), LATENT, calls=1) is None
    assert branch_output(None, LATENT, calls=1) is None
    assert branch_output({"sample": None}, LATENT, calls=2) is None


def test_learned_variance() -> None:
    """Its channels follow those of the output."""
    for raw, calls in ((outputs(4, 8, 3, 3), 1), (outputs(2, 8, 3, 3), 2)):
        found = branch_output(raw, LATENT, calls=calls)
        assert found is not None
        assert torch.equal(found, raw[:2, :4])
        assert found.untyped_storage().nbytes() == LATENT.nbytes


@pytest.mark.parametrize(
    "shape", [(4, 4, 2, 3), (4, 3, 3, 3), (4, 4, 9), (1, 4, 3, 3), (4, 4, 1, 3, 3)]
)
def test_outputs_of_another_shape_are_no_branch(shape: tuple[int, ...]) -> None:
    for calls in (1, 2):
        assert branch_output(outputs(*shape), LATENT, calls=calls) is None


def test_a_branch_is_not_part_of_a_graph() -> None:
    raw = outputs(4, 4, 3, 3).requires_grad_()
    for calls in (1, 2):
        found = branch_output(raw, LATENT, calls=calls)
        assert found is not None
        assert not found.requires_grad


def test_tensors_of_nested_outputs() -> None:
    a, b = torch.ones(1), torch.ones(2)
    nested = {"x": [a, ("text", None)], "y": (b, 3)}
    assert [id(tensor) for tensor in tensors_of(nested)] == [id(a), id(b)]


FOUND: dict[str, tuple[bool, dict[str, Any]]] = {
    "Flux": (False, {}),  # its guidance is an input of the network
    "Flux, true guidance": (True, {}),
    "Wan 2.1 T2V": (True, {}),
    "Stable Diffusion 3": (True, {}),
    "Stable Diffusion 1.5, PAG": (True, {}),  # three branches in one batch
    "PixArt-Alpha": (True, {}),  # learned variance
    "Open-Sora 1.2": (True, {}),
    "Ideogram 4, two networks": (True, {}),
    "Lumina 2": (False, {}),  # guidance ends after half of the steps
    "Stable Diffusion 1.5": (False, {"guidance_scale": 1.0}),
    "Z-Image": (False, {}),  # a list with one entry per sample
}


@pytest.mark.parametrize("title", list(FOUND))
def test_branches_of_pipelines(title: str) -> None:
    """It is recorded whether every step has one."""
    there, changes = FOUND[title]
    row = ROWS[title]
    assert record(row.build(), **row.arguments() | changes).branch == there


def test_guidance_that_lasts_has_a_branch_on_every_step() -> None:
    row = ROWS["Lumina 2"]
    full = record(row.build(), **row.arguments() | {"cfg_trunc_ratio": 1.0})
    assert full.branch
