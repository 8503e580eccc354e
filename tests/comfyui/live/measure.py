"""Measure the nodes on the bundled model in a real ComfyUI, and write results/comfyui.json.

Calibrated on calibration prompts by the node and by the pipeline of diffusers, evaluated on
held-out prompts and seeds. The sigma schedule is that of the pipeline everywhere. PSNR is that of
decoded images to ComfyUI's own full run of the same sampler, prompt and seed. Cost is counted in
evaluations of the network; thresholds of EasyCache and LazyCache are bisected on calibration
prompts.

    python -m tests.comfyui.live.measure && python benchmarks/tables.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ertacache
from ertacache import Policy
from ertacache.calibration.session import HELDOUT_SEED
from ertacache.formats.files import write_whole
from ertacache.metrics import bootstrap_interval
from ertacache.models import MODELS, load_pipeline, load_prompts
from tests.comfyui.live.comparing import image_psnr
from tests.comfyui.live.environment import ROOT
from tests.comfyui.live.server import Server, start_server
from tests.comfyui.live.workflows import STEPS, Graph, Link

RESULTS = ROOT / "results" / "comfyui.json"
NAME = "emoji-flux"
BUDGETS = (15, 10)  # computed steps of 30: 2x and 3x
OTHER_SAMPLERS = ("dpmpp_2m", "uni_pc")
CACHES = ("EasyCache", "LazyCache")
NODE, PIPELINE = "node.safetensors", "pipeline.safetensors"
BISECTIONS, BISECTED = 6, 3  # rounds, and prompts of each
EXCHANGED = 4  # prompts that the exchange of policies is measured on
HIGHEST = 3.0  # threshold that EasyCache accepts

Row = dict[str, Any]
Build = Callable[[Graph, Link, int], Link]
"""Adds nodes, given conditioning and seed; returns the latent."""


@dataclass(frozen=True)
class Run:
    """A prompt and its seed."""

    prompt: str
    seed: int


@dataclass(frozen=True)
class Bench:
    """A server, the sigma schedule, and the prompts."""

    server: Server
    sigmas: Sequence[float]
    calibration: Sequence[Run]
    heldout: Sequence[Run]

    def sample(self, build: Build, run: Run) -> tuple[Tensor, int]:
        """The latent and the number of evaluations of one run."""
        graph = Graph()
        latent, count = graph.save(build(graph, graph.encode(run.prompt), run.seed))
        found = self.server.run(graph.nodes)
        return found.latent(latent), found.outputs[count]["calls"][0]

    def full(self, sampler: str, steps: int = STEPS) -> Build:
        """ComfyUI's own sampler; with fewer steps, every so many of the sigmas."""
        places = torch.linspace(0, STEPS, steps + 1).round().long().tolist()
        sigmas = [self.sigmas[place] for place in places]

        def build(graph: Graph, positive: Link, seed: int) -> Link:
            options = {"sampler": graph.base(sampler), "sigmas": graph.manual_sigmas(sigmas)}
            return graph.sample(positive, seed, **options)

        return build

    def ours(self, policy: str, computed: int, sampler: str) -> Build:
        """Our sampler."""

        def build(graph: Graph, positive: Link, seed: int) -> Link:
            fast = graph.sampler(policy, STEPS / computed, sampler)
            sigmas = graph.manual_sigmas(self.sigmas)
            return graph.sample(positive, seed, sampler=fast, sigmas=sigmas)

        return build

    def cache(self, kind: str, threshold: float) -> Build:
        """One of ComfyUI's own caches, with euler."""

        def build(graph: Graph, positive: Link, seed: int) -> Link:
            window = {"start_percent": 0.15, "end_percent": 0.95, "verbose": False}
            copied = graph.add("ProbeCopyInput", model=graph.model)
            options = {"model": [copied, 0], "reuse_threshold": threshold, **window}
            graph.model = [graph.add(kind, **options), 0]
            return graph.sample(positive, seed, sigmas=graph.manual_sigmas(self.sigmas))

        return build

    def bisect(self, kind: str, budget: int) -> float:
        """The threshold whose runs come nearest to a number of evaluations."""
        low, high, found = 0.0, HIGHEST, []
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5 if low else high / 8
            runs = self.calibration[:BISECTED]
            calls = [self.sample(self.cache(kind, middle), run)[1] for run in runs]
            mean = sum(calls) / len(calls)
            found.append((abs(mean - budget), middle))
            low, high = (middle, high) if mean > budget else (low, middle)
        return min(found)[1]

    def evaluate(self, name: str, sampler: str, build: Build, full: Sequence[Tensor]) -> Row:
        """The row of a method on the held-out prompts."""
        results = [self.sample(build, run) for run in self.heldout]
        psnr = [image_psnr(found[0], wanted) for found, wanted in zip(results, full, strict=True)]
        low, high = bootstrap_interval(psnr)
        row = {
            "method": name,
            "sampler": sampler,
            "calls": round(sum(calls for _, calls in results) / len(results), 2),
            "psnr_db": round(sum(psnr) / len(psnr), 2),
            "psnr_low": round(low, 2),
            "psnr_high": round(high, 2),
            "worst_db": round(min(psnr), 2),
        }
        print(row, flush=True)  # noqa: T201
        return row


def calibrate_node(bench: Bench) -> None:
    """A policy made by the node."""
    graph = Graph()
    options = {"sigmas": graph.manual_sigmas(bench.sigmas), "speedups": "2, 3"}
    graph.calibrate(NODE, graph.prompts([run.prompt for run in bench.calibration]), **options)
    bench.server.run(graph.nodes)


def euler_rows(bench: Bench, full: Sequence[Tensor]) -> list[Row]:
    """Every method that we are compared with, and ours."""
    rows = []
    for budget in BUDGETS:
        candidates = {
            "ERTACache": bench.ours(NODE, budget, "euler"),
            "fewer steps": bench.full("euler", budget),
        }
        candidates |= {kind: bench.cache(kind, bench.bisect(kind, budget)) for kind in CACHES}
        for name, build in candidates.items():
            rows.append(bench.evaluate(name, "euler", build, full) | {"computed": budget})
    return rows


def sampler_rows(bench: Bench) -> tuple[list[Row], list[Row]]:
    """The rows of all samplers, and whether all steps computed is the sampler itself."""
    rows, equal = [], []
    for sampler in ("euler", *OTHER_SAMPLERS):
        full = [bench.sample(bench.full(sampler), run)[0] for run in bench.heldout]
        same = bench.sample(bench.ours(NODE, STEPS, sampler), bench.heldout[0])[0]
        equal.append({"sampler": sampler, "equal": torch.equal(same, full[0])})
        if sampler == "euler":
            rows += euler_rows(bench, full)
            continue
        for budget in BUDGETS:
            build = bench.ours(NODE, budget, sampler)
            rows.append(bench.evaluate("ERTACache", sampler, build, full) | {"computed": budget})
    return rows, equal


class Pipeline:
    """The pipeline of diffusers, on the noise of ComfyUI."""

    def __init__(self) -> None:
        """Load the bundled model."""
        self.pipe = load_pipeline(NAME)
        self.call = MODELS[NAME].call_arguments

    def sigmas(self) -> list[float]:
        """Its sigma schedule."""
        self.pipe("", **(self.call | {"output_type": "latent"}))
        found: list[float] = self.pipe.scheduler.sigmas.tolist()
        return found

    def sample(self, run: Run) -> Tensor:
        """The latent of a run, in the form of ComfyUI."""
        noise = torch.randn(1, 8, 16, 16, generator=torch.Generator().manual_seed(run.seed))
        packed = self.pipe._pack_latents(noise, *noise.shape)
        found = self.pipe(run.prompt, latents=packed, output_type="latent", **self.call).images
        latent: Tensor = self.pipe._unpack_latents(found, 64, 64, self.pipe.vae_scale_factor)
        return latent

    def sample_with(self, policy: Policy, computed: int, runs: Sequence[Run]) -> list[Tensor]:
        """The same under a policy."""
        with ertacache.attach(self.pipe, policy, compute_steps=computed):
            return [self.sample(run) for run in runs]

    def rows(self, policy: Policy, runs: Sequence[Run]) -> list[Row]:
        """What the policy of the pipeline reaches there, to the pipeline's own full run."""
        full, rows = [self.sample(run) for run in runs], []
        for budget in BUDGETS:
            found = self.sample_with(policy, budget, runs)
            psnr = [image_psnr(one, other) for one, other in zip(found, full, strict=True)]
            low, high = bootstrap_interval(psnr)
            rows.append(
                {
                    "computed": budget,
                    "psnr_db": round(sum(psnr) / len(psnr), 2),
                    "psnr_low": round(low, 2),
                    "psnr_high": round(high, 2),
                }
            )
        return rows


def exchange_rows(bench: Bench, pipeline: Pipeline, folder: Path) -> list[Row]:
    """The same policy in ComfyUI and in diffusers: PSNR between the two images."""
    rows, runs = [], bench.heldout[:EXCHANGED]
    for made, file in (("ComfyUI", NODE), ("diffusers", PIPELINE)):
        policy = Policy.load(folder / file)
        there = pipeline.sample_with(policy, BUDGETS[0], runs)
        here = [bench.sample(bench.ours(file, BUDGETS[0], "euler"), run)[0] for run in runs]
        psnr = [image_psnr(one, other) for one, other in zip(here, there, strict=True)]
        row = {"calibrated_in": made, "computed": BUDGETS[0], "prompts": len(runs)}
        rows.append(row | {"lowest_db": round(min(psnr), 2)})
    return rows


def make_policies(bench: Bench, pipeline: Pipeline, kept: Path) -> None:
    """Calibrate with the node and with the pipeline, unless an earlier measurement did."""
    folder = bench.server.base / "models" / "ertacache"
    if not (kept / NODE).exists():
        calibrate_node(bench)
        shutil.copy(folder / NODE, kept / NODE)
    if not (kept / PIPELINE).exists():
        prompts = [run.prompt for run in bench.calibration]
        policy = ertacache.calibrate(pipeline.pipe, prompts, speedup=[2, 3], **pipeline.call)
        policy.save(kept / PIPELINE)
    for name in (NODE, PIPELINE):
        shutil.copy(kept / name, folder / name)


def measure(bench: Bench, pipeline: Pipeline) -> Row:
    """Everything."""
    folder = bench.server.base / "models" / "ertacache"
    policy = Policy.load(folder / PIPELINE)
    exchanged = exchange_rows(bench, pipeline, folder)
    # Last uni_pc: ComfyUI's own writes to the sigmas that the server keeps for the next run.
    rows, equal = sampler_rows(bench)
    return {
        "model": NAME,
        "comfyui": "0.30.0",
        "steps": STEPS,
        "calibration_prompts": len(bench.calibration),
        "prompts": len(bench.heldout),
        "rows": rows,
        "pipeline": pipeline.rows(policy, bench.heldout),
        "all_steps": equal,
        "exchange": exchanged,
    }


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calibration", type=int, default=8, help="calibration prompts")
    parser.add_argument("--heldout", type=int, default=16, help="held-out prompts")
    parser.add_argument("--policies", type=Path, help="folder of policies to keep, or kept before")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    fitted = load_prompts(NAME, "calibration")[: chosen.calibration]
    unseen = load_prompts(NAME, "heldout")[: chosen.heldout]
    pipeline, place = Pipeline(), Path(tempfile.mkdtemp())
    try:
        with start_server(place / "base") as server:
            bench = Bench(
                server,
                pipeline.sigmas(),
                [Run(prompt, seed) for seed, prompt in enumerate(fitted)],
                [Run(prompt, HELDOUT_SEED + k) for k, prompt in enumerate(unseen)],
            )
            make_policies(bench, pipeline, chosen.policies or place)
            write_whole(chosen.output, json.dumps(measure(bench, pipeline), indent=1) + "\n")
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
