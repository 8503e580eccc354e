"""Draw training scenes as images: what FID compares the samples of a bundled image model with.

    python -m training.reference reference

One PNG per scene, evenly over the subjects, with a jitter that training never drew.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from training.data import render, scenes, spread
from training.images import save_grid
from training.patches import SPACES

__all__ = ["draw_reference"]


def draw_reference(folder: Path, count: int) -> None:
    """Write ``count`` training scenes into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    chosen = spread(scenes("train"), count, seed=11)
    for number, pixels in enumerate(render(chosen, SPACES["image"].side, seed=-11)):
        save_grid(pixels[None], folder / f"{number:04d}.png", columns=1)


def main() -> None:
    """Draw the images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=256)
    args = parser.parse_args()
    draw_reference(args.folder, args.count)


if __name__ == "__main__":
    main()
