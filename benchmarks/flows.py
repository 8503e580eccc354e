"""Both methods on exactly solvable flows: eight Gaussians on a circle, closed-form velocity.

What it measures: the distance (RMSE, held-out noise) of the accelerated result to the full run, for
the paper's method part by part, for ours from the profile alone and refitted in closed loop, and
for fewer steps. No network is trained and nothing is random but seeded noise, so anyone gets these
numbers. Writes ``results/flows.json`` and the counterpart of the paper's figure 2b,
``docs/images/trajectories.png``. The last line of standard output is the JSON, compact.

    python benchmarks/flows.py
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import ertacache
from ertacache.core.flows import GaussianRing, rmse, shifted_sigmas
from ertacache.core.frontier import solve_frontier
from ertacache.core.gram import Trajectory, profile_run
from ertacache.core.paper import adjusted_sigmas, pick_schedule, reuse_distances, sweep_profile
from ertacache.core.paper_steppers import GainFit, ThresholdSearch
from ertacache.core.plans import PaperPlan, TrajectoryPlan
from ertacache.core.sampler import run, run_reference
from ertacache.core.search import spread_schedule
from ertacache.core.simulate import Fit
from ertacache.core.steppers import RefitStepper, make_stepper
from ertacache.figures import FAINT, MUTED, SERIES, new_figure, styled, to_png
from ertacache.formats.files import write_whole

ROOT = Path(__file__).parent.parent
CASES = [(radius, width, steps) for radius, width in ((2.0, 0.3), (4.0, 0.1)) for steps in (30, 50)]
PANELS = (
    "plain reuse",
    "paper: policy",
    "paper: policy + timesteps",
    "paper: policy + rectification",
    "ours: profile",
    "ours: closed loop",
)


@dataclass(frozen=True)
class Result:
    """A method on the held-out noise: its number of computed steps and all latents."""

    computed: int
    latents: tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A flow, its sigma schedule, calibration noise (16 prompts of 64 points), held-out noise."""

    flow: GaussianRing
    sigmas: Tensor
    calibration: Tensor
    heldout: Tensor


def make_case(radius: float, width: float, num_steps: int) -> Case:
    """A uniform sigma schedule; seeds 0 and 1."""
    flow = GaussianRing(radius, width)
    noise = flow.noise(16 * 64, seed=0).view(16, 64, 2)
    return Case(flow, shifted_sigmas(num_steps, 1.0), noise, flow.noise(2048, seed=1))


def run_methods(case: Case, budget: int) -> dict[str, Result]:
    """Every method on the held-out noise with at most ``budget`` computed steps."""
    velocity, sigmas = case.flow.velocity, case.sigmas
    reference = run_reference(velocity, case.calibration, sigmas=sigmas)
    sweep = sweep_profile(*reuse_distances(profile_run(reference), "residual"))
    uniform = spread_schedule(len(sigmas) - 1, budget, {0})
    plans: dict[str, PaperPlan | TrajectoryPlan] = {
        "plain reuse": PaperPlan(uniform, "velocity", sigmas),
        **paper_plans(case, pick_schedule(sweep, budget)[1]),
        **our_plans(case, reference, budget),
    }
    fewer = run_reference(velocity, case.heldout, sigmas=shifted_sigmas(budget, 1.0))
    results = {"fewer steps": Result(budget, fewer.latents)}
    for name, plan in plans.items():
        latents = run(velocity, case.heldout, make_stepper(plan), sigmas=sigmas)
        results[name] = Result(len(plan.compute_steps), latents)
    return results


def paper_plans(case: Case, steps: tuple[int, ...]) -> dict[str, PaperPlan]:
    """The paper's parts on the compute schedule of its own policy, alone and together."""
    policy = PaperPlan(steps, "residual", case.sigmas)
    timesteps = PaperPlan(steps, "residual", adjusted_sigmas(case.sigmas, step_scales(case, steps)))
    return {
        "paper: policy": policy,
        "paper: policy + timesteps": timesteps,
        "paper: policy + rectification": rectified(case, policy),
        "paper: all three": rectified(case, timesteps),
    }


def step_scales(case: Case, steps: tuple[int, ...]) -> Tensor:
    """Phi of eq. 13 on a given compute schedule, measured on the calibration noise."""
    # Errors are relative to these norms: infinite on the given steps, 0 on all others.
    norms = torch.full((len(case.sigmas) - 1,), torch.inf, dtype=torch.float64)
    norms[list(steps)] = 0.0
    search = ThresholdSearch(1.0, norms=norms)
    run(case.flow.velocity, case.calibration, search, sigmas=case.sigmas)
    assert search.compute_steps == steps
    return search.step_scales


def rectified(case: Case, plan: PaperPlan) -> PaperPlan:
    """A plan with K and B, fitted on the calibration noise."""
    fit = GainFit(plan)
    run(case.flow.velocity, case.calibration, fit, sigmas=case.sigmas)
    return fit.plan()


def our_plans(case: Case, reference: Trajectory, budget: int) -> dict[str, TrajectoryPlan]:
    """Trajectory rectification from the profile alone, and refitted in closed loop."""
    d = case.sigmas.diff()
    nominal = torch.stack([torch.ones_like(d), d], dim=1)
    gram = profile_run(reference).gram
    solved = solve_frontier(gram, nominal, budgets=[budget]).point(budget).plan
    refit = RefitStepper(
        reference.latents, compute_steps=solved.compute_steps, nominal=nominal, fit=Fit()
    )
    run(case.flow.velocity, case.calibration, refit, sigmas=case.sigmas)
    return {"ours: profile": solved, "ours: closed loop": refit.plan()}


def measure(case: Case, budget: int) -> list[dict[str, object]]:
    """One row per method: computed steps and distance to the full run."""
    full = run_reference(case.flow.velocity, case.heldout, sigmas=case.sigmas).latents[-1]
    return [
        {
            "method": name,
            "computed_steps": result.computed,
            "rmse": float(f"{rmse(result.latents[-1], full):.4g}"),
        }
        for name, result in run_methods(case, budget).items()
    ]


@styled()
def draw(case: Case, budget: int, path: Path) -> None:
    """The paper's figure 2b: where points go with each method, over where they should go."""
    points = case.heldout[:40]
    few = Case(case.flow, case.sigmas, case.calibration, points)
    full = run_reference(case.flow.velocity, points, sigmas=case.sigmas)
    paths = torch.stack(full.latents)
    figure = new_figure(8.4, 6.2)
    axes = figure.subplots(2, 3)
    for axis, (name, result) in zip(
        axes.flat, [(n, r) for n, r in run_methods(few, budget).items() if n in PANELS], strict=True
    ):
        axis.plot(paths[..., 0], paths[..., 1], color=FAINT, lw=2.2, solid_capstyle="round")
        taken = torch.stack(result.latents)
        axis.plot(taken[..., 0], taken[..., 1], color=SERIES[2].color, lw=0.8)
        axis.plot(*paths[-1].T, "o", color=MUTED, ms=6, mfc="none", label="full run")
        axis.plot(*taken[-1].T, ".", color=SERIES[1].color, ms=4, label=name)
        error = rmse(taken[-1], paths[-1])
        axis.set_title(f"{name}\n{result.computed} of {full.num_steps} steps, RMSE {error:.4f}")
        axis.set(aspect="equal", xlim=(-3, 3), ylim=(-3, 3))
        axis.set_axis_off()
    write_whole(path, to_png(figure))


def main(arguments: list[str] | None = None) -> None:
    """Measure, draw and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "flows.json")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = []
    for radius, width, num_steps in CASES:
        rows = measure(make_case(radius, width, num_steps), num_steps // 3)
        cases.append({"radius": radius, "width": width, "num_steps": num_steps, "rows": rows})
        print(f"radius {radius:g}, width {width:g}, {num_steps} steps")
        for row in rows:
            print(f"  {row['method']:30} {row['computed_steps']:>3}  {row['rmse']}")
    record = {
        "command": "python benchmarks/flows.py",
        "versions": {"ertacache": ertacache.__version__, "torch": torch.__version__},
        "heldout_points": 2048,
        "calibration_prompts": 16,
        "cases": cases,
    }
    write_whole(options.results, json.dumps(record, indent=1) + "\n")
    draw(make_case(2.0, 0.3, 30), 8, options.images / "trajectories.png")
    print(json.dumps(record, separators=(",", ":")))


if __name__ == "__main__":
    main()
