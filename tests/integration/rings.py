"""Exactly solvable flows as networks of a pipeline, for every kind of scheduler and prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ertacache.core.flows import GaussianRing
from ertacache.core.frontier import KnownSchedule
from ertacache.formats.policy import Policy
from ertacache.integration.solve import profile_frontier
from tests.integration.sampling import Sampling


class Ring(nn.Module):
    """What a perfect network outputs: noise minus data, noise, data, or the v of both.

    A latent of ``a`` data and ``s`` noise is that of a flow, times ``a + s``, at s / (a + s).
    """

    config: ClassVar[dict[str, Any]] = {"kind": "ring"}

    def __init__(self, scheduler: Any) -> None:
        super().__init__()
        self.flow, self.calls = GaussianRing(2.0, 0.3), 0
        self.weight = nn.Parameter(torch.zeros(1))  # has the number type of the network
        self._kind = scheduler.config.get("prediction_type", "flow_prediction")
        self._alphas = getattr(scheduler, "alphas_cumprod", None)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        self.calls += 1
        if self._kind == "flow_prediction":
            return self.flow.velocity(x, t / 1000)
        a, s = self._data_and_noise(t)
        y, sigma = x / (a + s), s / (a + s)
        v = self.flow.velocity(y, sigma)
        data, noise = y - sigma * v, y + (1 - sigma) * v
        return {"epsilon": noise, "sample": data, "v_prediction": a * noise - s * data}[self._kind]

    def _data_and_noise(self, t: Tensor) -> tuple[Tensor, Tensor]:
        below, above = int(t.floor()), int(t.ceil())
        squares = self._alphas[[below, above]].sqrt()
        a = squares[0] + (t - below) * (squares[1] - squares[0])
        return a, (1 - a**2).sqrt()


def with_frontier(policy: Policy) -> Policy:
    """As calibration leaves it: a search begins with the frontier of the profile."""
    known = [
        KnownSchedule(point.plan.compute_steps, point.predicted_error)
        for point in profile_frontier(policy).points
    ]
    return replace(policy, frontier=tuple(known))


class RingSampling(Sampling):
    """A pipeline over a flow that is known in closed form: 16 prompts of 64 points."""

    shape = (16, 64, 2)

    def __init__(self, scheduler: Any) -> None:
        super().__init__(scheduler, Ring(scheduler))
