"""SeaCache: the same bits as through diffusers' own call, and told what pipelines do not tell."""

from __future__ import annotations

import torch

from ertacache.baselines import Stats
from ertacache.baselines.seacache import SeaCache, _frames_first, _packed
from tests.baselines.direct import directly
from tests.baselines.rivals import BLOCKS, STEPS, Subject


def test_same_bits_as_used_directly(wan: Subject) -> None:
    rival = SeaCache()
    for threshold in (0.5, 2.0):
        expected = directly("wan", lambda pipe, x=threshold: rival.config(pipe, x))
        with rival.attach(wan.pipe, threshold, num_inference_steps=STEPS) as handle:
            assert torch.equal(wan.generate(), expected)
        assert handle.stats.reused > 0


def test_only_ends_are_computed_under_a_huge_threshold(subject: Subject) -> None:
    with SeaCache().attach(subject.pipe, 100.0, num_inference_steps=STEPS) as handle:
        assert not torch.equal(subject.generate(), subject.untouched)
    calls = BLOCKS * subject.branches
    assert handle.stats == Stats("blocks", 2 * calls, (STEPS - 2) * calls)
    assert torch.equal(subject.generate(), subject.untouched)


def test_nothing_is_reused_under_a_tiny_threshold(subject: Subject) -> None:
    with SeaCache().attach(subject.pipe, 1e-4, num_inference_steps=STEPS):
        assert torch.equal(subject.generate(), subject.untouched)


def test_latents_in_the_form_that_is_wanted(flux: Subject, cogvideox: Subject) -> None:
    places = torch.zeros(6, 3)
    places[:, 1], places[:, 2] = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([0, 1, 2] * 2)
    tokens = torch.arange(12.0).reshape(1, 6, 2)
    (picture,) = _packed(flux.network, (), {"img_ids": places, "hidden_states": tokens})
    assert picture.shape == (2, 1, 2, 3)
    assert picture[0, 0].tolist() == [[0, 2, 4], [6, 8, 10]]
    video = torch.zeros(1, 3, 2, 4, 5)
    assert _frames_first(cogvideox.network, (), {"hidden_states": video})[0].shape == (2, 3, 4, 5)


def test_latents_of_unknown_form_are_named(sd3: Subject) -> None:
    reason = SeaCache().applies(sd3.pipe)
    assert reason == "diffusers offers no cache for SD3Transformer2DModel"
