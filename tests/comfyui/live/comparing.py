"""Run one workflow with and without us, and compare the images."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ertacache.metrics import psnr
from ertacache.models import load_pipeline, load_prompts
from tests.comfyui.live.server import Server
from tests.comfyui.live.workflows import Graph, Link

PROMPT = load_prompts("emoji-flux", "heldout")[3]
SEED = 1_000_003

Build = Callable[[Graph, Link], Link]
"""Adds nodes to a graph, given the conditioning; returns the latent."""


class Sampled(NamedTuple):
    """What a run left behind."""

    latent: Tensor
    calls: int


def sample(server: Server, build: Build, *, prompt: str = PROMPT) -> Sampled:
    """Run a workflow; returns its latent and the number of evaluations of the network."""
    graph = Graph()
    latent, count = graph.save(build(graph, graph.encode(prompt)))
    found = server.run(graph.nodes)
    return Sampled(found.latent(latent), found.outputs[count]["calls"][0])


def full(sampler: str = "euler", *, steps: int, **changes: Any) -> Build:
    """The full run of a sampler."""

    def build(graph: Graph, positive: Link) -> Link:
        options = {"sampler": graph.base(sampler), "sigmas": graph.sigmas(steps)}
        return graph.sample(positive, SEED, **(options | changes))

    return build


def ours(policy: str, speedup: float, sampler: str = "euler", *, steps: int) -> Build:
    """The same under a policy."""

    def build(graph: Graph, positive: Link) -> Link:
        accelerated = graph.sampler(policy, speedup, sampler)
        return graph.sample(positive, SEED, sampler=accelerated, sigmas=graph.sigmas(steps))

    return build


@functools.cache
def _vae() -> Any:
    return load_pipeline("emoji-flux").vae


def image_psnr(latent: Tensor, reference: Tensor) -> float:
    """PSNR of decoded latents, in dB; infinite if they are equal."""
    with torch.no_grad():
        found, wanted = (
            (_vae().decode(each).sample / 2 + 0.5).clamp(0, 1) for each in (latent, reference)
        )
    return float(psnr(found, wanted).min())
