"""A row of the compatibility matrix, and the construction of its pipeline.

A pipeline gets a tiny random network, a scheduler, and embeddings instead of text encoders; every
other component is None unless the row names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from torch import Tensor

from tests.compatibility.components import Part, quiet

STEPS = 6
COMPUTED = (0, 1, 3)
"""Steps reused once, and twice in a row."""


@dataclass(frozen=True)
class Row:
    """One pipeline.

    Attributes:
        title: name of the model.
        pipeline: class of the pipeline.
        parts: its components and settings, each a ``Part``, a function that builds it, or a value.
        call: arguments of a short run without generator and number of steps.
        settings: attributes of the pipeline that override its sizes or its text encoding.
        blends: whether the pipeline changes the latent between steps, as inpainting does.
        refused: part of the error message, if no policy can be attached.
        whole: builds the pipeline, instead of ``parts``.
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

    def generate(self, pipe: Any, **changes: Any) -> Tensor:
        """The output of the pipeline: latents, or pixels if it returns nothing else."""
        return torch.as_tensor(pipe(**self.arguments() | changes)[0])


def _build(value: Any, *, seed: int) -> Any:
    if isinstance(value, Part):
        return value.build(seed=seed)
    return value() if callable(value) else value
