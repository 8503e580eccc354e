"""What a row of the compatibility matrix is, and how the pipeline that it names is put together.

A pipeline gets a small random network, a scheduler, and embeddings in the place of text encoders;
every other component is None unless the row names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from tests.integration.tiny import awaken, quiet

STEPS = 6
COMPUTED = (0, 1, 3)
"""Every other kind of step is there: reused once, and twice in a row."""


@dataclass(frozen=True)
class Part:
    """A class of diffusers and the configuration of one instance."""

    name: str
    config: Mapping[str, Any]

    def build(self, *, seed: int = 0) -> Any:
        made = getattr(diffusers, self.name)(**self.config)
        return awaken(made, seed=seed) if isinstance(made, nn.Module) else made


def part(name: str, **config: Any) -> Part:
    return Part(name, config)


@dataclass(frozen=True)
class Row:
    """One pipeline.

    Attributes:
        title: what people call the model.
        pipeline: the pipeline's class.
        parts: its components and settings, each a ``Part``, a function that makes it, or itself.
        call: arguments of a short run, generator and number of steps aside.
        settings: attributes of the pipeline, where it has a mind of its own about sizes or text.
        blends: whether the pipeline changes the latent between steps, as inpainting does.
        refused: what the refusal says, if no policy can be attached.
        whole: makes the pipeline, in the place of ``parts``.
    """

    title: str
    pipeline: str
    parts: Mapping[str, Any]
    call: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    blends: bool = False
    refused: str = ""
    whole: Callable[[], Any] | None = None

    def build(self) -> Any:
        if self.whole is not None:
            return self.whole()
        kind = getattr(diffusers, self.pipeline)
        parameters = list(inspect.signature(kind.__init__).parameters.values())[1:]
        absent = {p.name: None for p in parameters if p.default is p.empty}
        parts = {
            name: _build(value, seed=seed) for seed, (name, value) in enumerate(self.parts.items())
        }
        pipe = quiet(kind(**(absent | parts)))
        for name, value in self.settings.items():
            setattr(pipe, name, value)
        return pipe

    def arguments(self, *, seed: int = 0) -> dict[str, Any]:
        fixed = {
            "num_inference_steps": STEPS,
            "output_type": "latent",
            "generator": torch.Generator().manual_seed(seed),
        }
        return fixed | dict(self.call)

    def generate(self, pipe: Any) -> Tensor:
        """What the pipeline returns: latents, or pixels where it knows nothing else."""
        return torch.as_tensor(pipe(**self.arguments())[0])


def _build(value: Any, *, seed: int) -> Any:
    if isinstance(value, Part):
        return value.build(seed=seed)
    return value() if inspect.isfunction(value) or inspect.isclass(value) else value
