"""The common task of all methods: a session, calibration prompts and held-out prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ertacache.calibration.session import Session
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.private_api import Pipeline

__all__ = ["Workload"]


@dataclass(frozen=True, eq=False)
class Workload:
    """A pipeline and its prompts.

    Attributes:
        model: name of the model in the results.
        session: the pipeline and how it is called.
        calibration: prompts and seeds for calibration.
        heldout: prompts and seeds for evaluation.
    """

    model: str
    session: Session
    calibration: Sequence[ProfiledPrompt]
    heldout: Sequence[ProfiledPrompt]

    @property
    def pipe(self) -> Pipeline:
        """The pipeline."""
        return self.session.pipe

    @property
    def steps(self) -> int:
        """Steps of a full run."""
        return int(self.session.call["num_inference_steps"])

    @property
    def batches(self) -> list[list[ProfiledPrompt]]:
        """The held-out prompts, batch by batch."""
        return self.session.batches(self.heldout)

    def run_calibration(self) -> None:
        """Run the calibration prompts, latents only; a baseline's calibration observes them."""
        for batch in self.session.batches(self.calibration):
            self.session.run(batch, output_type="latent")
