"""Open-Sora 1.2 as a diffusers pipeline that loads the published weights.

``OpenSoraPipeline.from_original`` takes the published files, ``save_pretrained`` writes a folder,
``OpenSoraPipeline.from_pretrained`` reads it. Plain ``DiffusionPipeline.from_pretrained`` looks for
the class in diffusers and does not find it. Names are resolved on first use, so that importing the
package loads neither torch nor diffusers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ertacache.models.opensora.output import OpenSoraPipelineOutput
    from ertacache.models.opensora.pipeline import OpenSoraPipeline
    from ertacache.models.opensora.prompts import add_scores, clean_prompt
    from ertacache.models.opensora.scheduler import RFlowScheduler
    from ertacache.models.opensora.sizes import picture_size
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
    "picture_size",
]

_HOMES = {
    "AutoencoderKLOpenSora": "vae",
    "OpenSoraPipeline": "pipeline",
    "OpenSoraPipelineOutput": "output",
    "OpenSoraTransformer3DModel": "transformer",
    "RFlowScheduler": "scheduler",
    "add_scores": "prompts",
    "clean_prompt": "prompts",
    "picture_size": "sizes",
}


def __getattr__(name: str) -> object:
    """Import the module that holds a public name (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(__all__)
