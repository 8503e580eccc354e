"""Calibrate a MODEL of ComfyUI: full runs, refit and validation by ``ertacache.calibrate``.

All of it happens inside one call of a guider, as if it were one sampler: ComfyUI loads the model
and its conditioning once, and may be interrupted at every evaluation of the network.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import torch
from torch import Tensor

import ertacache
from ertacache import Policy, PolicyError
from ertacache.calibration.session import Progress
from ertacache.calibration.sharing import first_numbers
from ertacache.integration.loops import Loop
from ertacache.integration.sample import denoise_of

from .sampling import MODEL_KEY, base_function, prediction_of

__all__ = ["PROMPT_KEY", "Request", "calibrate", "split_conditioning"]

PROMPT_KEY = "ertacache_prompt"
"""Entry of a conditioning: the text that it was made of."""

# What restricts a conditioning to a part of an image or of a run.
_PARTIAL = ("area", "mask", "start_percent", "end_percent", "timestep_start", "timestep_end")


@dataclass(frozen=True)
class Request:
    """What to calibrate.

    Attributes:
        model: the MODEL.
        positive: one conditioning per prompt, as ``split_conditioning`` returns them.
        negative: the negative conditioning; empty if there is none.
        cfg: guidance scale.
        sampler: the SAMPLER of full runs.
        sigmas: the SIGMAS.
        latent: the LATENT that runs begin with.
        vae: decodes latents to measure PSNR on images; None measures it on latents.
        speedups: to refit; all others are solved when needed.
        seed: of the first prompt's noise.
    """

    model: Any
    positive: Sequence[tuple[str, list[Any]]]
    negative: list[Any]
    cfg: float
    sampler: Any
    sigmas: Tensor
    latent: dict[str, Any]
    vae: Any
    speedups: Sequence[float]
    seed: int

    def check(self) -> None:
        """Raise for what cannot be calibrated, before anything is run."""
        base_function(self.sampler)
        if len(self.positive) < 2:
            raise PolicyError("connect at least two prompts; 8 to 32 are better")
        if self.cfg != 1.0 and not self.negative:
            raise PolicyError("cfg is not 1: connect a negative conditioning, or set cfg to 1")
        if self.latent.get("noise_mask") is not None:
            raise PolicyError(
                "the latent has a mask: calibrate without one; the policy works with masks"
            )
        if len(self.sigmas) < 3:
            raise PolicyError("the sigmas have less than two steps: nothing could be reused")

    def digest(self) -> str:
        """Short name of everything that full runs depend on, but the prompts."""
        facts = [
            type(self.model.model).__name__,
            getattr(base_function(self.sampler), "__name__", ""),
            sorted(self.sampler.extra_options.items()),
            self.sigmas.tolist(),
            self.cfg,
            self.seed,
            [tuple(part.shape) for part in _parts(self.latent["samples"])],
            _weights_of(self.model),
            [_conditioning_facts(entry) for _, entry in self.positive],
            [_conditioning_facts(entry) for entry in self.negative],
        ]
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


def _weights_of(model: Any) -> list[object]:
    """What tells checkpoints and LoRAs of one class of models apart."""
    weights = model.model.diffusion_model.named_parameters()
    first = [(name, first_numbers(values)) for name, values in weights]
    patches = sorted((key, len(found)) for key, found in model.patches.items())
    # The id of patches is made anew for every LoRA that is loaded, and for no other reason.
    return [first, patches, str(getattr(model, "patches_uuid", "")) if patches else ""]


def _conditioning_facts(entry: Sequence[Any]) -> list[object]:
    """A conditioning by its numbers and by the plain values beside them, such as guidance."""
    tensor, options = entry
    plain = {k: v for k, v in options.items() if isinstance(v, str | int | float | bool)}
    tensors = {k: _name(v) for k, v in options.items() if isinstance(v, Tensor)}
    return [_name(tensor), sorted(plain.items()), sorted(tensors.items())]


def split_conditioning(found: Sequence[list[Any]]) -> list[tuple[str, list[Any]]]:
    """One named conditioning per prompt: of every conditioning, entry and row of a batch.

    Raises:
        PolicyError: if one is for a part of the image or of the run.
    """
    prompts: list[tuple[str, list[Any]]] = []
    for tensor, options in (entry for conditioning in found for entry in conditioning):
        partial_ = [name for name in _PARTIAL if name in options]
        if partial_:
            raise PolicyError(
                f"a conditioning has {partial_[0]}: calibrate with prompts for the whole image "
                "and the whole run; the policy works with the others"
            )
        for row in range(len(tensor)):
            own = {name: _row(value, row, len(tensor)) for name, value in options.items()}
            name = own.get(PROMPT_KEY) or _name(tensor[row])
            prompts.append((name, [tensor[row : row + 1], own]))
    names = [name for name, _ in prompts]
    return [prompt for k, prompt in enumerate(prompts) if names[k] not in names[:k]]


def _row(value: Any, row: int, rows: int) -> Any:
    batched = isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
    return value[row : row + 1] if batched else value


def _name(conditioning: Tensor) -> str:
    data = conditioning.detach().float().cpu().numpy().tobytes()
    return f"conditioning {hashlib.sha256(data).hexdigest()[:12]}"


def calibrate(request: Request, profile: Path) -> Policy:
    """Calibrate; ``profile`` keeps finished runs, so that an interrupted one is continued."""
    request.check()
    guider = comfy.samplers.CFGGuider(request.model)
    guider.set_conds([entry for _, entry in request.positive], request.negative)
    guider.set_cfg(request.cfg)
    latent, work = _first_latent(request), _Work(request, profile)
    # Noise is drawn for every run anew; only its shape matters here.
    guider.sample(latent * 0, latent, work, request.sigmas, disable_pbar=True, seed=request.seed)
    assert work.policy is not None
    return work.policy


class _Work(comfy.samplers.Sampler):
    """The calibration, in the form of a SAMPLER."""

    def __init__(self, request: Request, profile: Path) -> None:
        self._request, self._profile = request, profile
        self.policy: Policy | None = None

    def sample(
        self,
        guider: Any,
        sigmas: Tensor,
        extra_args: dict[str, Any],
        callback: Any,
        noise: Tensor,
        latent_image: Tensor | None = None,
        denoise_mask: Tensor | None = None,
        disable_pbar: bool = False,
    ) -> Tensor:
        """Calibrate, and return nothing of use as a latent."""
        request = self._request
        model = comfy.samplers.KSamplerX0Inpaint(guider, sigmas)
        model.latent_image, model.noise = latent_image, noise
        sampling = guider.inner_model.model_sampling
        loop = Loop(
            _conditioned(guider, model, extra_args, request),
            sigmas.cpu().clone(),
            self._start(sampling, sigmas, noise, latent_image, self.max_denoise(guider, sigmas)),
            sampler=partial(base_function(request.sampler), **request.sampler.extra_options),
            like=model,
            decode=_decoder(guider, request.vae, sampling, sigmas),
            prediction=prediction_of(sampling),
        )
        self.policy = ertacache.calibrate(
            loop,
            [name for name, _ in request.positive],
            speedup=list(request.speedups),
            seed=request.seed,
            profile_path=self._profile,
            provenance={MODEL_KEY: type(guider.inner_model).__name__},
            stage=_Bar(),
            cfg=request.cfg,
        )
        return noise

    @staticmethod
    def _start(
        sampling: Any, sigmas: Tensor, noise: Tensor, latent: Tensor | None, from_noise: bool
    ) -> Callable[[torch.Generator], Tensor]:
        """Draws the latent that a run begins with."""

        def draw(generator: torch.Generator) -> Tensor:
            fresh = torch.randn(noise.shape, generator=generator).to(noise)
            start: Tensor = sampling.noise_scaling(sigmas[0], fresh, latent, from_noise)
            return start[0].cpu()

        return draw


def _conditioned(
    guider: Any, model: Any, extra_args: dict[str, Any], request: Request
) -> Callable[..., Callable[[Tensor, Tensor], Tensor]]:
    """Velocities of the guider with the conditioning of one prompt at a time."""
    conds, device = guider.conds, guider.model_patcher.load_device
    places = {name: place for place, (name, _) in enumerate(request.positive)}
    velocity = denoise_of(model, **(extra_args | {"denoise_mask": None}))

    def denoise_for(prompt: str, cfg: float) -> Callable[[Tensor, Tensor], Tensor]:
        own = conds | {"positive": [conds["positive"][places[prompt]]]}

        def denoise(sample: Tensor, sigma: Tensor) -> Tensor:
            comfy.model_management.throw_exception_if_processing_interrupted()
            guider.conds = own
            return velocity(sample.to(device), sigma.to(device)).to(sample.device)

        return denoise

    return denoise_for


def _decoder(
    guider: Any, vae: Any, sampling: Any, sigmas: Tensor
) -> Callable[[Tensor], Tensor] | None:
    """Images of latents; None without a VAE."""
    if vae is None:
        return None

    def decode(latents: Tensor) -> Tensor:
        # Runs end on the CPU, and ComfyUI has the sigmas on the device of the model.
        scaled = sampling.inverse_noise_scaling(sigmas[-1].to(latents), latents)
        images: Tensor = vae.decode(guider.inner_model.process_latent_out(scaled.float()))
        # To decode, ComfyUI may have unloaded the model that the next run needs.
        comfy.model_management.load_models_gpu([guider.model_patcher])
        return images.movedim(-1, -3)  # channels before height and width, as diffusers has them

    return decode


class _Bar:
    """The progress bar of the node, one stage after the other."""

    def __call__(self, stage: str) -> Progress:
        bar: list[Any] = []

        def progress(done: int, total: int) -> None:
            if not bar:
                bar.append(comfy.utils.ProgressBar(total))
            bar[0].update_absolute(done, total)

        return progress


def _parts(samples: Any) -> list[Tensor]:
    return list(samples.unbind()) if samples.is_nested else [samples]


def _first_latent(request: Request) -> Any:
    """The first latent of a batch, with the channels of the model; nested ones keep their parts."""
    latent = request.latent
    sizes = [latent.get(f"downscale_ratio_{kind}") for kind in ("spacial", "temporal")]
    fixed = comfy.sample.fix_empty_latent_channels(request.model, latent["samples"], *sizes)
    return fixed[:1]
