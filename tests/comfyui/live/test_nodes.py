"""What the server knows of the pack, and what the other nodes return."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image

from ertacache import Policy
from tests.comfyui.live.comparing import full, image_psnr, sample
from tests.comfyui.live.conftest import STEPS, folder
from tests.comfyui.live.environment import ROOT
from tests.comfyui.live.server import Server
from tests.comfyui.live.workflows import CFG, Graph, read_saved

NODES = ["Sampler", "Model", "Calibrate", "Info", "Prompts", "DemoModel"]


def test_every_node_is_listed(server: Server) -> None:
    listed = server.get("/object_info")
    assert [f"ERTACache{name}" in listed for name in NODES] == [True] * len(NODES)
    assert listed["ERTACacheSampler"]["output"] == ["SAMPLER"]
    assert listed["ERTACacheModel"]["output"] == ["MODEL"]


def test_the_drop_down_lists_the_folder(server: Server, policy: str) -> None:
    listed = server.get("/object_info/ERTACacheSampler")["ERTACacheSampler"]
    assert policy in listed["input"]["required"]["policy"][1]["options"]
    assert policy in server.get("/models/ertacache")


def test_the_demo_model_is_the_pipeline(server: Server) -> None:
    """ComfyUI's Flux with our weights against the pipeline of diffusers, on the same noise."""
    from ertacache.models import MODELS, load_pipeline
    from tests.comfyui.live.comparing import PROMPT, SEED

    pipe = load_pipeline("emoji-flux")
    shape = (1, pipe.vae.config.latent_channels, 16, 16)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(SEED))
    packed = pipe._pack_latents(noise, *shape)
    call = MODELS["emoji-flux"].call_arguments | {"num_inference_steps": STEPS}
    wanted = pipe(PROMPT, latents=packed, output_type="latent", **call).images
    wanted = pipe._unpack_latents(wanted, 64, 64, pipe.vae_scale_factor)
    sigmas = pipe.scheduler.sigmas.tolist()

    def build(graph: Graph, positive: list[object]) -> list[object]:
        return graph.sample(positive, SEED, sigmas=graph.manual_sigmas(sigmas))

    assert call["true_cfg_scale"] == CFG
    assert image_psnr(sample(server, build).latent, wanted) > 80


def test_info(server: Server, policy: str) -> None:
    graph = Graph()
    info = graph.add("ERTACacheInfo", policy=policy)
    image = graph.add("SaveImage", images=[info, 0], filename_prefix="info")
    (path,) = server.run(graph.nodes).images(image)
    assert Image.open(path).size == (960, 640)


def test_calibration_reports_what_it_measured(server: Server, policy: str) -> None:
    known = Policy.load(folder(server) / policy)
    (plan,) = known.plans
    assert plan.measured is not None
    assert known.provenance["ComfyUI model"] == "Flux"
    assert known.profile is not None
    assert known.profile.runs[0].prompt.startswith("a ")


@pytest.mark.parametrize("name", ["1-calibrate", "2-generate", "3-ksampler"])
def test_the_example_workflows_run(server: Server, policy: str, name: str) -> None:
    """Those of the pack, as the front end saves them, with the test's policy and fewer steps."""
    assert name in server.get("/workflow_templates")["ertacache"]
    saved = (ROOT / "comfyui" / "example_workflows" / f"{name}.json").read_text()
    nodes = read_saved(json.loads(saved))
    for inputs in (node["inputs"] for node in nodes.values()):
        small = {"steps": 4 if name == "1-calibrate" else STEPS, "policy": policy, "speedups": "2"}
        shown = {key: value for key, value in small.items() if key in inputs}
        inputs |= {key: v for key, v in shown.items() if not isinstance(inputs[key], list)}
    found = server.run(nodes).outputs
    assert sum(len(each.get("images", [])) for each in found.values()) == 1 + (name == "2-generate")


def test_full_runs_are_repeatable(server: Server) -> None:
    first, again = (sample(server, full(steps=STEPS)) for _ in range(2))
    assert torch.equal(first.latent, again.latent)
