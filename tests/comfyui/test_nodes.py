"""The nodes, without ComfyUI: files in and out, cancelling, what they refuse."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache import Policy, PolicyError
from tests.comfyui.stand_ins import SHAPE, Interrupted, KSampler, Patcher, load_pack
from tests.core import samplers

SIGMAS = torch.linspace(1, 0, 9)


class Clip:
    """A CLIP whose conditioning is the length of the text."""

    def tokenize(self, text: str) -> str:
        return text

    def encode_from_tokens_scheduled(self, tokens: str) -> list[Any]:
        return [[torch.full((1, 3), 0.1 * len(tokens)), {"pooled_output": torch.ones(1, 2)}]]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    return load_pack(monkeypatch, tmp_path / "models").nodes


def prompts(nodes: Any, text: str = "a\nab\n\n abc \nabcd") -> Any:
    return nodes.ERTACachePrompts.execute(Clip(), text).results[0]


def inputs(nodes: Any, **changes: Any) -> dict[str, Any]:
    """Everything as lists, as ComfyUI gives it."""
    given = {
        "model": Patcher(),
        "positive": prompts(nodes),
        "sampler": KSampler(samplers.euler),
        "sigmas": SIGMAS.clone(),
        "latent_image": {"samples": torch.zeros(SHAPE)},
        "cfg": 1.0,
        "seed": 0,
        "speedups": "2",
        "name": "tests",
        "overwrite": False,
    } | changes
    return {name: [value] for name, value in given.items()}


def calibrate(nodes: Any, **changes: Any) -> Any:
    return nodes.ERTACacheCalibrate.execute(**inputs(nodes, **changes))


def test_prompts_are_one_conditioning_per_line(nodes: Any) -> None:
    found = prompts(nodes)
    assert [options["ertacache_prompt"] for _, options in found] == ["a", "ab", "abc", "abcd"]


def test_every_entry_and_row_is_a_prompt(nodes: Any) -> None:
    batch = [[torch.arange(6.0).view(2, 3), {"pooled_output": torch.ones(2, 2), "guidance": 3.5}]]
    found = nodes.split_conditioning([batch, prompts(nodes, "a\nb")])
    assert len(found) == 4
    assert len({name for name, _ in found}) == 4
    tensor, options = found[1][1]
    assert tensor.tolist() == [[3.0, 4.0, 5.0]]
    assert options["pooled_output"].shape == (1, 2)
    assert options["guidance"] == 3.5
    assert len(nodes.split_conditioning([batch, batch])) == 2
    with pytest.raises(PolicyError, match="has area: calibrate with prompts for the whole image"):
        nodes.split_conditioning([[[torch.ones(1, 3), {"area": (1, 1, 0, 0)}]]])


def test_calibrate_then_sample_and_show(nodes: Any, tmp_path: Path) -> None:
    output = calibrate(nodes)
    name, report = output.results
    path = tmp_path / "models" / "ertacache" / name
    policy = Policy.load(path)
    assert [len(plan.compute_steps) for plan in policy.plans] == [4]
    assert policy.provenance["ComfyUI model"] == "Flux"
    assert [run.prompt for run in policy.profile.runs] == ["a", "ab", "abc"]
    assert "4 of 8 steps computed" in report
    assert list(path.parent.iterdir()) == [path]
    assert nodes._policy_input().options == [name]
    sampler = nodes.ERTACacheSampler.execute(name, 2.0).results[0]
    assert sampler.sampler_function is not None
    patched = nodes.ERTACacheModel.execute(Patcher(), name, 2.0).results[0]
    assert list(patched.wrappers) == [("outer", "ertacache")]
    image, text = nodes.ERTACacheInfo.execute(name).results
    assert image.shape == (1, 640, 960, 3)
    assert text == report
    for node in (nodes.ERTACacheSampler, nodes.ERTACacheModel, nodes.ERTACacheInfo):
        assert node.fingerprint_inputs(policy=name) == path.stat().st_mtime


def test_a_cancelled_calibration_is_continued(nodes: Any, tmp_path: Path) -> None:
    import comfy.model_management  # the stand-in

    interruption = comfy.model_management.interruption
    interruption.after = 20  # two full runs of 8 steps, and a part of the third
    with pytest.raises(Interrupted):
        calibrate(nodes)
    (profile,) = (tmp_path / "models" / "ertacache").iterdir()
    kept = Policy.load(profile).profile
    assert kept is not None
    assert kept.num_runs == 2
    interruption.after = 10**9
    name = calibrate(nodes).results[0]
    done = Policy.load(profile.with_name(name)).profile
    assert done is not None
    assert done.runs[:2] == kept.runs
    assert not profile.exists()


def test_another_model_or_conditioning_does_not_continue_it(nodes: Any, tmp_path: Path) -> None:
    """A checkpoint of the same class, a LoRA, another guidance beside the prompt."""
    import comfy.model_management  # the stand-in

    changed = Patcher()
    torch.nn.init.constant_(changed.model.diffusion_model.weight, 2.0)
    patched = Patcher()
    patched.patches = {"weight": [1.0]}
    guided = [[tensor, options | {"guidance": 3.5}] for tensor, options in prompts(nodes)]
    for others in ({}, {"model": changed}, {"model": patched}, {"positive": guided}):
        comfy.model_management.interruption.after = 20
        with pytest.raises(Interrupted):
            calibrate(nodes, **others)
    assert len(list((tmp_path / "models" / "ertacache").iterdir())) == 4


def test_images_are_decoded_where_the_latents_are_and_the_model_is_loaded_again(
    nodes: Any,
) -> None:
    """ComfyUI has the sigmas on the device of the model, and unloads it to decode."""
    import comfy.model_management  # the stand-in

    seen = []

    class Vae:
        def decode(self, latents: Tensor) -> Tensor:
            seen.append(latents.device.type)
            return latents[:, :3].movedim(1, -1).clamp(0, 1)

    model = Patcher()
    calibrate(nodes, model=model, vae=Vae())
    assert set(seen) == {"cpu"}
    loaded = comfy.model_management.loaded
    assert len(loaded) == len(seen)
    assert {type(models[0]) for models in loaded} == {Patcher}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "../x"}, "cannot be the name of a policy"),
        ({"name": ""}, "cannot be the name of a policy"),
        ({"speedups": "two"}, "speedups must be numbers such as '2, 3'"),
        ({"cfg": 2.0}, "connect a negative conditioning, or set cfg to 1"),
        ({"sigmas": torch.tensor([1.0, 0.0])}, "less than two steps"),
        ({"sampler": object()}, "is not a sampler function of ComfyUI"),
        ({"positive": [[torch.ones(1, 3), {}]]}, "at least two prompts"),
        (
            {"latent_image": {"samples": torch.zeros(SHAPE), "noise_mask": torch.ones(1, 6, 6)}},
            "the latent has a mask: calibrate without one",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_refused(
    nodes: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        calibrate(nodes, **changes)


def test_nothing_is_overwritten_by_accident(nodes: Any, tmp_path: Path) -> None:
    file = tmp_path / "models" / "ertacache" / "tests.safetensors"
    file.write_text("precious")
    with pytest.raises(PolicyError, match="exists: choose another name, or switch overwrite on"):
        calibrate(nodes)
    assert file.read_text() == "precious"
    assert calibrate(nodes, overwrite=True).results[0] == file.name


def test_without_a_policy_the_nodes_say_what_to_do(nodes: Any) -> None:
    (choice,) = nodes._policy_input().options
    with pytest.raises(PolicyError, match="run ERTACache Calibrate once"):
        nodes.ERTACacheSampler.execute(choice, 2.0)
    with pytest.raises(PolicyError, match="press R to refresh the list"):
        nodes.ERTACacheInfo.execute("absent.safetensors")


def test_images_of_a_vae_are_measured(nodes: Any) -> None:
    seen = []

    class Vae:
        def decode(self, latents: Any) -> Any:
            seen.append(latents.shape)
            return latents[:, :3].movedim(1, -1).sigmoid()

    calibrate(nodes, vae=Vae())
    assert seen[0] == SHAPE


def test_the_entry_point_lists_every_node(monkeypatch: Any, tmp_path: Path) -> None:
    pack = load_pack(monkeypatch, tmp_path)
    found = asyncio.run(asyncio.run(pack.comfy_entrypoint()).get_node_list())
    names = {node.define_schema().node_id for node in found}
    assert names == {node.__name__ for node in found}
    assert len(names) == 6
