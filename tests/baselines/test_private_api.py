"""Blocks and their streams are read off diffusers' metadata."""

from __future__ import annotations

import torch

from ertacache.baselines.private_api import (
    find_blocks,
    find_hooks,
    one_network,
    remember_hooks,
    why_no_blocks,
    why_not_one_network,
)
from tests.baselines.cases import BLOCKS, Subject, attributes
from tests.baselines.toy import ToyPipe, known_blocks
from tests.integration.tiny import CASES


def test_blocks_of_every_pipeline(subject: Subject) -> None:
    blocks = find_blocks(one_network(subject.pipe))
    assert len(blocks) == BLOCKS
    assert why_no_blocks(subject.pipe) is None
    joint = subject.name != "wan"
    assert [block.encoder_index is not None for block in blocks] == [joint] * BLOCKS


def test_order_of_streams(flux: Subject, cogvideox: Subject) -> None:
    hidden, text = torch.ones(1), torch.zeros(1)
    first = find_blocks(flux.network)[0]
    assert first.result((hidden, text)) == (text, hidden)
    assert first.outputs((text, hidden)) == (hidden, text)
    other = find_blocks(cogvideox.network)[0]
    assert other.result((hidden, text)) == (hidden, text)


def test_unknown_blocks_are_named() -> None:
    pipe = ToyPipe()
    assert why_no_blocks(pipe) == "diffusers has no metadata for two or more blocks of Toy"
    with known_blocks():
        assert why_no_blocks(pipe) is None


def test_two_networks_are_named() -> None:
    reason = why_not_one_network(CASES["wan-experts"].build())
    assert reason is not None
    assert "transformer, transformer_2" in reason


def test_hooks_of_diffusers_leave_nothing(flux: Subject) -> None:
    from diffusers import FirstBlockCacheConfig

    before = attributes(flux.pipe)
    restore = remember_hooks(flux.network)
    flux.network.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    assert len(find_hooks(flux.network, "fbc_block_hook")) == BLOCKS - 1
    flux.network.disable_cache()
    assert attributes(flux.pipe) != before  # what diffusers itself leaves
    restore()
    vars(flux.network).pop("_cache_config")
    assert attributes(flux.pipe) == before
