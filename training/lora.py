"""A LoRA for `emoji-flux`: the same scenes in black and white, from a few steps of training.

It is what `benchmarks/check.py` changes the model by, not a part of the package. Everything is read
off the bundled pipeline, so it fits whatever weights are there.

    python -m training.lora checkpoints/lora         # a minute on one core
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict
from torch import Tensor

from ertacache.models import load_pipeline
from training.data import caption, render, scenes, spread
from training.flux import pack
from training.objectives import Flow, loss

__all__ = ["black_and_white", "train_lora"]

MODEL = "emoji-flux"
STEPS, BATCH, RATE, RANK = 150, 16, 1e-3, 8
SCENES = 256  # that training draws from
LAYERS = ["to_q", "to_k", "to_v", "to_out.0", "proj_mlp", "proj_out"]


def black_and_white(pixels: Tensor) -> Tensor:
    """The luma of images in all three channels, shape (batch, 3, height, width).

    Example:
        >>> black_and_white(torch.ones(1, 3, 1, 1)).flatten().tolist()
        [1.0, 1.0, 1.0]
    """
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=pixels.dtype)
    return torch.einsum("bchw,c->bhw", pixels, weights)[:, None].expand_as(pixels)


class _Task:
    """The bundled pipeline with its data: latents in black and white, and encoded captions."""

    def __init__(self, pipe: Any, count: int) -> None:
        self.pipe, self.objective = pipe, Flow(shift=float(pipe.scheduler.config.shift))
        chosen = spread(scenes("train"), count, seed=0)
        vae, side = pipe.vae, int(pipe.vae.config.sample_size)
        with torch.no_grad():
            pixels = black_and_white(render(chosen, side, seed=0))
            latents = torch.cat(
                [vae.encode(part).latent_dist.mode() for part in pixels.split(BATCH)]
            )
            self.text, self.pooled, self.text_ids = pipe.encode_prompt(
                [caption(scene) for scene in chosen], None, max_sequence_length=16
            )
        self.latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        grid = latents.shape[-1] // 2
        places = torch.cartesian_prod(torch.arange(grid), torch.arange(grid))
        self.image_ids = torch.nn.functional.pad(places.float(), (1, 0))

    def loss(self) -> Tensor:
        """Of one batch, drawn at random."""
        rows = torch.randint(len(self.latents), (BATCH,))

        def predict(tokens: Tensor, level: Tensor) -> Tensor:
            output: Tensor = self.pipe.transformer(
                hidden_states=tokens,
                encoder_hidden_states=self.text[rows],
                pooled_projections=self.pooled[rows],
                timestep=level,
                img_ids=self.image_ids,
                txt_ids=self.text_ids,
                return_dict=False,
            )[0]
            return output

        return loss(self.objective, predict, pack(self.latents[rows]))


def train_lora(folder: Path, *, steps: int = STEPS, count: int = SCENES) -> list[float]:
    """Train a LoRA and write it to a folder; returns the loss of every step."""
    torch.manual_seed(0)
    pipe = load_pipeline(MODEL)
    task = _Task(pipe, count)
    transformer = pipe.transformer
    transformer.requires_grad_(False)
    transformer.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS))
    weights = [weight for weight in transformer.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE)
    losses = []
    for _ in range(steps):
        found = task.loss()
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
        losses.append(found.item())
    pipe.save_lora_weights(folder, get_peft_model_state_dict(transformer))
    return losses


def main() -> None:
    """Train it, and print the mean loss of the first and the last steps."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="takes the weights")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    losses = train_lora(options.folder, steps=options.steps)
    first, last = (sum(part) / len(part) for part in (losses[:10], losses[-10:]))
    print(f"{options.folder}: loss {first:.4f}, after {len(losses)} steps {last:.4f}")


if __name__ == "__main__":
    main()
