"""Train the denoiser and the text encoders of a bundled model together, from nothing.

    python -m training.denoisers emoji-flux --checkpoints checkpoints --compile

Flow matching on a bank of latents of the training scenes, with caption dropout. Knows the data
and the objective; the networks and their calls come from the module of each model.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from training.data import caption, scenes, spread
from training.flux import FluxParts, pack, unpack
from training.loop import Schedule, train
from training.patches import bank, patch_basis
from training.pictures import save_grid

__all__ = ["SCHEDULES", "FlowTask", "sample"]

SCHEDULES = {"emoji-flux": Schedule(7300, 32, 1e-3, ema=0.999, preview_every=500)}

_DROPOUT = 0.1  # share of samples trained without their caption
_LOGIT_MEAN, _LOGIT_STD = 0.4, 1.2  # noise levels: logit-normal, towards the noisy end


@torch.no_grad()
def sample(parts: FluxParts, captions: list[str], *, steps: int, seed: int) -> Tensor:
    """Euler steps from noise to packed latents, with the shifted noise levels of the pipeline."""
    u = torch.linspace(1, 0, steps + 1)
    sigmas = parts.shift * u / (1 + (parts.shift - 1) * u)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(captions), 64, 32, generator=generator)
    ids = parts.tokenize(captions)
    for k in range(steps):
        v = parts.velocity(x, sigmas[k].expand(len(x)), ids)
        x = x + (sigmas[k + 1] - sigmas[k]) * v
    return x


class FlowTask:
    """Predict noise minus data at a random noise level, given the caption."""

    def __init__(self, parts: FluxParts, checkpoints: Path, *, batch: int) -> None:
        """Load the bank of latents and tokenize every caption once; the last one is empty."""
        self.parts, self.modules, self.batch = parts, parts.modules, batch
        self.bank = bank(checkpoints)
        self.basis = patch_basis(checkpoints)
        self.ids = parts.tokenize([*map(caption, scenes("train")), ""])
        self.unseen = [caption(scene) for scene in spread(scenes("test"), 32, seed=0)]

    def loss(self, step: int) -> Tensor:
        """One batch from the bank."""
        jitters, count = self.bank.shape[:2]
        row = torch.randint(count, (self.batch,))
        x = pack(self.bank[torch.randint(jitters, (self.batch,)), row].float())
        text = torch.where(torch.rand(self.batch) < _DROPOUT, count, row)
        sigma = torch.sigmoid(_LOGIT_MEAN + _LOGIT_STD * torch.randn(self.batch))
        noise = torch.randn_like(x)
        v = self.parts.velocity(
            torch.lerp(x, noise, sigma[:, None, None]), sigma, tuple(i[text] for i in self.ids)
        )
        return (v - (noise - x)).pow(2).mean()

    def preview(self, modules: nn.ModuleDict, path: Path) -> dict[str, float]:
        """Samples of unseen captions through the linear decoder of the patch basis."""
        latents = unpack(sample(self.parts, self.unseen, steps=16, seed=0))
        save_grid(self.basis.decode(latents), path, columns=16)
        return {}


def main() -> None:
    """Train one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(SCHEDULES))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the transformer first")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    parts, schedule = FluxParts(), SCHEDULES[args.name]
    if args.compile:
        parts.compile()
    task = FlowTask(parts, args.checkpoints, batch=schedule.batch)
    train(task, schedule, args.checkpoints / args.name, seed=args.seed)


if __name__ == "__main__":
    main()
