"""Workflows of the tests, in the form that ComfyUI's HTTP interface takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STEPS = 30
CFG = 2.0
SIZE = 64

Link = list[Any]


class Graph:
    """A workflow under construction; nodes are numbered in the order of their addition."""

    def __init__(self) -> None:
        """Begin with the bundled model, and a probe that counts its evaluations."""
        self.nodes: dict[str, Any] = {}
        loader = self.add("ERTACacheDemoModel")
        self.clip, self.vae = [loader, 1], [loader, 2]
        self.model: Link = [self.add("ProbeCountCalls", model=[loader, 0], seconds_per_call=0), 0]

    def add(self, kind: str, **inputs: Any) -> str:
        """Add a node; returns its id."""
        node = str(len(self.nodes) + 1)
        self.nodes[node] = {"class_type": kind, "inputs": inputs}
        return node

    def encode(self, text: str) -> Link:
        """The conditioning of a prompt."""
        return [self.add("CLIPTextEncode", clip=self.clip, text=text), 0]

    def prompts(self, texts: Sequence[str]) -> Link:
        """The conditioning of several prompts."""
        return [self.add("ERTACachePrompts", clip=self.clip, prompts="\n".join(texts)), 0]

    def empty(self, batch: int = 1) -> Link:
        """Empty latents."""
        return [self.add("EmptyLatentImage", width=SIZE, height=SIZE, batch_size=batch), 0]

    def sigmas(self, steps: int = STEPS, denoise: float = 1.0) -> Link:
        """The sigma schedule of the scheduler named simple."""
        options = {"scheduler": "simple", "steps": steps, "denoise": denoise}
        return [self.add("BasicScheduler", model=self.model, **options), 0]

    def manual_sigmas(self, values: Sequence[float]) -> Link:
        """A sigma schedule of one's own."""
        return [self.add("ManualSigmas", sigmas=", ".join(f"{value:.9f}" for value in values)), 0]

    def base(self, name: str = "euler") -> Link:
        """A sampler of ComfyUI."""
        return [self.add("KSamplerSelect", sampler_name=name), 0]

    def sampler(self, policy: str | Link, speedup: float, base: str = "euler") -> Link:
        """Our sampler."""
        options = {"policy": policy, "speedup": speedup, "sampler": self.base(base)}
        return [self.add("ERTACacheSampler", **options), 0]

    def sample(
        self,
        positive: Link,
        seed: int,
        *,
        sampler: Link | None = None,
        sigmas: Link | None = None,
        latent: Link | None = None,
    ) -> Link:
        """SamplerCustomAdvanced with the guidance of the bundled model."""
        guider = self.add(
            "CFGGuider", model=self.model, positive=positive, negative=self.encode(""), cfg=CFG
        )
        noise = self.add("RandomNoise", noise_seed=seed)
        return [
            self.add(
                "SamplerCustomAdvanced",
                noise=[noise, 0],
                guider=[guider, 0],
                sampler=sampler or self.base(),
                sigmas=sigmas or self.sigmas(),
                latent_image=latent or self.empty(),
            ),
            0,
        ]

    def ksampler(
        self,
        positive: Link,
        seed: int,
        *,
        name: str = "euler",
        steps: int = STEPS,
        latent: Link | None = None,
    ) -> Link:
        """KSampler."""
        options = {"steps": steps, "cfg": CFG, "sampler_name": name, "scheduler": "simple"}
        return [
            self.add(
                "KSampler",
                model=self.model,
                seed=seed,
                positive=positive,
                negative=self.encode(""),
                latent_image=latent or self.empty(),
                denoise=1.0,
                **options,
            ),
            0,
        ]

    def calibrate(self, name: str, prompts: Link, *, base: str = "euler", **changes: Any) -> Link:
        """Calibrate; the policy is the first output."""
        inputs = {
            "model": self.model,
            "positive": prompts,
            "negative": self.encode(""),
            "sampler": self.base(base),
            "sigmas": self.sigmas(),
            "latent_image": self.empty(),
            "vae": self.vae,
            "cfg": CFG,
            "seed": 0,
            "speedups": "2",
            "name": name,
            "overwrite": False,
        }
        return [self.add("ERTACacheCalibrate", **(inputs | changes)), 0]

    def save(self, latent: Link) -> tuple[str, str]:
        """Save a latent; returns the nodes of the file and of the number of evaluations."""
        count = self.add("ProbeReadCalls", model=self.model, latent=latent)
        return self.add("SaveLatent", samples=latent, filename_prefix="latent"), count

    def save_image(self, latent: Link) -> str:
        """Decode a latent and save the image; returns the node."""
        image = self.add("VAEDecode", samples=latent, vae=self.vae)
        return self.add("SaveImage", images=[image, 0], filename_prefix="image")


CONTROLS = ("fixed", "randomize", "increment", "decrement")


def read_saved(saved: dict[str, Any]) -> dict[str, Any]:
    """A workflow as the front end saves it, in the form of the HTTP interface."""
    sources = {link[0]: [str(link[1]), link[2]] for link in saved["links"]}
    nodes: dict[str, Any] = {}
    for node in saved["nodes"]:
        # Behind a seed stands what the front end does to it after a run.
        values = iter([v for v in node.get("widgets_values") or [] if v not in CONTROLS])
        inputs = {}
        for entry in node["inputs"]:
            value = next(values) if "widget" in entry else None
            linked = entry.get("link") is not None
            inputs[entry["name"]] = sources[entry["link"]] if linked else value
        given = {name: value for name, value in inputs.items() if value is not None}
        nodes[str(node["id"])] = {"class_type": node["type"], "inputs": given}
    return nodes
