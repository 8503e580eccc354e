"""A pipeline for mental arithmetic: four blocks, each of which doubles its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from torch import Tensor, nn

BLOCKS = 4


class Double(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * hidden_states


class Toy(nn.Module):
    """16 x, in four steps."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Double() for _ in range(BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class ToyPipe:
    """Evaluates the network on given inputs: a row per step, an entry per guidance branch."""

    def __init__(self) -> None:
        self.scheduler: Any = FlowMatchEulerDiscreteScheduler()
        self.transformer = Toy()

    def __call__(self, rows: Sequence[Sequence[float]]) -> list[list[float]]:
        self.scheduler.set_timesteps(len(rows))
        outputs = []
        for t, row in zip(self.scheduler.timesteps, rows, strict=True):
            given = [self.transformer(torch.tensor([x])) for x in row]
            outputs.append([v.item() for v in given])
            self.scheduler.step(given[0], t, torch.zeros(1))
        return outputs


@contextmanager
def known_blocks() -> Iterator[None]:
    """Register the toy's block with diffusers for a while."""
    metadata = TransformerBlockMetadata(return_hidden_states_index=0)
    TransformerBlockRegistry.register(Double, metadata)
    try:
        yield
    finally:
        del TransformerBlockRegistry._registry[Double]
