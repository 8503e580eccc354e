"""How far generated pictures are from those that the model was trained on.

Knows a folder of pictures, no method.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ertacache.metrics.distribution import frechet_distance
from ertacache.metrics.files import is_video, media_files, read_media
from ertacache.metrics.inception import inception_features

__all__ = ["Realism", "check_reference"]


def check_reference(folder: Path) -> None:
    """Refuse a folder that FID cannot be computed against."""
    if sum(not is_video(path) for path in media_files(folder).values()) < 2:
        raise ValueError(f"{str(folder)!r} has not the two pictures that FID needs at least")


class Realism:
    """The features of a folder of pictures, read once."""

    def __init__(self, folder: Path) -> None:
        """Read the pictures, of any sizes."""
        check_reference(folder)
        paths = [path for path in media_files(folder).values() if not is_video(path)]
        self._known = torch.cat([inception_features(read_media(path)[None]) for path in paths])

    def fid(self, pictures: torch.Tensor) -> float:
        """FID of pictures with values from 0 to 1, shape (N, 3, height, width)."""
        return frechet_distance(inception_features(pictures), self._known)
