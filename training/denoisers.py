"""Train the denoiser and the text encoders of a bundled model together, from nothing.

    python -m training.denoisers emoji-flux --checkpoints checkpoints --compile

Denoising on a bank of latents of the training scenes, with caption dropout. Knows the data; the
networks and their calls come from the module of each model, the objective from there too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.cogvideox import CogVideoXParts
from training.data import Scene, caption, other_captions, scenes, spread
from training.flux import FluxParts
from training.graft import graft_folder
from training.images import save_grid
from training.loop import Schedule, train
from training.objectives import Objective, loss, sample
from training.opensora import OpenSoraParts
from training.patches import SPACES, bank, patch_basis
from training.precision import FastArithmetic, multiplies_bfloat16
from training.wan import WanParts

__all__ = ["DENOISERS", "DenoiserTask", "Parts"]

_DROPOUT = 0.1  # share of samples trained without their caption
_VARIED = 0.5  # share of samples trained with another caption, where captions vary
_SHOWN = 32  # captions in a preview


class Parts(Protocol):
    """Everything of a pipeline but the autoencoder."""

    space: str
    objective: Objective
    modules: nn.ModuleDict

    def compile(self) -> None:
        """Compile the transformer for training."""

    def tokenize(self, captions: Sequence[str]) -> tuple[Tensor, ...]:
        """What the text encoders take."""

    def drop(
        self, dropped: Tensor, ids: tuple[Tensor, ...], empty: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Replace captions by what the pipeline guides away from; ``empty`` is an empty one."""

    def predict(self, latents: Tensor, level: Tensor, ids: tuple[Tensor, ...]) -> Tensor:
        """Call the text encoders and the transformer."""

    def pipeline(self, vae: Any) -> Any:
        """The complete pipeline around a trained autoencoder."""


@dataclass(frozen=True)
class Denoiser:
    """One row: the parts of a model, and how they are trained.

    Attributes:
        build: Makes the untrained parts.
        schedule: Length and speed of the training.
        half: Whether linear layers multiply in bfloat16 while they learn, on processors that do.
        vary: Whether captions vary, so that prompts may leave something open.
    """

    build: type[Parts]
    schedule: Schedule
    half: bool = False
    vary: bool = False


DENOISERS = {
    "emoji-flux": Denoiser(
        FluxParts,
        Schedule(
            10000,
            64,
            1e-3,
            warmup=300,
            ema=0.9995,
            preview_every=500,
            decay=3000,
            muon=True,
        ),
        half=True,
        vary=True,
    ),
    "emoji-wan": Denoiser(WanParts, Schedule(6300, 32, 1e-3, ema=0.999, preview_every=500)),
    "emoji-cogvideox": Denoiser(
        CogVideoXParts, Schedule(11000, 32, 1e-3, ema=0.999, preview_every=500)
    ),
    "emoji-opensora": Denoiser(
        OpenSoraParts, Schedule(11000, 32, 1e-3, ema=0.999, preview_every=500)
    ),
}


class DenoiserTask:
    """Predict what the objective defines at a random noise level, given the caption."""

    def __init__(
        self,
        parts: Parts,
        checkpoints: Path,
        *,
        batch: int,
        half: bool = False,
        vary: bool = False,
    ) -> None:
        """Load the bank of latents and tokenize every caption once; the last one is empty."""
        space = SPACES[parts.space]
        self.parts, self.modules, self.batch, self.half = parts, parts.modules, batch, half
        self.bank = bank(checkpoints, space)
        self.basis = patch_basis(checkpoints, space)
        shown = scenes("train", video=space.video)
        self.ids = parts.tokenize([*map(caption, shown), ""])
        self.others = _other_ids(parts, shown) if vary else ()
        chosen = spread(scenes("test", video=space.video), _SHOWN, seed=0)
        self.unseen = parts.tokenize([caption(scene) for scene in chosen])

    def loss(self, step: int) -> Tensor:
        """One batch from the bank."""
        jitters, count = self.bank.shape[:2]
        row = torch.randint(count, (self.batch,))
        data = self.bank[torch.randint(jitters, (self.batch,)), row].float()
        dropped = torch.rand(self.batch) < _DROPOUT
        empty = tuple(i[-1] for i in self.ids)
        ids = self.parts.drop(dropped, self._captions(row), empty)
        with FastArithmetic(half=self.half):
            return loss(
                self.parts.objective, lambda x, level: self.parts.predict(x, level, ids), data
            )

    def _captions(self, row: Tensor) -> tuple[Tensor, ...]:
        """Token ids of the captions of some scenes, with others in their place now and then."""
        ids = tuple(i[row] for i in self.ids)
        if not self.others:
            return ids
        varied = torch.rand(len(row)) < _VARIED
        kind = torch.randint(self.others[0].shape[1], (len(row),))
        return tuple(
            torch.where(varied.view(-1, *[1] * (i.ndim - 1)), other[row, kind], i)
            for i, other in zip(ids, self.others, strict=True)
        )

    def preview(self, modules: nn.ModuleDict, path: Path) -> dict[str, float]:
        """Samples of unseen captions through the linear decoder, without guidance.

        Of a video every fourth frame is shown, one row each.
        """
        noise = torch.randn(
            _SHOWN, *self.bank.shape[2:], generator=torch.Generator().manual_seed(0)
        )
        latents = sample(
            self.parts.objective,
            lambda x, level: self.parts.predict(x, level, self.unseen),
            noise,
            steps=16,
        )
        pixels = self.basis.decode(latents)
        if pixels.ndim == 5:
            pixels = pixels[:, :, ::4].transpose(1, 2).flatten(0, 1)
        save_grid(pixels, path, columns=20 if len(pixels) > _SHOWN else 16)
        return {}


def _other_ids(parts: Parts, shown: Sequence[Scene]) -> tuple[Tensor, ...]:
    """Token ids of the other captions: scenes, captions of each, tokens."""
    texts = [other_captions(scene) for scene in shown]
    ids = parts.tokenize([text for others in texts for text in others])
    return tuple(i.unflatten(0, (len(texts), -1)) for i in ids)


def main() -> None:
    """Train one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(DENOISERS))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="diffusers folder of an earlier model")
    parser.add_argument("--compile", action="store_true", help="compile the transformer first")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    row = DENOISERS[args.name]
    parts = row.build()
    if args.start:
        print("grown:", *graft_folder(parts.modules, args.start))
    if args.compile:
        parts.compile()
    task = DenoiserTask(
        parts,
        args.checkpoints,
        batch=row.schedule.batch,
        half=row.half and multiplies_bfloat16(),
        vary=row.vary,
    )
    train(task, row.schedule, args.checkpoints / args.name, seed=args.seed)


if __name__ == "__main__":
    main()
