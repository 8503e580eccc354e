"""The table of bundled models, and how one is loaded.

A new model is a row here and a folder of weights beside this file. Importing this module loads
neither torch nor diffusers. Knows nothing of profiles, policies, or how the models were trained.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["MODELS", "Model", "UnknownModelError", "load_pipeline", "load_prompts"]

_HERE = Path(__file__).parent
_SPLITS = ("calibration", "heldout")
_INDEX = "model_index.json"
_OPENSORA = "OpenSoraPipeline"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


class UnknownModelError(ValueError):
    """Raised for a name that is no bundled model, no pipeline folder and no hub id."""


@dataclass(frozen=True)
class Model:
    """One bundled model and the call that it was trained for.

    Attributes:
        name: What `load_pipeline` takes.
        family: Architecture of the denoiser.
        pipeline: Name of the diffusers class.
        num_inference_steps: Steps of a full run.
        guidance: Guidance scale; ``None`` where the network runs once per step.
        guidance_argument: What the pipeline calls it.
        size: Height and width in pixels.
        num_frames: Frames of a video; ``None`` for images.
        extra: Further arguments that the pipeline has to be called with.
    """

    name: str
    family: str
    pipeline: str
    num_inference_steps: int
    guidance: float | None
    size: tuple[int, int]
    num_frames: int | None = None
    guidance_argument: str = "guidance_scale"
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def folder(self) -> Path:
        """The complete pipeline, as `DiffusionPipeline.from_pretrained` takes it."""
        return _HERE / "weights" / self.name

    @property
    def call_arguments(self) -> dict[str, Any]:
        """Keyword arguments of a full run, all but the prompt and the generator.

        Example:
            >>> MODELS["emoji-flux"].call_arguments["num_inference_steps"]
            30
        """
        height, width = self.size
        arguments: dict[str, Any] = {
            "num_inference_steps": self.num_inference_steps,
            "height": height,
            "width": width,
        }
        if self.guidance is not None:
            arguments[self.guidance_argument] = self.guidance
        if self.num_frames is not None:
            arguments["num_frames"] = self.num_frames
        return arguments | dict(self.extra)

    def prompts_file(self, split: str) -> Path:
        """The text file of a split, one prompt per line."""
        if split not in _SPLITS:
            raise ValueError(f"unknown split {split!r}; use one of {', '.join(_SPLITS)}")
        return _HERE / "prompts" / f"{self.name}-{split}.txt"


_ROWS = (
    Model(
        name="emoji-flux",
        family="flux",
        pipeline="FluxPipeline",
        num_inference_steps=30,
        guidance=2.0,
        size=(64, 64),
        guidance_argument="true_cfg_scale",
        extra=MappingProxyType({"max_sequence_length": 16, "negative_prompt": ""}),
    ),
    Model(
        name="emoji-wan",
        family="wan",
        pipeline="WanPipeline",
        num_inference_steps=50,
        guidance=5.0,
        size=(32, 32),
        num_frames=17,
        extra=MappingProxyType({"max_sequence_length": 16}),
    ),
    Model(
        name="emoji-cogvideox",
        family="cogvideox",
        pipeline="CogVideoXPipeline",
        num_inference_steps=50,
        guidance=6.0,
        size=(32, 32),
        num_frames=17,
        extra=MappingProxyType({"max_sequence_length": 16}),
    ),
    Model(
        name="emoji-opensora",
        family="opensora",
        pipeline="OpenSoraPipeline",
        num_inference_steps=30,
        guidance=7.0,
        size=(32, 32),
        num_frames=17,
    ),
)

MODELS: Mapping[str, Model] = MappingProxyType({row.name: row for row in _ROWS})


def _bundled(name: str) -> Model:
    if name not in MODELS:
        raise UnknownModelError(f"{name!r} is not a bundled model; there are: {', '.join(MODELS)}")
    return MODELS[name]


def load_pipeline(model: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Any:
    """Load a pipeline on the CPU, without a progress bar.

    Args:
        model: A bundled name, a folder that holds a pipeline, or a hub id such as
            ``owner/name``. Only a hub id may use the network.
        dtype: Precision of the weights; ``torch.float32`` if not given.

    Returns:
        A `diffusers.DiffusionPipeline`.

    Raises:
        UnknownModelError: The model is none of the three.
    """
    source, local = _locate(os.fspath(model))
    import torch

    load: Callable[..., Any] = _pipeline_class(source, local).from_pretrained
    precision = torch.float32 if dtype is None else dtype
    pipe = load(source, dtype=precision, local_files_only=local)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _pipeline_class(source: str, local: bool) -> Any:
    """What loads a pipeline: diffusers, but for the one pipeline that it does not have."""
    if local and json.loads((Path(source) / _INDEX).read_text()).get("_class_name") == _OPENSORA:
        from ertacache.models.opensora import OpenSoraPipeline

        return OpenSoraPipeline
    from diffusers import DiffusionPipeline

    return DiffusionPipeline


def _locate(model: str) -> tuple[str, bool]:
    """What to hand to diffusers, and whether it is on this disk."""
    if model in MODELS:
        return str(MODELS[model].folder), True
    if (Path(model) / _INDEX).is_file():
        return model, True
    if _HUB_ID.fullmatch(model) and not Path(model).exists():
        return model, False
    raise UnknownModelError(
        f"cannot load {model!r}: not a bundled model ({', '.join(MODELS)}), not a folder with a "
        "model_index.json, and not a hub id of the form owner/name"
    )


def load_prompts(name: str, split: str) -> list[str]:
    """The prompts of a bundled model.

    Args:
        name: A bundled model.
        split: ``"calibration"`` (64 prompts, like those of the training) or ``"heldout"`` (128
            prompts, each with a subject and a background that were never seen together).

    Example:
        >>> [len(load_prompts("emoji-flux", split)) for split in ("calibration", "heldout")]
        [64, 128]
    """
    return _bundled(name).prompts_file(split).read_text(encoding="utf-8").splitlines()
