"""The common task of all methods: a pipeline, its call, calibration and held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ertacache.calibration.profiling import generators, split_runs
from ertacache.calibration.validation import now
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.compat import Pipeline

__all__ = ["Workload"]


@dataclass(frozen=True, eq=False)
class Workload:
    """A pipeline and its prompts.

    Attributes:
        model: name of the model in the results.
        pipe: the pipeline, nothing attached.
        call: arguments of its call, without prompt, generator and output type.
        calibration: prompts and seeds for calibration.
        heldout: prompts and seeds for evaluation.
        batch_size: prompts per call.
    """

    model: str
    pipe: Pipeline
    call: dict[str, Any]
    calibration: Sequence[ProfiledPrompt]
    heldout: Sequence[ProfiledPrompt]
    batch_size: int

    @property
    def steps(self) -> int:
        """Steps of a full run."""
        return int(self.call["num_inference_steps"])

    @property
    def batches(self) -> list[list[ProfiledPrompt]]:
        """The held-out prompts, batch by batch."""
        return list(split_runs(self.heldout, self.batch_size))

    def run(self, runs: Sequence[ProfiledPrompt], **more: Any) -> Any:
        """Call the pipeline with whatever is attached to it."""
        call = self.call | more
        if isinstance(call.get("negative_prompt"), str):
            # Some pipelines broadcast a single one inside the network, which breaks caches that
            # compare shapes.
            call["negative_prompt"] = [call["negative_prompt"]] * len(runs)
        return self.pipe(prompt=[r.prompt for r in runs], generator=generators(runs), **call)

    def run_calibration(self) -> None:
        """Run the calibration prompts, latents only; a baseline's calibration observes them."""
        for batch in split_runs(self.calibration, self.batch_size):
            self.run(batch, output_type="latent")

    def generate(self, runs: Sequence[ProfiledPrompt]) -> tuple[Tensor, float]:
        """Images or videos with values from 0 to 1, and the seconds of the whole call."""
        start = now()
        result = self.run(runs, output_type="pt")
        seconds = now() - start
        return torch.as_tensor(result[0]).float().cpu(), seconds
