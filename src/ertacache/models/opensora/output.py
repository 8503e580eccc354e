"""What a call of the pipeline returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diffusers.utils.outputs import BaseOutput

__all__ = ["OpenSoraPipelineOutput"]


@dataclass
class OpenSoraPipelineOutput(BaseOutput):
    """What a call returns.

    Attributes:
        frames: the videos: lists of PIL images, an array (batch, frames, height, width, 3) or a
            tensor (batch, frames, 3, height, width), both in [0, 1]; or the latents.
    """

    frames: Any
