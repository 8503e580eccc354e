"""Nodes for the tests: count the evaluations of a network, sample nested latents."""

from __future__ import annotations

import time
from typing import Any

import comfy.nested_tensor
import comfy.patcher_extension
import comfy.samplers
import torch
from comfy_api.latest import ComfyExtension, io


class CountCalls(io.ComfyNode):
    """MODEL in, MODEL out; counts how often the first layer of a Flux network is evaluated."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ProbeCountCalls",
            category="probe",
            inputs=[io.Model.Input("model"), io.Int.Input("seconds_per_call", default=0)],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, seconds_per_call: int) -> io.NodeOutput:
        layer = model.model.diffusion_model.img_in
        if hasattr(layer, "probe"):
            layer.probe.remove()
        layer.calls, layer.rows, layer.seconds = 0, 0, seconds_per_call
        layer.probe = layer.register_forward_pre_hook(_count)
        return io.NodeOutput(model)

    @classmethod
    def fingerprint_inputs(cls, **kwargs: Any) -> float:
        return time.monotonic()  # counts anew in every run


def _count(layer: Any, inputs: tuple[Any, ...]) -> None:
    layer.calls += 1
    layer.rows += len(inputs[0])
    time.sleep(layer.seconds)


class CopyInput(io.ComfyNode):
    """MODEL in, MODEL out; the network gets a copy of its input.

    EasyCache adds to its input in place. If the network has the type of the latents, float32, that
    is the latent of the step itself, and the result is spoilt.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ProbeCopyInput",
            category="probe",
            inputs=[io.Model.Input("model")],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any) -> io.NodeOutput:
        patched, kind = model.clone(), comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL
        patched.add_wrapper_with_key(kind, "copy", _copy)
        return io.NodeOutput(patched)


def _copy(executor: Any, x: Any, *rest: Any, **named: Any) -> Any:
    return executor(x.clone(), *rest, **named)


class ReadCalls(io.ComfyNode):
    """LATENT in, the number of evaluations so far out, as text in the history."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ProbeReadCalls",
            category="probe",
            is_output_node=True,
            inputs=[io.Model.Input("model"), io.Latent.Input("latent")],
            outputs=[],
        )

    @classmethod
    def execute(cls, model: Any, latent: Any) -> io.NodeOutput:
        layer = model.model.diffusion_model.img_in
        return io.NodeOutput(ui={"calls": [layer.calls], "rows": [layer.rows]})


class RingGuider(comfy.samplers.CFGGuider):
    """A guider without a network: the data lies on a circle, in pairs of numbers."""

    calls = 0

    def predict_noise(
        self, x: Any, timestep: Any, model_options: Any = None, seed: Any = None
    ) -> Any:
        self.calls += 1
        pairs = x.reshape(len(x), -1, 2)
        found = pairs / pairs.norm(dim=-1, keepdim=True).clamp_min(1e-3)
        return (found * (1 - 0.5 * timestep.view(-1, 1, 1))).reshape(x.shape)


class SampleNested(io.ComfyNode):
    """Sample latents of two parts, as those of a model for video and sound."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ProbeSampleNested",
            category="probe",
            inputs=[
                io.Model.Input("model"),
                io.Sampler.Input("sampler"),
                io.Sigmas.Input("sigmas"),
                io.Int.Input("length", default=6),
            ],
            outputs=[io.Latent.Output()],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model: Any, sampler: Any, sigmas: Any, length: int) -> io.NodeOutput:
        shapes = [(1, 8, length, 4, 4), (1, 4, 2 * length)]
        generator = torch.Generator().manual_seed(3)
        nested = comfy.nested_tensor.NestedTensor
        noise = nested([torch.randn(shape, generator=generator) for shape in shapes])
        latent = nested([torch.zeros(shape) for shape in shapes])
        guider = RingGuider(model)
        guider.set_conds([], [])
        seen: list[Any] = []
        found = guider.sample(
            noise, latent, sampler, sigmas, seed=1, callback=lambda *step: seen.append(step)
        )
        video, sound = found.unbind()
        kinds = sorted({type(step[1]).__name__ for step in seen})
        facts = {
            "calls": [guider.calls],
            "steps": [step[0] for step in seen],
            "kinds": kinds,
            "shapes": [list(video.shape), list(sound.shape)],
        }
        packed = torch.cat([video.flatten(), sound.flatten()]).view(1, 1, -1)
        return io.NodeOutput({"samples": packed}, ui=facts)


class Probe(ComfyExtension):
    """What ComfyUI asks for the nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [CountCalls, CopyInput, ReadCalls, SampleNested]


async def comfy_entrypoint() -> Probe:
    """Found by ComfyUI."""
    return Probe()
