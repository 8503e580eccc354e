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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

__all__ = ["Schedule", "Task", "load_ema", "save_atomic", "train"]

_CHECKPOINT = "checkpoint.pt"
_LOG = "loss.jsonl"


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train.

    Attributes:
        steps: Optimizer steps in total; the learning rate ends at zero there.
        batch: Samples per step.
        peak_lr: Learning rate after the warm-up.
        warmup: Steps of linear warm-up.
        ema: Decay of the averaged weights.
        preview_every: Steps between two previews.
    """

    steps: int
    batch: int
    peak_lr: float
    warmup: int = 100
    ema: float = 0.999
    preview_every: int = 1000

    def lr(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a half cosine to zero.

        Example:
            >>> [round(Schedule(1000, 1, 1.0).lr(k), 3) for k in (0, 99, 550, 999)]
            [0.01, 1.0, 0.5, 0.0]
        """
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_lr * 0.5 * (1 + math.cos(math.pi * progress))


class Task(Protocol):
    """What is trained."""

    modules: nn.ModuleDict

    def loss(self, step: int) -> Tensor:
        """The loss of one freshly drawn batch."""

    def preview(self, modules: nn.ModuleDict, path: Path) -> dict[str, float]:
        """Draw samples of the averaged modules into a picture; return figures for the log."""


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
    optimizer = torch.optim.AdamW(
        task.modules.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.01, fused=True
    )
    ema = {key: value.clone() for key, value in task.modules.state_dict().items()}
    start, seconds = 0, 0.0
    if (folder / _CHECKPOINT).exists():
        state = torch.load(folder / _CHECKPOINT, weights_only=True)
        task.modules.load_state_dict(state["modules"])
        optimizer.load_state_dict(state["optimizer"])
        ema, start, seconds = state["ema"], state["step"], state["seconds"]
    began = saved = time.monotonic()
    losses: list[float] = []  # since the last line of the log
    for step in range(start, schedule.steps):
        torch.manual_seed(seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr(step)
        loss = task.loss(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(task.modules.parameters(), 1.0)
        optimizer.step()
        _update_ema(ema, task.modules, min(schedule.ema, (1 + step) / (10 + step)))
        losses.append(loss.item())
        done, now = step + 1, time.monotonic()
        if done % every == 0:
            loss_mean = sum(losses) / len(losses)
            row = {"step": done, "loss": loss_mean, "seconds": seconds + now - began}
            if done % schedule.preview_every == 0 or done == schedule.steps:
                row |= _preview(task, ema, folder, done)
            _log(folder, row)
            losses.clear()
        if now - saved > 120 or done == schedule.steps:
            state = {"modules": task.modules.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"ema": ema, "step": done, "seconds": seconds + now - began}
            save_atomic(state, folder / _CHECKPOINT)
            saved = now
