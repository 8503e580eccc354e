"""Small stand-ins for the parts of ComfyUI that the node pack uses, and the pack loaded on them.

The network is a formula. What really happens in ComfyUI is tested in ``live``.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core import samplers

PACK = Path(__file__).parents[2] / "comfyui"
SHAPE = (1, 4, 6, 6)


class KSampler:
    """``comfy.samplers.KSAMPLER``."""

    def __init__(self, function: Any, extra_options: Any = None, inpaint_options: Any = None):
        self.sampler_function = function
        self.extra_options = extra_options or {}
        self.inpaint_options = inpaint_options or {}


class Sampler:
    """``comfy.samplers.Sampler``."""

    def max_denoise(self, guider: Any, sigmas: Tensor) -> bool:
        return True


class Flow:
    """A model sampling of a flow, and ``comfy.model_sampling.CONST``."""

    def noise_scaling(self, sigma: Tensor, noise: Tensor, latent: Tensor, begun: bool) -> Tensor:
        return sigma * noise + (1 - sigma) * latent

    def inverse_noise_scaling(self, sigma: Tensor, latent: Tensor) -> Tensor:
        return latent / (1 - sigma)


class Flux:
    """A model of ComfyUI."""

    def __init__(self) -> None:
        self.model_sampling: object = Flow()
        self.diffusion_model = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(self.diffusion_model.weight)
        torch.nn.init.zeros_(self.diffusion_model.bias)

    def scale_latent_inpaint(
        self, x: Tensor, sigma: Tensor, noise: Tensor, latent_image: Tensor
    ) -> Tensor:
        level = sigma.view(-1, 1, 1, 1)
        return level * noise + (1 - level) * latent_image

    def process_latent_out(self, latent: Tensor) -> Tensor:
        return latent


class Patcher:
    """A MODEL."""

    load_device = torch.device("cpu")

    def __init__(self) -> None:
        self.model = Flux()
        self.patches: dict[str, list[Any]] = {}
        self.wrappers: dict[tuple[str, str], Any] = {}

    def clone(self) -> Patcher:
        twin = Patcher()
        twin.wrappers = dict(self.wrappers)
        return twin

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers[kind, key] = wrapper

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.pop((kind, key), None)


class Guider:
    """``comfy.samplers.CFGGuider``; the data of a prompt lies around its number."""

    def __init__(self, patcher: Patcher) -> None:
        self.model_patcher, self.inner_model, self.calls = patcher, patcher.model, 0

    def set_conds(self, positive: Any, negative: Any) -> None:
        self.conds = {
            "positive": [options | {"level": float(tensor.mean())} for tensor, options in positive],
            "negative": negative,
        }

    def set_cfg(self, cfg: float) -> None:
        self.cfg = cfg

    def __call__(
        self, x: Tensor, sigma: Tensor, model_options: Any = None, seed: Any = None
    ) -> Any:
        self.calls += 1
        (cond,) = self.conds["positive"]
        return torch.tanh(2 * x) * (1 - 0.5 * sigma.view(-1, 1, 1, 1)) + cond["level"]

    def sample(
        self, noise: Tensor, latent: Tensor, sampler: Any, sigmas: Tensor, **options: Any
    ) -> Any:
        extra = {"model_options": {}, "seed": options.get("seed")}
        return sampler.sample(self, sigmas, extra, None, noise, latent, None, True)


class Inpaint:
    """``comfy.samplers.KSamplerX0Inpaint``."""

    def __init__(self, guider: Guider, sigmas: Tensor) -> None:
        self.inner_model, self.noise, self.latent_image = guider, torch.empty(0), torch.empty(0)

    def __call__(
        self, x: Tensor, sigma: Tensor, denoise_mask: Tensor | None, **options: Any
    ) -> Any:
        if denoise_mask is None:
            return self.inner_model(x, sigma, **options)
        original = self.inner_model.inner_model.scale_latent_inpaint(
            x, sigma, self.noise, self.latent_image
        )
        kept = x * denoise_mask + original * (1 - denoise_mask)
        found = self.inner_model(kept, sigma, **options)
        return found * denoise_mask + self.latent_image * (1 - denoise_mask)


class Interrupted(BaseException):
    """``comfy.model_management.InterruptProcessingException``."""


class Described(SimpleNamespace):
    """An input, an output or a schema."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(parts=parts, **named)


class Types:
    """``comfy_api.latest.io``: every type has inputs and outputs."""

    ComfyNode, Schema = object, Described

    class NodeOutput:
        def __init__(self, *results: Any, ui: Any = None) -> None:
            self.results, self.ui = results, ui

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(Input=Described, Output=Described)


def modules(folder: Path) -> dict[str, Any]:
    """The modules by name; ``folder`` is ComfyUI's models folder."""
    paths: dict[str, tuple[list[str], set[str]]] = {}

    def add(name: str, path: str) -> None:
        paths.setdefault(name, ([], set()))[0].append(path)

    def full_path(name: str, file: str) -> str | None:
        found = Path(paths[name][0][0]) / file
        return str(found) if found.is_file() else None

    def names(name: str) -> list[str]:
        return sorted(path.name for path in Path(paths[name][0][0]).glob("*.safetensors"))

    interruption = SimpleNamespace(after=10**9)

    def check() -> None:
        interruption.after -= 1
        if interruption.after < 0:
            raise Interrupted

    empty, loaded = SimpleNamespace(), list[Any]()
    parts = {
        "samplers": SimpleNamespace(
            KSAMPLER=KSampler,
            Sampler=Sampler,
            CFGGuider=Guider,
            KSamplerX0Inpaint=Inpaint,
            sampler_object=lambda name: KSampler(getattr(samplers, name)),
        ),
        "sample": SimpleNamespace(fix_empty_latent_channels=lambda model, latent, *sizes: latent),
        "model_sampling": SimpleNamespace(CONST=Flow),
        "model_management": SimpleNamespace(
            throw_exception_if_processing_interrupted=check,
            interruption=interruption,
            load_models_gpu=loaded.append,
            loaded=loaded,
        ),
        "utils": SimpleNamespace(
            ProgressBar=lambda total: SimpleNamespace(update_absolute=lambda done, all_: None)
        ),
        "patcher_extension": SimpleNamespace(WrappersMP=SimpleNamespace(OUTER_SAMPLE="outer")),
        "latent_formats": SimpleNamespace(LatentFormat=object),
        "model_detection": empty,
        "model_patcher": empty,
        "supported_models": empty,
    }
    ui = SimpleNamespace(PreviewText=Described, PreviewImage=Described)
    return {
        "comfy": SimpleNamespace(**parts),
        **{f"comfy.{name}": part for name, part in parts.items()},
        "comfy_api": SimpleNamespace(),
        "comfy_api.latest": SimpleNamespace(ComfyExtension=object, io=Types(), ui=ui),
        "folder_paths": SimpleNamespace(
            models_dir=str(folder),
            folder_names_and_paths=paths,
            add_model_folder_path=add,
            get_folder_paths=lambda name: paths[name][0],
            get_full_path=full_path,
            get_filename_list=names,
        ),
    }


def load_pack(monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModuleType:
    """The node pack on the stand-ins, with its folder registered; gone after the test."""
    for name, module in modules(folder).items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.split(".")[0] == "pack_under_test"]:
        monkeypatch.delitem(sys.modules, name)
    spec = importlib.util.spec_from_file_location(
        "pack_under_test", PACK / "__init__.py", submodule_search_locations=[str(PACK)]
    )
    assert spec is not None
    assert spec.loader is not None
    pack = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pack_under_test", pack)
    spec.loader.exec_module(pack)
    pack.nodes.register_folder()
    return pack
