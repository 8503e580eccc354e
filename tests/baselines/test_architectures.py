"""One row per architecture: found by network and by first block, and what its functions read."""

from __future__ import annotations

import torch

from ertacache.baselines.architectures import (
    ARCHITECTURES,
    find_architecture,
    find_architecture_of_block,
)
from ertacache.baselines.private_api import find_blocks
from tests.baselines.cases import Subject


def test_rows_are_found_by_network_and_by_block(any_subject: Subject) -> None:
    row = find_architecture(any_subject.network)
    assert row is not None
    assert row.network == type(any_subject.network).__name__
    assert find_architecture_of_block(find_blocks(any_subject.network)[0].module) is row


def test_rows_name_classes_once() -> None:
    assert len({row.network for row in ARCHITECTURES}) == len(ARCHITECTURES)
    assert len({row.block for row in ARCHITECTURES}) == len(ARCHITECTURES)


def test_network_without_a_row(sd3: Subject) -> None:
    assert find_architecture(sd3.network) is None
    assert find_architecture_of_block(find_blocks(sd3.network)[0].module) is None


def test_latents_as_videos(flux: Subject, cogvideox: Subject) -> None:
    places = torch.zeros(6, 3)
    places[:, 1], places[:, 2] = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2] * 2)
    tokens = torch.arange(12.0).reshape(1, 6, 2)
    (image,) = read_videos(flux, img_ids=places, hidden_states=tokens)
    assert image.shape == (2, 1, 2, 3)
    assert image[0, 0].tolist() == [[0, 2, 4], [6, 8, 10]]
    video = torch.zeros(1, 3, 2, 4, 5)
    assert read_videos(cogvideox, hidden_states=video)[0].shape == (2, 3, 4, 5)


def read_videos(subject: Subject, **kwargs: torch.Tensor) -> list[torch.Tensor]:
    row = find_architecture(subject.network)
    assert row is not None
    assert row.latent_videos is not None
    assert row.latent_videos.read is not None
    return row.latent_videos.read(subject.network, (), kwargs)
