"""What the processes of a test do. Imported once, before they are forked."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import ertacache
from ertacache import cli
from ertacache.calibration import session as sessions
from ertacache.calibration import trial
from ertacache.calibration.session import Session
from ertacache.core.steppers import RefitStepper
from ertacache.distributed import Processes
from ertacache.formats.policy import Policy
from ertacache.integration import choose
from tests.distributed.launch import COMPUTED, HELDOUT, PROMPTS, STEPS
from tests.integration.tiny import CASES

CALL = {"max_sequence_length": 8, "num_inference_steps": STEPS} | CASES["flux"].arguments
PIPE = CASES["flux"].build()
TIMEOUT = 60.0


def prepare() -> None:
    """Try fewer plans, in the launcher and all that it forks."""
    trial.SPEEDUPS, trial.RIDGES = (2.0,), (1e-3, 1e-2, 1e-1)


def calibrate(folder: Path, name: str, *, kill: tuple[str, int, int] | None = None) -> None:
    """Calibrate the tiny pipeline; ``kill`` ends a process after so many steps of a kind."""
    processes = Processes.launched(timeout=TIMEOUT)
    _watch(folder, name)
    if kill is not None and kill[1] == processes.number:
        _kill_at(kill[0], kill[2])
    policy = ertacache.calibrate(
        PIPE,
        PROMPTS,
        heldout=HELDOUT,
        compute_steps=COMPUTED,
        batch_size=2,
        profile_path=folder / "profile.safetensors",
        resume=folder / "parts",
        processes=processes,
        **CALL,
    )
    if processes.is_main:
        policy.save(folder / "policy.safetensors")
    processes.leave()


def command(folder: Path, name: str, *, arguments: list[str], fail: int | None = None) -> None:
    """Run a command; a process may fail in its first full run."""
    if fail is not None and int(os.environ["RANK"]) == fail:
        _fail_at_once()
    os.chdir(folder)
    sys.argv = ["ertacache", *arguments]
    cli.main()


def ulysses(folder: Path, name: str, *, policy: str) -> None:
    """Latents with a policy, of one process by itself and of all under context parallelism."""
    from diffusers import ContextParallelConfig

    processes = Processes.launched(timeout=TIMEOUT)
    call = CALL | {"prompt": PROMPTS[0], "output_type": "latent"}

    def run() -> torch.Tensor:
        with ertacache.attach(PIPE, Policy.load(policy)) as handle:
            found: torch.Tensor = PIPE(**call, generator=torch.Generator().manual_seed(0))[0]
            assert handle.stats.last.computed_steps == COMPUTED
        return found

    alone = run()
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it; there is none here
    PIPE.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
    torch.save({"alone": alone, "parallel": run()}, folder / f"latents-{processes.number}")
    processes.leave()


def _watch(folder: Path, name: str) -> None:
    """Note every call of the pipeline that ends; let time pass in the network only."""
    kind, rows = type(PIPE), [0]
    called = kind.__call__
    place = os.open(folder / f"calls-{os.getpid()}-{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def call(pipe: Any, *args: Any, **more: Any) -> Any:
        found = called(pipe, *args, **more)
        steps = more.get("num_inference_steps", STEPS)
        os.write(place, f"{more['prompt']} {steps} {more.get('output_type')}\n".encode())
        return found

    kind.__call__ = call
    PIPE.transformer.proj_out.register_forward_hook(
        lambda _, args, out: rows.__setitem__(0, rows[0] + len(out))
    )
    sessions.synchronized_time = lambda: float(rows[0])  # type: ignore[assignment]
    choose.perf_counter = lambda: float(rows[0])  # type: ignore[attr-defined]


def _kill_at(kind: str, count: int) -> None:
    """End this process without a word, at an evaluation of the network or a step of a refit."""
    left = [count]

    def tick(*_: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if kind == "network":
        PIPE.transformer.register_forward_pre_hook(tick)
        return
    step = RefitStepper.step

    def counted(self: RefitStepper, *args: Any) -> Any:
        tick()
        return step(self, *args)

    RefitStepper.step = counted  # type: ignore[method-assign, assignment]


def _fail_at_once() -> None:
    def record(self: Session, *args: Any, **more: Any) -> Any:
        raise ValueError("this process has no memory left")

    Session.record = record  # type: ignore[method-assign, assignment]
