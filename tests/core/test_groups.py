"""Groups: a latent is the sum of its groups, and their coefficients are applied to each."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ertacache.core.gram import Gram, Trajectory, profile_run, run_rows
from ertacache.core.groups import (
    FOLDS,
    ONE_GROUP,
    GroupCombination,
    Groups,
    GroupStatistics,
    Layout,
    group_products,
    pool,
    spread,
)
from tests.core.filters import grouped_update
from tests.core.solvers import schedule_of

IMAGE, VIDEO = Layout(), Layout(channel=2)
TOKENS = Layout(channel=2, grid=(3, 5), patch=2)
CLIP = Layout(channel=2, grid=(2, 3, 5))
SHAPES = [
    ((2, 6, 8, 8), IMAGE),
    ((2, 6, 5, 7, 9), IMAGE),  # no side is a multiple of a block
    ((2, 5, 6, 4, 3), VIDEO),
    ((2, 15, 24), TOKENS),
    ((2, 30, 6), CLIP),
    ((2, 6, 1, 1), IMAGE),  # smaller than any block
]


def noise(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(latents: Tensor, groups: Groups, layout: Layout) -> list[Tensor]:
    """Every group of a latent by itself: all coefficients 0 but one."""
    found = []
    for group in range(groups.count):
        z = torch.zeros(1, groups.count, 1, dtype=torch.float64)
        z[0, group] = 1.0
        found.append(GroupCombination(z, groups, layout, latents)(0, [latents], [0]))
    return found


@pytest.mark.parametrize(("shape", "layout"), SHAPES)
def test_a_layout_is_undone(shape: tuple[int, ...], layout: Layout) -> None:
    latents = noise(shape)
    unpacked = layout.unpack(latents)
    assert layout.fits(shape)
    assert unpacked.shape[:2] == (2, 6)
    assert torch.equal(layout.pack(unpacked), latents)


@pytest.mark.parametrize(("shape", "layout"), SHAPES)
@pytest.mark.parametrize("groups", [Groups(6, 1), Groups(1, 3), Groups(3, 2), Groups(4, 3)])
def test_the_groups_of_a_latent_are_orthogonal_and_add_up_to_it(
    shape: tuple[int, ...], layout: Layout, groups: Groups
) -> None:
    latents = noise(shape)
    found = parts(latents, groups, layout)
    torch.testing.assert_close(torch.stack(found).sum(0), latents)
    for i, one in enumerate(found):
        for other in found[:i]:
            assert (one * other).sum().abs() < 1e-9
        again = parts(one, groups, layout)[i]  # a group of a group is the group
        torch.testing.assert_close(again, one)


@pytest.mark.parametrize(("shape", "layout"), SHAPES)
def test_products_by_group_are_those_of_the_groups(shape: tuple[int, ...], layout: Layout) -> None:
    groups, vectors = Groups(3, 3), [noise(shape, seed) for seed in range(3)]
    found = group_products(vectors, groups, layout)
    divided = [parts(vector, groups, layout) for vector in vectors]
    for group in range(groups.count):
        rows = torch.stack([divided[k][group].flatten(1) for k in range(3)], dim=1)
        expected = rows @ rows.mT / math.prod(shape[1:])
        torch.testing.assert_close(found[:, group], expected, atol=1e-12, rtol=1e-9)


def test_in_half_precision_the_groups_still_add_up() -> None:
    latents = noise((2, 4, 8, 8)).to(torch.bfloat16).float()
    z = torch.ones(1, 6, 1, dtype=torch.float64)
    whole = GroupCombination(z, Groups(2, 3), IMAGE, latents)
    assert torch.equal(whole(0, [latents.to(torch.bfloat16)], [0]), latents)


def test_the_filter_is_compiled_in_one_graph() -> None:
    latents = noise((1, 4, 6, 6)).float()
    z = noise((1, 6, 2))
    combination = GroupCombination(z, Groups(2, 3), IMAGE, latents)
    compiled = torch.compile(
        lambda a, b: combination(0, [a, b], [0, 1]), fullgraph=True, backend="eager"
    )
    plain = combination(0, [latents, 2 * latents], [0, 1])
    torch.testing.assert_close(compiled(latents, 2 * latents), plain)


def test_blocks_at_the_edge_are_means_of_what_is_there() -> None:
    row = torch.tensor([[[1.0, 3.0, 5.0, 7.0, 11.0]]])
    assert pool(row, 2).flatten().tolist() == [2.0, 6.0, 11.0]
    assert pool(row, 4).flatten().tolist() == [4.0, 11.0]
    assert spread(pool(row, 4), 4, (5,)).flatten().tolist() == [4.0, 4.0, 4.0, 4.0, 11.0]


def test_a_combination_is_that_of_explicit_filters_on_every_vector() -> None:
    """Several vectors, and columns of the coefficients that are not the first ones."""
    for shape, layout in SHAPES:
        x, *vectors = (noise(shape, seed) for seed in range(4))
        for groups in (Groups(6, 3), Groups(2, 4), Groups(4, 1)):
            z = noise((2, groups.count, 5), 9)
            found = GroupCombination(z, groups, layout, x)(1, vectors, [4, 0, 2])
            rows = torch.cat([torch.zeros_like(z[1, :, :1]), z[1][:, [4, 0, 2]]], dim=1)
            unpacked = [layout.unpack(vector) for vector in vectors]
            expected = grouped_update(layout.unpack(x), unpacked, rows, groups)
            torch.testing.assert_close(layout.unpack(found), expected, rtol=1e-9, atol=1e-9)


def test_a_combination_leaves_its_vectors_alone() -> None:
    vectors = [noise((1, 4, 6, 6), seed) for seed in range(3)]
    before = [vector.clone() for vector in vectors]
    for groups in (Groups(4, 1), Groups(1, 3)):
        combination = GroupCombination(noise((1, groups.count, 3)), groups, IMAGE, vectors[0])
        result = combination(0, vectors, range(3))
        assert all(result.data_ptr() != vector.data_ptr() for vector in vectors)
        assert result.untyped_storage().nbytes() == result.nbytes  # no bands behind it
    assert all(map(torch.equal, vectors, before))


def test_statistics_of_folds_are_those_of_the_profile() -> None:
    """The Gram matrix from x_0 and the outputs alone is that of all recorded vectors."""
    sigmas = torch.linspace(1, 0, 5, dtype=torch.float64)
    latents, outputs = [noise((3, 4, 6, 6))], []
    for k, step in enumerate(sigmas.diff().tolist()):
        outputs.append(noise((3, 4, 6, 6), 10 + k))
        latents.append(latents[-1] + step * outputs[-1])
    statistics = GroupStatistics.of(latents[0], outputs, IMAGE, folds=[0, 1, 0])
    plain = profile_run(Trajectory(tuple(latents), tuple(outputs))).gram.products
    rows = run_rows(schedule_of(sigmas))
    whole = statistics.gram(rows, ONE_GROUP)
    torch.testing.assert_close(whole.products, plain.mean(0, keepdim=True))
    divided = statistics.gram(rows, statistics.groups)
    assert (divided.groups, divided.num_prompts) == (12, 1)
    torch.testing.assert_close(divided.by_prompt.sum(1), whole.products)
    by_hand = group_products([*latents, *outputs], Groups(4, 3), IMAGE).mean(0)
    torch.testing.assert_close(divided.products, by_hand)
    only = statistics.select([1]).gram(rows, ONE_GROUP)
    torch.testing.assert_close(only.products, plain[1:2])
    nothing = statistics.select([])
    assert isinstance(nothing.gram(rows, ONE_GROUP), Gram)
    assert nothing.counts.sum() == 0
    assert statistics.counts.tolist() == [2, 1, *[0] * (FOLDS - 2)]


def test_statistics_with_weights_are_weighted_sums() -> None:
    start, output, folds = noise((3, 2, 4, 4)), noise((3, 2, 4, 4), 1), [0, 1, 0]
    found = GroupStatistics.of(start, [output], IMAGE, folds=folds, weights=[2.0, 3.0, 0.5])
    each = [
        GroupStatistics.of(start[k : k + 1], [output[k : k + 1]], IMAGE, folds=[folds[k]])
        for k in range(3)
    ]
    expected = 2 * each[0].products + 3 * each[1].products + each[2].products / 2
    torch.testing.assert_close(found.products, expected)
    assert found.counts.tolist()[:2] == [2, 1]


def test_statistics_of_parts_add_up() -> None:
    start, output = noise((4, 2, 4, 4)), noise((4, 2, 4, 4), 1)
    whole = GroupStatistics.of(start, [output], IMAGE, folds=[0, 1, 2, 0])
    first = GroupStatistics.of(start[:2], [output[:2]], IMAGE, folds=[0, 1])
    second = GroupStatistics.of(start[2:], [output[2:]], IMAGE, folds=[2, 0])
    torch.testing.assert_close((first + second).products, whole.products)
    assert torch.equal((first + second).counts, whole.counts)
    with pytest.raises(ValueError, match="other groups"):
        whole + GroupStatistics.of(start[:, :1], [output[:, :1]], IMAGE, folds=[0, 1, 2, 3])


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="1 to 16 channels"):
        Groups(channels=17)
    with pytest.raises(ValueError, match="do not consist of"):
        Groups(channels=3).merge(torch.zeros(4, 1, 1), Groups(channels=4))
    assert not TOKENS.fits((2, 16, 24))
    assert not IMAGE.fits((2, 6))


def test_places_are_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        assert Groups(channels=2).places(4).tolist() == [0, 0, 1, 1]
