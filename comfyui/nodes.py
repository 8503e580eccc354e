"""The nodes: what they take, what they give, and what they say."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import comfy.patcher_extension
import comfy.samplers
import folder_paths
from comfy_api.latest import io, ui

from ertacache import Policy, PolicyError

from .calibration import PROMPT_KEY, Request, calibrate, split_conditioning
from .demo import load_demo
from .info import describe, draw
from .sampling import accelerate, take_over

__all__ = ["FOLDER", "NODES", "register_folder"]

FOLDER = "ertacache"
"""Folder of policy files in ComfyUI's models folder, and the key of our wrapper."""

CATEGORY = "ertacache"
SUFFIX = ".safetensors"
NO_POLICY = "none yet: run ERTACache Calibrate"


def register_folder() -> None:
    """Have ComfyUI list the policies in ``models/ertacache``."""
    folder = Path(folder_paths.models_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    folder_paths.add_model_folder_path(FOLDER, str(folder))
    folder_paths.folder_names_and_paths[FOLDER][1].add(SUFFIX)


def _policy_input() -> Any:
    return io.Combo.Input(
        "policy",
        options=folder_paths.get_filename_list(FOLDER) or [NO_POLICY],
        tooltip="A policy file in models/ertacache, made by ERTACache Calibrate or by the command "
        "ertacache calibrate.",
    )


def _speedup_input() -> Any:
    return io.Float.Input(
        "speedup",
        default=2.0,
        min=1.0,
        max=10.0,
        step=0.1,
        tooltip="Steps over computed steps: 2 evaluates the network on half of the steps. 1 is the "
        "full run.",
    )


def _load(name: str) -> Policy:
    if name == NO_POLICY:
        raise PolicyError("there is no policy yet: run ERTACache Calibrate once")
    path = folder_paths.get_full_path(FOLDER, name)
    if path is None:
        raise PolicyError(f"models/{FOLDER} has no {name!r}: press R to refresh the list")
    return Policy.load(path)


def _changed(name: str | None) -> float:
    """When a policy file was written, so that a new file of the same name is read anew."""
    path = folder_paths.get_full_path(FOLDER, name) if name else None
    return math.nan if path is None else Path(path).stat().st_mtime


class ERTACacheSampler(io.ComfyNode):
    """Policy and speed-up in, SAMPLER out."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node, as ComfyUI shows it."""
        return io.Schema(
            node_id="ERTACacheSampler",
            display_name="ERTACache Sampler",
            category=CATEGORY,
            description="A sampler that evaluates the network on fewer steps, with nearly the same "
            "result. For SamplerCustomAdvanced and SamplerCustom.",
            inputs=[
                _policy_input(),
                _speedup_input(),
                io.Sampler.Input(
                    "sampler",
                    optional=True,
                    tooltip="The sampler whose result is wanted; euler if none is connected. It "
                    "must be deterministic.",
                ),
            ],
            outputs=[io.Sampler.Output()],
        )

    @classmethod
    def execute(cls, policy: str, speedup: float, sampler: Any = None) -> Any:
        """Make the sampler."""
        base = comfy.samplers.sampler_object("euler") if sampler is None else sampler
        return io.NodeOutput(accelerate(_load(policy), base, speedup))

    @classmethod
    def fingerprint_inputs(cls, policy: str | None = None, **others: Any) -> float:
        """Whether the file changed."""
        return _changed(policy)


class ERTACacheModel(io.ComfyNode):
    """MODEL in, MODEL out, for KSampler."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node, as ComfyUI shows it."""
        return io.Schema(
            node_id="ERTACacheModel",
            display_name="ERTACache Model",
            category=CATEGORY,
            description="Makes KSampler evaluate the network on fewer steps, with nearly the same "
            "result. A sampler that adds noise is left alone, and the log says so.",
            inputs=[io.Model.Input("model"), _policy_input(), _speedup_input()],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: Any, policy: str, speedup: float) -> Any:
        """Put the wrapper on a clone of the model."""
        patched = model.clone()
        kind = comfy.patcher_extension.WrappersMP.OUTER_SAMPLE
        patched.remove_wrappers_with_key(kind, FOLDER)
        patched.add_wrapper_with_key(kind, FOLDER, take_over(_load(policy), speedup))
        return io.NodeOutput(patched)

    @classmethod
    def fingerprint_inputs(cls, policy: str | None = None, **others: Any) -> float:
        """Whether the file changed."""
        return _changed(policy)


class ERTACacheCalibrate(io.ComfyNode):
    """Model, prompts, sigmas and sampler in, policy file out."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node, as ComfyUI shows it."""
        return io.Schema(
            node_id="ERTACacheCalibrate",
            display_name="ERTACache Calibrate",
            category=CATEGORY,
            description="Runs the prompts in full once and fits a policy to them, for every "
            "speed-up. It may be cancelled; the next run continues.",
            is_input_list=True,
            is_output_node=True,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input(
                    "positive",
                    tooltip="The prompts: every conditioning, every entry of a combined one and "
                    "every row of a batch is one. 8 to 32 are good.",
                ),
                io.Sampler.Input("sampler", tooltip="The deterministic sampler of the full runs."),
                io.Sigmas.Input("sigmas"),
                io.Latent.Input("latent_image", tooltip="Gives the size; a part of it for video."),
                io.Float.Input("cfg", default=1.0, min=0.0, max=100.0, step=0.1),
                io.Int.Input("seed", default=0, min=0, max=2**32 - 1),
                io.String.Input(
                    "speedups",
                    default="2, 3",
                    tooltip="Speed-ups to refit and measure; all others are solved when needed.",
                ),
                io.String.Input("name", default="my-model", tooltip="Name of the policy file."),
                io.Boolean.Input("overwrite", default=False),
                io.Conditioning.Input("negative", optional=True, tooltip="Needed if cfg is not 1."),
                io.Vae.Input("vae", optional=True, tooltip="Measures PSNR on decoded images."),
            ],
            outputs=[
                io.Combo.Output("policy", display_name="policy"),
                io.String.Output("report", display_name="report"),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: list[Any],
        positive: list[Any],
        sampler: list[Any],
        sigmas: list[Any],
        latent_image: list[Any],
        cfg: list[float],
        seed: list[int],
        speedups: list[str],
        name: list[str],
        overwrite: list[bool],
        negative: list[Any] | None = None,
        vae: list[Any] | None = None,
    ) -> Any:
        """Calibrate, and save the policy."""
        file = _file_of(name[0], overwrite=overwrite[0])
        request = Request(
            model=model[0],
            positive=split_conditioning(positive),
            negative=[entry for part in negative or [] for entry in part],
            cfg=cfg[0],
            sampler=sampler[0],
            sigmas=sigmas[0],
            latent=latent_image[0],
            vae=None if vae is None else vae[0],
            speedups=_numbers(speedups[0]),
            seed=seed[0],
        )
        profile = file.with_name(f"{file.stem}-{request.digest()}.profile")
        policy = calibrate(request, profile)
        policy.save(file)
        profile.unlink(missing_ok=True)
        report = describe(policy)
        return io.NodeOutput(file.name, report, ui=ui.PreviewText(report))


def _file_of(name: str, *, overwrite: bool) -> Path:
    stem = name.strip().removesuffix(SUFFIX)
    if not re.fullmatch(r"[\w][\w .+-]*", stem):
        raise PolicyError(
            f"{name!r} cannot be the name of a policy: use letters, digits, spaces, '.', '-', '_'"
        )
    file = Path(folder_paths.get_folder_paths(FOLDER)[0]) / f"{stem}{SUFFIX}"
    if file.exists() and not overwrite:
        raise PolicyError(
            f"models/{FOLDER}/{file.name} exists: choose another name, or switch overwrite on"
        )
    return file


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise PolicyError(f"speedups must be numbers such as '2, 3', got {text!r}") from None


class ERTACacheInfo(io.ComfyNode):
    """Policy in, IMAGE and text out."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node, as ComfyUI shows it."""
        return io.Schema(
            node_id="ERTACacheInfo",
            display_name="ERTACache Info",
            category=CATEGORY,
            description="What a policy holds: PSNR to the full run by computed steps, and which "
            "steps are computed.",
            is_output_node=True,
            inputs=[_policy_input()],
            outputs=[io.Image.Output(), io.String.Output("report", display_name="report")],
        )

    @classmethod
    def execute(cls, policy: str) -> Any:
        """Draw and describe the policy."""
        found = _load(policy)
        image = draw(found)
        return io.NodeOutput(image, describe(found), ui=ui.PreviewImage(image, cls=cls))

    @classmethod
    def fingerprint_inputs(cls, policy: str | None = None, **others: Any) -> float:
        """Whether the file changed."""
        return _changed(policy)


class ERTACachePrompts(io.ComfyNode):
    """CLIP and lines of text in, one conditioning per line out."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node, as ComfyUI shows it."""
        return io.Schema(
            node_id="ERTACachePrompts",
            display_name="ERTACache Prompts",
            category=CATEGORY,
            description="Encodes one prompt per line, for ERTACache Calibrate.",
            inputs=[io.Clip.Input("clip"), io.String.Input("prompts", multiline=True)],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, clip: Any, prompts: str) -> Any:
        """Encode every line that is not empty."""
        found = []
        for line in filter(None, map(str.strip, prompts.splitlines())):
            encoded = clip.encode_from_tokens_scheduled(clip.tokenize(line))
            found += [[tensor, options | {PROMPT_KEY: line}] for tensor, options in encoded]
        return io.NodeOutput(found)


class ERTACacheDemoModel(io.ComfyNode):
    """The bundled emoji-flux."""

    @classmethod
    def define_schema(cls) -> Any:
        """The node, as ComfyUI shows it."""
        return io.Schema(
            node_id="ERTACacheDemoModel",
            display_name="ERTACache Demo Model",
            category=CATEGORY,
            description="emoji-flux, a small model of Flux's architecture that runs on a CPU: "
            "64 x 64 pixels, cfg 2, 30 steps.",
            inputs=[],
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output()],
        )

    @classmethod
    def execute(cls) -> Any:
        """Load it."""
        return io.NodeOutput(*load_demo())


NODES = [
    ERTACacheSampler,
    ERTACacheModel,
    ERTACacheCalibrate,
    ERTACacheInfo,
    ERTACachePrompts,
    ERTACacheDemoModel,
]
