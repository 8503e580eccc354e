"""Begin a training with the weights of a smaller or earlier model.

What has the same name and shape is copied. Where a shape has grown, such as that of the first and
the last layer when latents get more channels, the old part is copied and the rest begins at zero,
so that the network at first does what it did. Knows nothing of any particular model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["graft", "graft_folder"]


@torch.no_grad()
def graft(module: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    """Copy weights into a module; return the names of those that have grown."""
    grown = []
    for name, taken in module.state_dict().items():
        old = weights.get(name)
        if old is None or old.ndim != taken.ndim:
            continue
        common = tuple(slice(min(sizes)) for sizes in zip(old.shape, taken.shape, strict=True))
        if old.shape != taken.shape:
            grown.append(name)
            taken.zero_()
        taken[common] = old[common].to(taken.dtype)
    return grown


def graft_folder(modules: nn.ModuleDict, folder: Path) -> list[str]:
    """Graft every module from its part of a diffusers folder; return what has grown."""
    found = []
    for name, module in modules.items():
        (path,) = (folder / name).glob("*.safetensors")
        found += [f"{name}.{grown}" for grown in graft(module, load_file(path))]
    return found
