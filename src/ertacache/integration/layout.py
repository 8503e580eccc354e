"""Which axes of a pipeline's latents are channels, and what their grid is.

Read off the latents, the networks' configurations and the arguments of the call. A layout that
cannot be found is unknown; the latent is then one group.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ertacache.core.groups import Layout
from ertacache.integration.private_api import Pipeline, call_arguments

__all__ = ["find_layout"]

PATCH = 2  # side of the squares that pipelines pack into tokens
_CHANNELS = {  # a decoder's in_channels are those of pixels
    "vae": ("latent_channels", "z_dim"),
    "transformer": ("in_channels", "out_channels"),
    "transformer_2": ("in_channels", "out_channels"),
    "unet": ("in_channels", "out_channels"),
}
FRAMES_FIRST = ("CogVideoX", "ConsisID", "AnyFlow", "StableVideoDiffusion")
"""How the names of pipelines begin whose latents have their frames before their channels."""
CHANNELS_LAST = ("Kandinsky5", "Kandinsky6")
PATCH_FIRST = ("Ideogram4",)
"""Those whose tokens have their square of pixels before its channels: then a token is a pixel."""


def find_layout(pipe: Pipeline, latents: Tensor) -> Layout | None:
    """The layout of a batch of latents in a call that is under way; None if it is unknown.

    A pipeline of one's own may have it as its attribute ``latent_layout``.
    """
    shape = tuple(latents.shape)
    own = getattr(pipe, "latent_layout", None)
    if isinstance(own, Layout):
        return own if own.fits(shape) else None
    found = _tokens(pipe, shape) if len(shape) == 3 else _axes(pipe, shape)
    return found if found is not None and found.fits(shape) else None


def _axes(pipe: Pipeline, shape: tuple[int, ...]) -> Layout | None:
    """The layout of latents whose axes are channels and grid."""
    name = type(pipe).__name__
    if name.startswith(FRAMES_FIRST + CHANNELS_LAST) and len(shape) == 5:
        return Layout(channel=2 if name.startswith(FRAMES_FIRST) else 4)
    known = _known_channels(pipe)
    for axis in (1, 2) if len(shape) == 5 else (1,):
        if len(shape) in (4, 5) and shape[axis] in known:
            return Layout(channel=axis)
    return None


def _tokens(pipe: Pipeline, shape: tuple[int, ...]) -> Layout | None:
    """The layout of latents that are flattened to tokens, from the requested size."""
    known, (_, tokens, width) = _known_channels(pipe), shape
    arguments = {name: argument.value for name, argument in call_arguments(pipe).items()}
    height, wide = arguments.get("height"), arguments.get("width")
    if not (isinstance(height, int) and isinstance(wide, int) and height > 0 < wide):
        return None
    if "layers" in arguments:  # several images in one row of tokens
        return None
    frames = _latent_frames(pipe, arguments.get("num_frames"))
    if tokens % frames:
        return None
    grid = _grid(tokens // frames, height / wide)
    if grid is None:
        return None
    packed = frames == 1 and not type(pipe).__name__.startswith(PATCH_FIRST)
    if packed and width % PATCH**2 == 0 and width // PATCH**2 in known:
        return Layout(channel=2, grid=grid, patch=PATCH)
    if width in known:
        return Layout(channel=2, grid=grid if frames == 1 else (frames, *grid))
    return None


def _latent_frames(pipe: Pipeline, frames: Any) -> int:
    ratio = getattr(pipe, "vae_temporal_compression_ratio", None)
    if not isinstance(frames, int) or not isinstance(ratio, int):
        return 1
    return (frames - 1) // ratio + 1


def _grid(tokens: int, ratio: float) -> tuple[int, int] | None:
    """Rows and columns of so many tokens whose ratio is the nearest to that of height and width.

    None if it is not that ratio: sizes are rounded to whole tokens, by less than one along each
    axis.

    Example:
        >>> _grid(24, 1.5), _grid(24, 1.4), _grid(7, 1.0)
        ((6, 4), (6, 4), None)
    """
    rows = min(
        (rows for rows in range(1, tokens + 1) if tokens % rows == 0),
        key=lambda rows: abs(math.log(rows * rows / tokens / ratio)),
    )
    columns = tokens // rows
    fits = rows - 1 < ratio * (columns + 1) and ratio * (columns - 1) < rows + 1
    return (rows, columns) if fits else None


def _known_channels(pipe: Pipeline) -> set[int]:
    """Numbers of channels of latents that the configurations of decoder and networks name."""
    found = (
        getattr(getattr(getattr(pipe, part, None), "config", None), name, None)
        for part, names in _CHANNELS.items()
        for name in names
    )
    return {number for number in found if isinstance(number, int) and number > 0}
