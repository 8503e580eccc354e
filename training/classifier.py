"""A small classifier of what an image or a video shows: subject, size, background, and so on.

    python -m training.classifier image --checkpoints checkpoints

It is trained on renderings of all combinations, blurred and noisy ones among them, and evaluates
the generated samples. It never sees a generated sample in training.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  (the usual name)
from torch import Tensor, nn

from training.data import Scene, render, scenes, spread
from training.images import save_grid
from training.loop import Schedule, load_ema, train
from training.patches import SPACES, Space
from training.subjects import BACKGROUNDS, MOTIONS, POSITIONS, SIZES, SUBJECTS

__all__ = ["CLASSIFIERS", "ClassifierSpec", "ClassifierTask", "accuracy", "load_classifier"]

_COMMON: dict[str, Collection[str]] = {
    "subject": SUBJECTS,
    "size": SIZES,
    "background": BACKGROUNDS,
}


@dataclass(frozen=True)
class ClassifierSpec:
    """One row: what is classified, by which attributes, and how the classifier is trained.

    Attributes:
        space: What is drawn.
        heads: The values of each attribute.
        frames: Which frames are looked at.
        schedule: Length and speed of the training.
    """

    space: Space
    heads: Mapping[str, Collection[str]]
    frames: slice
    schedule: Schedule

    @property
    def seen(self) -> int:
        """How many frames are looked at."""
        return len(range(self.space.frames)[self.frames])


CLASSIFIERS = {
    "image": ClassifierSpec(
        SPACES["image"],
        _COMMON | {"position": POSITIONS},
        slice(None),
        Schedule(1500, 48, 2e-3, ema=0.99, preview_every=500),
    ),
    "video": ClassifierSpec(
        SPACES["video"],
        _COMMON | {"motion": MOTIONS},
        slice(None, None, 2),  # half of the frames show every motion
        Schedule(1500, 32, 2e-3, ema=0.99, preview_every=500),
    ),
}


class _Classifier(nn.Module):
    """Strided convolutions per frame, one hidden layer over all frames, one head per attribute."""

    def __init__(self, spec: ClassifierSpec) -> None:
        super().__init__()
        self.frames = spec.frames
        widths = (3, 32, 64, 128, 128)
        side = spec.space.side
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            stride = 2 if side > 4 else 1
            side //= stride
            layers += [nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after), nn.ReLU()]
        inputs = spec.seen * widths[-1] * side * side
        self.features = nn.Sequential(*layers, nn.Flatten())
        self.hidden = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU())
        self.heads = nn.ModuleDict(
            {name: nn.Linear(256, len(table)) for name, table in spec.heads.items()}
        )

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        frames = pixels[:, :, None] if pixels.ndim == 4 else pixels[:, :, self.frames]
        features = self.features(frames.transpose(1, 2).flatten(0, 1))
        hidden = self.hidden(features.view(len(pixels), -1))
        return {name: head(hidden) for name, head in self.heads.items()}


def _labels(spec: ClassifierSpec, batch: Sequence[Scene]) -> dict[str, Tensor]:
    return {
        name: torch.tensor([list(table).index(getattr(scene, name)) for scene in batch])
        for name, table in spec.heads.items()
    }


def _disturb(pixels: Tensor) -> Tensor:
    """Blur half of a batch, and add noise of a random strength to all of it."""
    flat = pixels.flatten(1, -3)  # frames count as channels
    blurred = F.avg_pool2d(F.pad(flat, (1, 1, 1, 1), mode="replicate"), 3, 1).view_as(pixels)
    chosen = torch.rand(len(pixels), *(1,) * (pixels.ndim - 1))
    pixels = torch.where(chosen < 0.5, blurred, pixels)
    return pixels + 0.15 * torch.rand_like(chosen) * torch.randn_like(pixels)


class ClassifierTask:
    """Cross-entropy of all heads."""

    def __init__(self, spec: ClassifierSpec) -> None:
        """Build the untrained network."""
        self.spec = spec
        self.modules = nn.ModuleDict({"classifier": _Classifier(spec)})
        self.pool = scenes("train", video=spec.space.video)
        self.pool += scenes("test", video=spec.space.video)
        self.fresh = spread(self.pool, 512, seed=7)

    def _draw(self, batch: Sequence[Scene], seed: int) -> Tensor:
        return render(batch, self.spec.space.side, seed=seed, frames=self.spec.space.frames)

    def loss(self, step: int) -> Tensor:
        """One freshly drawn batch."""
        batch = random.Random(step).choices(self.pool, k=self.spec.schedule.batch)
        logits = self.modules["classifier"](_disturb(self._draw(batch, step)))
        labels = _labels(self.spec, batch)
        return torch.stack([F.cross_entropy(logits[k], labels[k]) for k in labels]).sum()

    def preview(self, modules: nn.ModuleDict, path: Path) -> dict[str, float]:
        """Accuracy on renderings with a jitter that training never draws."""
        pixels = self._draw(self.fresh, -7)
        first = pixels[:64] if pixels.ndim == 4 else pixels[:64, :, 0]
        save_grid(first, path, columns=16)
        return accuracy(self.spec, modules["classifier"], pixels, self.fresh)


@torch.no_grad()
def accuracy(
    spec: ClassifierSpec, classifier: nn.Module, pixels: Tensor, shown: Sequence[Scene]
) -> dict[str, float]:
    """The share of samples in which each attribute is the one of the scene."""
    labels = _labels(spec, shown)
    parts = [classifier(chunk) for chunk in pixels.split(64)]
    logits = {k: torch.cat([part[k] for part in parts]) for k in labels}
    return {k: float((logits[k].argmax(1) == labels[k]).float().mean()) for k in labels}


def _folder(kind: str) -> str:
    return f"classifier-{kind}"


def load_classifier(kind: str, checkpoints: Path) -> nn.Module:
    """The trained network of a row."""
    task = ClassifierTask(CLASSIFIERS[kind])
    load_ema(task.modules, checkpoints / _folder(kind))
    return task.modules["classifier"].eval()


def main() -> None:
    """Train one classifier."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(CLASSIFIERS))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    args = parser.parse_args()
    torch.manual_seed(0)
    spec = CLASSIFIERS[args.kind]
    train(ClassifierTask(spec), spec.schedule, args.checkpoints / _folder(args.kind))


if __name__ == "__main__":
    main()
