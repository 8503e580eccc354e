"""The measured speed-up of the denoising loop and the cost of a reused step, on a bundled model.

What it measures: seconds from the first call of the network to the end of the last step, for the
full run and for policies of both methods at half and a third of the steps computed, ours also with
as many groups as a policy can have and a second history, where guidance has one; and the time
from the end of one step to the end of the next, on computed steps of the full run and on reused
steps, where the network does not run and only the pipeline's loop and ertacache remain. Text
encoding and decoding are left out. All variants take turns in every round, after one round that is
not counted, in which a policy chooses its plan; times are medians, and the speed-up is the median
over the rounds of the full run's time over the variant's. Prompts and coefficients do not matter
here, so one prompt is profiled. All of it with one thread, and with two.
Writes its rows into ``results/overhead.json``, in place of older rows of the same model. The last
line of standard output is the JSON of the rows, compact.

    python benchmarks/overhead.py emoji-flux
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rows import replace_rows

from ertacache.calibration.profile import profile
from ertacache.calibration.session import Session, number_runs, synchronized_time
from ertacache.calibration.solve import solve
from ertacache.core.groups import ONE_GROUP
from ertacache.core.plans import Target, TrajectoryPlan
from ertacache.formats.policy import Policy
from ertacache.integration.attach import Handle
from ertacache.integration.choose import PlanChooser
from ertacache.integration.identity import find_denoisers
from ertacache.integration.solve import profile_of, with_frontier
from ertacache.models import MODELS, load_pipeline, load_prompts

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "overhead.json"


@dataclass
class Variant:
    """One sampling variant, and its times in seconds, one list entry per counted run or step."""

    method: str
    chooser: PlanChooser | None = None  # of the policy; None for the full run
    cached_bytes: int = 0
    loops: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    reused: list[float] = field(default_factory=list)

    def note(self, times: list[float]) -> None:
        """Take the readings of one run: the first call of the network, then the end of steps."""
        self.loops.append(times[-1] - times[0])
        reused = set() if self.chooser is None else {*self.chooser.policy.default.reuse_steps}
        for k, (begin, end) in enumerate(pairwise(times)):
            (self.reused if k in reused else self.computed).append(end - begin)


@contextmanager
def reading(pipe: Any) -> Iterator[list[float]]:
    """Read the clock at the first call of the network and at the end of every step."""
    times: list[float] = []
    scheduler, below = pipe.scheduler, pipe.scheduler.step
    mine = "step" in vars(scheduler)

    def begin(*_: Any) -> None:
        if not times:
            times.append(synchronized_time())

    def step(*args: Any, **kwargs: Any) -> Any:
        result = below(*args, **kwargs)
        times.append(synchronized_time())
        return result

    hooks = [n.register_forward_pre_hook(begin) for n in find_denoisers(pipe).values()]
    scheduler.step = step
    try:
        yield times
    finally:
        for hook in hooks:
            hook.remove()
        if mine:
            scheduler.step = below
        else:
            del scheduler.step


def make_variants(pipe: Any, name: str, call: dict[str, Any]) -> list[Variant]:
    """The full run, and both methods at half and a third of the steps."""
    prompts = load_prompts(name, "calibration")[:1]
    known = with_frontier(profile(pipe, prompts, **call))
    branch = Session(pipe, call).reference(number_runs(prompts)).facts.branch
    variants = [Variant("full")]
    for speedup in (2.0, 3.0):
        ours, paper = (solve(known, method=m, speedup=speedup) for m in ("trajectory", "paper"))
        divided = with_groups(ours, branch=branch)
        made = {"trajectory": ours, "trajectory, groups": divided, "paper": paper}
        variants += [Variant(name, PlanChooser(one, Target())) for name, one in made.items()]
    return variants


def with_groups(policy: Policy, *, branch: bool) -> Policy:
    """The policy with a plan of the most expensive kind; what it gives is of no interest."""
    fitted = policy.default
    assert isinstance(fitted.plan, TrajectoryPlan)
    groups = profile_of(policy).finest or ONE_GROUP
    z = fitted.plan.coefficients.expand(-1, groups.count, -1)
    if branch:
        z = torch.cat([z, 0.001 * z[..., 1:]], dim=-1)
    plan = TrajectoryPlan(fitted.compute_steps, z.contiguous(), groups, branch=branch)
    return replace(policy, plans=(replace(fitted, plan=plan),))


def measure(
    pipe: Any, variants: list[Variant], *, prompts: list[str], call: dict[str, Any]
) -> None:
    """Run all variants on every prompt in turn; the first prompt warms up and is not counted."""
    for number, prompt in enumerate(prompts):
        for variant in variants:
            generator = torch.Generator().manual_seed(number)
            attached: Any = nullcontext()
            if variant.chooser is not None:
                attached = Handle(pipe, variant.chooser.policy, chooser=variant.chooser)
            with attached as handle, reading(pipe) as times:
                pipe(prompt=prompt, generator=generator, output_type="latent", **call)
            if handle is not None:
                variant.cached_bytes = handle.stats.total.cached_bytes
            if number:
                variant.note(times)
        print(f"{number + 1} of {len(prompts)}", end="\r", flush=True)


def make_row(name: str, variant: Variant, full: Variant) -> dict[str, Any]:
    """One row of the results file."""
    assert variant.chooser is not None
    plan = variant.chooser.policy.default
    steps, computed = plan.num_steps, len(plan.compute_steps)
    step, reused = median(full.computed), median(variant.reused)
    # Round by round: what slows the machine down for a while slows both.
    speedup = median(a / b for a, b in zip(full.loops, variant.loops, strict=True))
    return {
        "model": name,
        "method": variant.method,
        "steps": steps,
        "compute_steps": computed,
        "full_seconds": round(median(full.loops), 4),
        "seconds": round(median(variant.loops), 4),
        "speedup": round(speedup, 3),
        "percent_of_ideal": round(100 * speedup * computed / steps, 1),
        "computed_step_ms": round(1e3 * step, 3),
        "reused_step_ms": round(1e3 * reused, 3),
        "reused_step_percent": round(100 * reused / step, 2),
        # On a busy machine long steps are held up more often than short ones.
        "fastest_computed_step_ms": round(1e3 * min(full.computed), 3),
        "cached_bytes": variant.cached_bytes,
        "runs": len(variant.loops),
        "threads": torch.get_num_threads(),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure one model and write its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--runs", type=int, default=30, help="counted runs of every variant")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the processor")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the results file")
    given = parser.parse_args(arguments)
    name: str = given.model
    pipe, call = load_pipeline(name), MODELS[name].call_arguments
    variants = make_variants(pipe, name, call)
    heldout = load_prompts(name, "heldout")
    prompts = [heldout[k % len(heldout)] for k in range(given.runs + 1)]
    rows = []
    for threads in given.threads:
        torch.set_num_threads(threads)
        fresh = [Variant(one.method, one.chooser) for one in variants]
        measure(pipe, fresh, prompts=prompts, call=call)
        rows += [make_row(name, variant, fresh[0]) for variant in fresh[1:]]
    replace_rows(given.output, name, rows)
    for row in rows:
        print(
            f"{row['threads']} threads, {row['method']:20}{row['compute_steps']:3} of "
            f"{row['steps']}: "
            f"{row['speedup']:.2f} times as fast, {row['percent_of_ideal']} % of "
            f"{row['steps']}/{row['compute_steps']}; a reused step takes {row['reused_step_ms']} "
            f"ms, {row['reused_step_percent']} % of a computed one"
        )
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
