"""The training loop of every model here: seeded, resumable, with EMA, a loss log and previews.

A task brings modules and a loss; the loop brings the rest. Randomness is reseeded from the step
number, so a resumed run draws what an uninterrupted one would have drawn. Knows nothing of emoji
or diffusion.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from training.muon import Muon

__all__ = ["Schedule", "Task", "load_ema", "save_atomic", "train"]

_CHECKPOINT = "checkpoint.pt"
_LOG = "loss.jsonl"
_MUON_SCALE = 3.0  # its learning rate in those of AdamW; at 1 it began slower than AdamW
_SAVE_EVERY = 100  # seconds between two checkpoints


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    Attributes:
        steps: Optimizer steps in total; the learning rate ends at zero there. With ``decay`` it may
            be raised, without any loss, until the decay begins.
        batch: Samples per step.
        peak_lr: Learning rate after the warm-up.
        warmup: Steps of linear warm-up.
        ema: Decay of the averaged weights.
        preview_every: Steps between two previews.
        decay: Steps at the end in which the learning rate falls from its peak; 0 lets it fall all
            the way.
        muon: Whether the matrices of repeated blocks are trained with Muon, not with AdamW.
    """

    steps: int
    batch: int
    peak_lr: float
    warmup: int = 100
    ema: float = 0.999
    preview_every: int = 1000
    decay: int = 0
    muon: bool = False

    def lr(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a half cosine to zero.

        With ``decay`` it stays at its peak and falls at the end, fast at first: one minus a root.

        Example:
            >>> [round(Schedule(1000, 1, 1.0).lr(k), 3) for k in (0, 99, 550, 999)]
            [0.01, 1.0, 0.5, 0.0]
            >>> [round(Schedule(1000, 1, 1.0, decay=200).lr(k), 3) for k in (99, 800, 850, 1000)]
            [1.0, 1.0, 0.5, 0.0]
        """
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        if self.decay:
            progress = max(0, step - self.steps + self.decay) / self.decay
            return self.peak_lr * (1 - math.sqrt(progress))
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * progress))


class Task(Protocol):
    """What is trained."""

    modules: nn.ModuleDict

    def loss(self, step: int) -> Tensor:
        """The loss of one freshly drawn batch."""

    def preview(self, modules: nn.ModuleDict, path: Path) -> dict[str, float]:
        """Draw samples of the averaged modules into an image; return figures for the log."""


def save_atomic(value: Any, path: Path) -> None:
    """Write with `torch.save` so that an interruption leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    torch.save(value, temporary)
    os.replace(temporary, path)


def load_ema(modules: nn.ModuleDict, folder: Path) -> int:
    """Load the averaged weights of a run into modules; return the number of steps behind them."""
    state = torch.load(folder / _CHECKPOINT, weights_only=True)
    modules.load_state_dict(state["ema"])
    return int(state["step"])


def _log(folder: Path, row: dict[str, float]) -> None:
    with (folder / _LOG).open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(" ".join(f"{key}={value:.6g}" for key, value in row.items()), flush=True)


def _preview(task: Task, ema: dict[str, Tensor], folder: Path, step: int) -> dict[str, float]:
    """Lend the averaged weights to the modules for one preview."""
    trained = {key: value.clone() for key, value in task.modules.state_dict().items()}
    task.modules.load_state_dict(ema)
    task.modules.eval()
    with torch.no_grad():
        figures = task.preview(task.modules, folder / f"preview-{step:06d}.png")
    task.modules.train()
    task.modules.load_state_dict(trained)
    return figures


def _update_ema(ema: dict[str, Tensor], modules: nn.ModuleDict, decay: float) -> None:
    state = modules.state_dict()
    moving = [key for key, value in ema.items() if value.is_floating_point()]
    torch._foreach_lerp_([ema[k] for k in moving], [state[k] for k in moving], 1 - decay)


def _in_blocks(modules: nn.ModuleDict) -> list[nn.Parameter]:
    """The matrices of linear layers in repeated blocks: neither embeddings nor the two ends."""
    return [
        module.weight
        for name, module in modules.named_modules()
        if isinstance(module, nn.Linear) and any(part.isdigit() for part in name.split("."))
    ]


def _optimizers(modules: nn.ModuleDict, *, muon: bool) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices in blocks."""
    matrices = _in_blocks(modules) if muon else []
    chosen = set(matrices)
    rest = [parameter for parameter in modules.parameters() if parameter not in chosen]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    ]
    if matrices:
        found.append(Muon([{"params": matrices, "scale": _MUON_SCALE}], lr=0.0))
    return found


def _step(task: Task, optimizers: Sequence[torch.optim.Optimizer], step: int, lr: float) -> float:
    """One step of all optimizers; return the loss."""
    loss = task.loss(step)
    value = loss.item()
    if not math.isfinite(value):
        raise FloatingPointError(f"the loss of step {step} is {value}")
    task.modules.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(task.modules.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)
        optimizer.step()
    return value


def train(task: Task, schedule: Schedule, folder: Path, *, seed: int = 0, every: int = 50) -> None:
    """Train until the schedule ends, from the checkpoint in the folder if there is one.

    Args:
        task: What to train.
        schedule: How long and how fast.
        folder: Takes the checkpoint, the log and the previews.
        seed: Seed of everything that is drawn.
        every: Steps between two lines of the log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizers = _optimizers(task.modules, muon=schedule.muon)
    ema = {key: value.clone() for key, value in task.modules.state_dict().items()}
    start, seconds = 0, 0.0
    if (folder / _CHECKPOINT).exists():
        state = torch.load(folder / _CHECKPOINT, weights_only=True)
        task.modules.load_state_dict(state["modules"])
        for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(kept)
        ema, start, seconds = state["ema"], state["step"], state["seconds"]
    began = saved = time.monotonic()
    losses: list[float] = []  # since the last line of the log
    for step in range(start, schedule.steps):
        torch.manual_seed(seed * 1_000_003 + step)
        losses.append(_step(task, optimizers, step, schedule.lr(step)))
        _update_ema(ema, task.modules, min(schedule.ema, (1 + step) / (10 + step)))
        done, now = step + 1, time.monotonic()
        if done % every == 0:
            loss_mean = sum(losses) / len(losses)
            row = {"step": done, "loss": loss_mean, "seconds": seconds + now - began}
            if done % schedule.preview_every == 0 or done == schedule.steps:
                row |= _preview(task, ema, folder, done)
            _log(folder, row)
            losses.clear()
        if now - saved > _SAVE_EVERY or done == schedule.steps:
            state = {"modules": task.modules.state_dict(), "ema": ema}
            state |= {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}
            state |= {"step": done, "seconds": seconds + now - began}
            save_atomic(state, folder / _CHECKPOINT)
            saved = now
