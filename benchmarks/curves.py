"""Step-to-step changes across prompts, and how well TeaCache estimates them.

The counterpart of the paper's figure on L1 distances. On full runs of held-out prompts, for
each prompt and from each step to the next:

- ``residual``: relative L1 change of the residual v - x, which the paper reuses;
- ``output``: that of the network's output (the conditional one, where there is guidance);
- ``estimate``: what TeaCache takes for the latter, its polynomial of the change of the modulated
  input. The polynomial is the one refitted on calibration prompts, as in the benchmark.

Means and the 5th and 95th percentile over prompts, and Pearson correlations over steps: of every
prompt's curve with the mean curve (how alike prompts are) and of TeaCache's estimate with what it
stands for. Writes one row per model into ``results/curves.json``, in place of the older one, and
draws ``docs/images/curves-MODEL.png``. The last line of standard output is the JSON of the rows,
compact.

    python benchmarks/curves.py                         # every bundled model
    python benchmarks/curves.py emoji-flux
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from plots import draw_curves
from rows import RESULTS, ROOT, ModelParser, Row, replace_rows, show_progress
from torch import Tensor

from ertacache.baselines.blocks import BlockCall, BlockRun, Decision, attach_blocks
from ertacache.baselines.clock import first_tensor
from ertacache.baselines.private_api import one_network
from ertacache.baselines.teacache import Signal, TeaCache, evaluate
from ertacache.calibration.session import HELDOUT_SEED, Session, number_runs
from ertacache.integration.tracker import NetworkCall
from ertacache.models import MODELS, load_pipeline, load_prompts


class Watch:
    """Modulated input and output of the first call, and the residual, of every step."""

    def __init__(self, pipe: Any, undo: ExitStack) -> None:
        """Observe until ``undo`` is closed."""
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.residuals: list[Tensor] = []
        self.signal = Signal(one_network(pipe), undo)
        undo.enter_context(attach_blocks(pipe, lambda: WatchedRun(self)))
        scheduler, self._step = pipe.scheduler, pipe.scheduler.step  # the attached one by now
        scheduler.step = self._take_step
        undo.callback(setattr, scheduler, "step", self._step)

    def _take_step(self, output: Tensor, timestep: Any, sample: Tensor, **more: Any) -> Any:
        self.residuals.append((output - sample).detach())
        return self._step(output, timestep, sample, **more)

    def take(self, prompts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Relative L1 changes of residuals, outputs and inputs, (prompts, T - 1) each; forgets."""
        seen = self.residuals, self.outputs, self.inputs
        self.inputs, self.outputs, self.residuals = [], [], []
        residual, output, given = (changes(tensors, prompts) for tensors in seen)
        return residual, output, given


class WatchedRun(BlockRun):
    """A full run that is observed; everything is computed."""

    def __init__(self, watch: Watch) -> None:
        """Append to the lists of ``watch``."""
        super().__init__()
        self._watch = watch

    def decide(self, call: BlockCall) -> Decision:
        """Keep the modulated input."""
        if call.branch == 0:
            self._watch.inputs.append(self._watch.signal(call).detach())
        return Decision()

    def call(self, call: NetworkCall) -> Any:
        """Keep the output."""
        output = call.compute()
        if self.branch == 0:
            self._watch.outputs.append(first_tensor(output).detach())
        return output


def changes(tensors: Sequence[Tensor], prompts: int) -> Tensor:
    """Relative L1 change from each tensor to the next, per prompt, (prompts, len - 1).

    A batch that holds both branches of guidance holds the conditional one last.

    Example:
        >>> changes([torch.tensor([[2.0], [4.0]]), torch.tensor([[3.0], [4.0]])], 2)
        tensor([[0.5000],
                [0.0000]], dtype=torch.float64)
    """
    rows = torch.stack([x.double().unflatten(0, (-1, prompts))[-1].flatten(1) for x in tensors])
    return (rows.diff(dim=0).abs().mean(-1) / rows[:-1].abs().mean(-1)).T


def correlation(a: Tensor, b: Tensor) -> Tensor:
    """Pearson correlation along the last dimension; 0 where something does not vary."""
    a, b = a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True)
    scale = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
    tiny = torch.finfo(scale.dtype).tiny
    return (a * b).sum(-1) / scale.clamp_min(tiny)


def curve(values: Tensor) -> dict[str, list[float]]:
    """Mean and percentiles over prompts of (P, T - 1) values, per step."""
    low, high = values.quantile(torch.tensor([0.05, 0.95], dtype=values.dtype), dim=0)
    bands = {"mean": values.mean(0), "low": low, "high": high}
    return {name: [round(v, 5) for v in band.tolist()] for name, band in bands.items()}


def make_row(
    name: str, residual: Tensor, output: Tensor, estimate: Tensor, polynomial: Sequence[float]
) -> Row:
    """The row of a model."""

    def alike(values: Tensor, others: Tensor) -> dict[str, float]:
        found = correlation(values, others)
        return {"mean": round(found.mean().item(), 4), "lowest": round(found.min().item(), 4)}

    third = residual.shape[1] // 3
    return {
        "model": name,
        "steps": residual.shape[1] + 1,
        "prompts": residual.shape[0],
        "polynomial": list(polynomial),
        "residual": curve(residual),
        "output": curve(output),
        "estimate": curve(estimate),
        "prompt_with_mean": alike(residual, residual.mean(0).expand_as(residual)),
        "estimate_with_residual": alike(estimate, residual),
        "estimate_with_output": alike(estimate, output),
        "spread_over_prompts": round((residual.std(0) / residual.mean(0)).mean().item(), 4),
        # Ratio of the estimate to the estimated change, early and late in the run.
        "estimate_over_output_first_third": _ratio(estimate, output, slice(0, third)),
        "estimate_over_output_last_third": _ratio(estimate, output, slice(-third, None)),
    }


def _ratio(estimate: Tensor, output: Tensor, part: slice) -> float:
    return round((estimate[:, part].mean() / output[:, part].mean()).item(), 4)


def measure_model(name: str, options: argparse.Namespace) -> Row | None:
    """The row of a model, None where TeaCache does not apply."""
    pipe = load_pipeline(name)
    why_not = TeaCache().applies(pipe)
    if why_not is not None:
        print(f"{name}: {why_not}")
        return None
    session = Session(pipe, MODELS[name].call_arguments, batch_size=options.batch)
    fitted = number_runs(load_prompts(name, "calibration")[: options.calibration])

    def run_prompts() -> None:
        for batch in session.batches(fitted):
            session.run(batch, output_type="latent")

    polynomial = TeaCache().calibrate(pipe, run_prompts).polynomial
    heldout = number_runs(load_prompts(name, "heldout")[: options.heldout], HELDOUT_SEED)
    report, found = show_progress(name), []
    with ExitStack() as undo:
        watch = Watch(pipe, undo)
        for batch in session.batches(heldout):
            session.run(batch, output_type="latent")
            residual, output, given = watch.take(len(batch))
            found.append((residual, output, evaluate_all(polynomial, given)))
            report(sum(len(part[0]) for part in found), len(heldout))
    residual, output, estimate = (torch.cat(parts) for parts in zip(*found, strict=True))
    return make_row(name, residual, output, estimate, polynomial)


def evaluate_all(polynomial: Sequence[float], x: Tensor) -> Tensor:
    """TeaCache's estimate of every change."""
    values = [evaluate(polynomial, value) for value in x.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).view_as(x)


def main(arguments: list[str] | None = None) -> None:
    """Measure models, one after the other."""
    parser = ModelParser(__doc__)
    parser.add_argument("--calibration", type=int, default=16, help="prompts of the polynomial")
    parser.add_argument("--heldout", type=int, default=64, help="prompts of the curves")
    parser.add_argument("--batch", type=int, default=16, help="prompts per call")
    parser.add_argument("--results", type=Path, default=RESULTS / "curves.json")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images")
    options = parser.parse(arguments)
    rows = []
    for name in options.models:
        row = measure_model(name, options)
        if row is not None:
            replace_rows(options.results, name, [row])
            draw_curves(row, options.images / f"curves-{name}.png")
            rows.append(row)
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
