"""Open-Sora 1.2 as a diffusers pipeline that loads the published weights.

``OpenSoraPipeline.from_original`` reads the published files, ``save_pretrained`` writes a folder,
``OpenSoraPipeline.from_pretrained`` reads it. Plain ``DiffusionPipeline.from_pretrained`` cannot:
diffusers does not have the class. Names are resolved on first use, so that importing the package
loads neither torch nor diffusers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ertacache.models.opensora.pipeline import OpenSoraPipeline, OpenSoraPipelineOutput
    from ertacache.models.opensora.prompts import add_scores, clean_prompt
    from ertacache.models.opensora.scheduler import RFlowScheduler
    from ertacache.models.opensora.sizes import frame_size
    from ertacache.models.opensora.transformer import OpenSoraTransformer3DModel
    from ertacache.models.opensora.vae import AutoencoderKLOpenSora

__all__ = [
    "AutoencoderKLOpenSora",
    "OpenSoraPipeline",
    "OpenSoraPipelineOutput",
    "OpenSoraTransformer3DModel",
    "RFlowScheduler",
    "add_scores",
    "clean_prompt",
    "frame_size",
]

_MODULES = {
    "AutoencoderKLOpenSora": "vae",
    "OpenSoraPipeline": "pipeline",
    "OpenSoraPipelineOutput": "pipeline",
    "OpenSoraTransformer3DModel": "transformer",
    "RFlowScheduler": "scheduler",
    "add_scores": "prompts",
    "clean_prompt": "prompts",
    "frame_size": "sizes",
}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
