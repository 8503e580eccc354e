"""The bundled models, one row each, and how a pipeline is loaded.

Adding a model adds a row here and a folder of weights beside this file. Importing this module loads
neither torch nor diffusers.
"""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "MODELS",
    "Model",
    "UnknownModelError",
    "call_defaults",
    "is_hub_id",
    "load_pipeline",
    "load_prompts",
]

_HERE = Path(__file__).parent
_SPLITS = ("calibration", "heldout")
_INDEX = "model_index.json"
_DIFFUSERS = "diffusers:DiffusionPipeline"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


class UnknownModelError(ValueError):
    """Raised for a name that is neither a bundled model, nor a pipeline folder, nor a hub id."""


@dataclass(frozen=True)
class Model:
    """One bundled model and the call that it was trained for.

    Attributes:
        name: What `load_pipeline` takes.
        pipeline: Name of the pipeline class, as in its ``model_index.json``.
        num_inference_steps: Steps of a full run.
        guidance: Guidance scale; ``None`` without guidance.
        size: Height and width in pixels.
        num_frames: Frames of a video; ``None`` for images.
        guidance_argument: Name of the pipeline's argument for the guidance scale.
        extra: Further arguments of the pipeline.
        loader: Class whose ``from_pretrained`` loads the pipeline, as ``module:class``. It is
            imported on first use.
    """

    name: str
    pipeline: str
    num_inference_steps: int
    guidance: float | None
    size: tuple[int, int]
    num_frames: int | None = None
    guidance_argument: str = "guidance_scale"
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    loader: str = _DIFFUSERS

    @property
    def folder(self) -> Path:
        """The complete pipeline, as `DiffusionPipeline.from_pretrained` takes it."""
        return _HERE / "weights" / self.name

    @property
    def call_arguments(self) -> dict[str, Any]:
        """Keyword arguments of a full run, without the prompt and the generator.

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
        pipeline="FluxPipeline",
        num_inference_steps=30,
        guidance=2.0,
        size=(64, 64),
        guidance_argument="true_cfg_scale",
        extra=MappingProxyType({"max_sequence_length": 16, "negative_prompt": ""}),
    ),
    Model(
        name="emoji-wan",
        pipeline="WanPipeline",
        num_inference_steps=50,
        guidance=5.0,
        size=(32, 32),
        num_frames=17,
        extra=MappingProxyType({"max_sequence_length": 16}),
    ),
    Model(
        name="emoji-cogvideox",
        pipeline="CogVideoXPipeline",
        num_inference_steps=50,
        guidance=6.0,
        size=(32, 32),
        num_frames=17,
        extra=MappingProxyType({"max_sequence_length": 16}),
    ),
    Model(
        name="emoji-opensora",
        pipeline="OpenSoraPipeline",
        num_inference_steps=30,
        guidance=7.0,
        size=(32, 32),
        num_frames=17,
        loader="ertacache.models.opensora:OpenSoraPipeline",
    ),
)

MODELS: Mapping[str, Model] = MappingProxyType({row.name: row for row in _ROWS})


def _bundled(name: str) -> Model:
    if name not in MODELS:
        raise UnknownModelError(f"{name!r} is not a bundled model; there are: {', '.join(MODELS)}")
    return MODELS[name]


def load_pipeline(model: str | os.PathLike[str], dtype: torch.dtype | None = None) -> Any:
    """Load a pipeline on the CPU, without a progress bar.

    A bundled model is called with the size, steps and guidance that it was trained for, unless the
    call gives others. Loading it prints nothing.

    Args:
        model: A bundled name, a folder that holds a pipeline, or a hub id such as
            ``owner/name``. Only a hub id may use the network.
        dtype: Precision of the weights; ``torch.float32`` if not given.

    Returns:
        A `diffusers.DiffusionPipeline`.

    Raises:
        UnknownModelError: The model is none of the three.
    """
    name = os.fspath(model)
    source, local = _locate(name)
    import torch

    from ertacache.models.defaults import bind_defaults
    from ertacache.models.quiet import quiet_libraries

    with ExitStack() as quiet:
        quiet.enter_context(quiet_libraries())
        load: Callable[..., Any] = _loader(source, local).from_pretrained
        if name not in MODELS:
            quiet.close()  # a warning may be that weights are missing
        pipe = load(source, dtype=dtype or torch.float32, local_files_only=local)
    pipe.set_progress_bar_config(disable=True)
    if name in MODELS:
        bind_defaults(pipe, name, MODELS[name].call_arguments)
    return pipe


def _loader(source: str, local: bool) -> Any:
    """The loader of the row with the same pipeline class; that of diffusers if there is none."""
    loader = _DIFFUSERS
    if local:
        pipeline = _class_name(Path(source))
        loader = next((row.loader for row in _ROWS if row.pipeline == pipeline), _DIFFUSERS)
        if isinstance(pipeline, str):  # imported here, and not while the weights are loaded
            getattr(import_module("diffusers"), pipeline, None)
    return pkgutil.resolve_name(loader)


def _class_name(folder: Path) -> Any:
    return json.loads((folder / _INDEX).read_text()).get("_class_name")


def call_defaults(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Defaults of the call of the pipeline in a folder, without loading it; none if it is unknown.

    Example:
        >>> call_defaults(MODELS["emoji-wan"].folder)["num_inference_steps"]
        50
    """
    name = _class_name(Path(folder))
    row = next((row for row in _ROWS if row.pipeline == name and row.loader != _DIFFUSERS), None)
    known = import_module("diffusers")
    kind = pkgutil.resolve_name(row.loader) if row else getattr(known, str(name), None)
    parameters = inspect.signature(kind.__call__).parameters.values() if kind is not None else ()
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def is_hub_id(model: str) -> bool:
    """Whether a model is found on the hub: neither bundled nor something on this machine."""
    named = _HUB_ID.fullmatch(model) is not None
    return named and model not in MODELS and not Path(model).exists()


def _locate(model: str) -> tuple[str, bool]:
    """The argument of ``from_pretrained``, and whether it is a local folder."""
    if model in MODELS:
        return str(MODELS[model].folder), True
    if (Path(model) / _INDEX).is_file():
        return model, True
    if is_hub_id(model):
        return model, False
    raise UnknownModelError(
        f"cannot load {model!r}: not a bundled model ({', '.join(MODELS)}), not a folder with a "
        "model_index.json, and not a hub id of the form owner/name"
    )


def load_prompts(name: str, split: str) -> list[str]:
    """The prompts of a bundled model.

    Args:
        name: A bundled model.
        split: ``"calibration"`` (64 prompts from the training distribution) or ``"heldout"`` (128
            prompts, each a combination of subject and background left out of the training).

    Example:
        >>> [len(load_prompts("emoji-flux", split)) for split in ("calibration", "heldout")]
        [64, 128]
    """
    return _bundled(name).prompts_file(split).read_text(encoding="utf-8").splitlines()
