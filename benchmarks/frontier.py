"""How long the whole frontier takes: every budget of a 50-step, 32-prompt profile, on one core.

What it measures: `solve_frontier` (median of several runs after a warm-up) for latents of growing
size. The profile is a Gram matrix whatever the latent, so the time must not grow with it. Writes
``results/frontier.json``; the last line of standard output is the JSON, compact.

    python benchmarks/frontier.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import ertacache
from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.frontier import solve_frontier
from ertacache.core.gram import Gram, profile_run
from ertacache.core.sampler import run_reference
from ertacache.formats.files import write_whole

ROOT = Path(__file__).parent.parent
STEPS, PROMPTS, REPEATS = 50, 32, 5


def profile(points: int) -> tuple[Gram, torch.Tensor]:
    """Profile 32 prompts whose latents have ``2 points`` elements."""
    flow, sigmas = GaussianRing(2.0, 0.3), shifted_sigmas(STEPS)
    noise = flow.noise(PROMPTS * points, seed=0).view(PROMPTS, points, 2)
    run = run_reference(flow.velocity, noise, sigmas=sigmas)
    d = sigmas.diff()
    return profile_run(run).gram, torch.stack([torch.ones_like(d), d], dim=1)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "frontier.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = (32, 512, 4096)
    profiles = {points: profile(points) for points in sizes}
    solve_frontier(*profiles[sizes[0]])  # warm-up
    times: dict[int, list[float]] = {points: [] for points in sizes}
    for _ in range(REPEATS):  # interleaved: a slow moment of the machine hits all sizes
        for points in sizes:
            start = time.perf_counter()
            solve_frontier(*profiles[points])
            times[points].append(time.perf_counter() - start)
    rows = [
        {
            "latent_elements": 2 * points,
            "seconds": round(statistics.median(times[points]), 2),
            "fastest": round(min(times[points]), 2),
            "slowest": round(max(times[points]), 2),
        }
        for points in sizes
    ]
    for row in rows:
        print(f"frontier of {STEPS} steps, {PROMPTS} prompts, {STEPS - 1} budgets:", row)
    record = {
        "command": "python benchmarks/frontier.py",
        "versions": {"ertacache": ertacache.__version__, "torch": torch.__version__},
        "num_steps": STEPS,
        "num_prompts": PROMPTS,
        "budgets": STEPS - 1,
        "threads": 1,
        "rows": rows,
    }
    write_whole(options.results, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, separators=(",", ":")))


if __name__ == "__main__":
    main()
