"""The tiny pipelines of the tests, with networks deep enough for methods that cache blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ertacache.models.opensora import RFlowScheduler
from tests.integration.tiny import CASES as TINY
from tests.integration.tiny import STEPS, Case, awaken, call_arguments
from tests.models.opensora.small import pipeline


def opensora() -> Any:
    """Its timesteps are shifted as those of a large video, into the range in which PAB reuses."""
    pipe = pipeline()
    pipe.scheduler = RFlowScheduler(base_resolution=32)
    return pipe


_VIDEO = {"height": 32, "width": 32, "num_frames": 9}
CASES = TINY | {"opensora": Case(opensora, _VIDEO | {"guidance_scale": 7.0})}
DEPTHS: dict[str, dict[str, int]] = {
    "flux": {"num_layers": 2, "num_single_layers": 2},
    "wan": {"num_layers": 4},
    "cogvideox": {"num_layers": 4},
    "sd3": {"num_layers": 4},
    "opensora": {"num_layers": 2},  # pairs
}
BLOCKS = 4


@dataclass(frozen=True, eq=False)
class Subject:
    """A pipeline, the result of its full run, and how many calls of the network a step has."""

    name: str
    pipe: Any
    case: Case
    branches: int
    full_run: Tensor

    @property
    def network(self) -> Any:
        return self.pipe.transformer

    def generate(self, **changes: Any) -> Tensor:
        return run(self.pipe, self.case, **changes)

    def runs(self) -> None:
        """Two calibration runs."""
        for seed in (1, 2):
            self.generate(seed=seed)


def run(pipe: Any, case: Case, **changes: Any) -> Tensor:
    latents: Tensor = pipe(**call_arguments(case, **changes))[0]
    return latents


def build(name: str) -> Any:
    """The tiny pipeline with four blocks, whose weights are small enough to be no noise."""
    pipe = CASES[name].build()
    config = {k: v for k, v in pipe.transformer.config.items() if not k.startswith("_")}
    with torch.random.fork_rng():
        torch.manual_seed(0)  # for what is no parameter: Open-Sora's empty text
        network = type(pipe.transformer)(**{**config, **DEPTHS[name]})
    awaken(network)
    for parameter in network.parameters():
        parameter.data *= 0.5
    pipe.register_modules(transformer=network)
    return pipe


def make_subject(name: str) -> Subject:
    pipe = build(name)
    with count(pipe.transformer) as calls:
        full_run = run(pipe, CASES[name])
    return Subject(name, pipe, CASES[name], len(calls) // STEPS, full_run)


@contextmanager
def count(module: nn.Module) -> Iterator[list[int]]:
    """Note every call of a module, whatever its forward is."""
    calls: list[int] = []
    hook = module.register_forward_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        hook.remove()


def attributes(pipe: Any) -> list[tuple[str, frozenset[str]]]:
    """The attributes of all that a method may touch, block by block and layer by layer."""
    parts = [("scheduler", pipe.scheduler), *pipe.transformer.named_modules()]
    return [(name, frozenset(vars(part))) for name, part in parts]


__all__ = [
    "BLOCKS",
    "CASES",
    "STEPS",
    "Subject",
    "attributes",
    "build",
    "count",
    "make_subject",
    "run",
]
