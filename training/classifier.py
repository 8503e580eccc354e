"""A small network that says what an image shows: subject, size, background, position.

    python -m training.classifier --checkpoints checkpoints

It is trained on renderings of all combinations, blurred and noisy ones among them, and is the
judge of the generated samples. It never sees a generated sample in training.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor, nn

from training.data import Scene, render, scenes, spread
from training.loop import Schedule, load_ema, train
from training.pictures import save_grid
from training.subjects import BACKGROUNDS, POSITIONS, SIZES, SUBJECTS

__all__ = ["HEADS", "ClassifierTask", "accuracy", "load_classifier"]

HEADS = {"subject": SUBJECTS, "size": SIZES, "background": BACKGROUNDS, "position": POSITIONS}
FOLDER = "classifier"
SCHEDULE = Schedule(1500, 48, 2e-3, ema=0.99, preview_every=500)


class _Classifier(nn.Module):
    """Four strided convolutions, one hidden layer, one linear head per attribute."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 128, 128)
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.ReLU()]
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 16, 256), nn.ReLU())
        self.heads = nn.ModuleDict({k: nn.Linear(256, len(table)) for k, table in HEADS.items()})

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        hidden = self.features(pixels)
        return {name: head(hidden) for name, head in self.heads.items()}


def _labels(batch: Sequence[Scene]) -> dict[str, Tensor]:
    return {
        name: torch.tensor([list(table).index(getattr(scene, name)) for scene in batch])
        for name, table in HEADS.items()
    }


def _disturb(pixels: Tensor) -> Tensor:
    """Blur half of a batch, and add noise of a random strength to all of it."""
    blurred = F.avg_pool2d(F.pad(pixels, (1, 1, 1, 1), mode="replicate"), 3, 1)
    chosen = torch.rand(len(pixels), 1, 1, 1)
    pixels = torch.where(chosen < 0.5, blurred, pixels)
    return pixels + 0.15 * torch.rand_like(chosen) * torch.randn_like(pixels)


class ClassifierTask:
    """Cross-entropy of all heads."""

    def __init__(self) -> None:
        """Build the untrained network."""
        self.modules = nn.ModuleDict({"classifier": _Classifier()})
        self.pool = scenes("train") + scenes("test")
        self.fresh = spread(self.pool, 512, seed=7)

    def loss(self, step: int) -> Tensor:
        """One freshly drawn batch."""
        batch = random.Random(step).choices(self.pool, k=SCHEDULE.batch)
        logits = self.modules["classifier"](_disturb(render(batch, 64, seed=step)))
        labels = _labels(batch)
        return torch.stack([F.cross_entropy(logits[k], labels[k]) for k in HEADS]).sum()

    def preview(self, modules: nn.ModuleDict, path: Path) -> dict[str, float]:
        """Accuracy on renderings with a jitter that training never draws."""
        pixels = render(self.fresh, 64, seed=-7)
        save_grid(pixels[:64], path, columns=16)
        return accuracy(modules["classifier"], pixels, self.fresh)


@torch.no_grad()
def accuracy(classifier: nn.Module, pixels: Tensor, shown: Sequence[Scene]) -> dict[str, float]:
    """The share of images in which each attribute is the one of the scene."""
    labels = _labels(shown)
    logits = classifier(pixels)
    return {k: float((logits[k].argmax(1) == labels[k]).float().mean()) for k in HEADS}


def load_classifier(checkpoints: Path) -> nn.Module:
    """The trained network."""
    task = ClassifierTask()
    load_ema(task.modules, checkpoints / FOLDER)
    return task.modules["classifier"].eval()


def main() -> None:
    """Train the classifier."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()
    torch.manual_seed(0)
    train(ClassifierTask(), SCHEDULE, args.checkpoints / FOLDER)


if __name__ == "__main__":
    main()
