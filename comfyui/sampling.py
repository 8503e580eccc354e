"""ComfyUI samplers that follow a policy.

A SAMPLER of ComfyUI is a function that calls the model once per step. ``ertacache.PolicySampler``
is such a function; here it gets what only ComfyUI knows: the kind of the model, masks, the log.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import comfy.model_sampling
import comfy.samplers
import torch
from torch import Tensor

from ertacache import Policy, PolicyError
from ertacache.formats.fingerprint import CFG, cfg_name
from ertacache.integration.choose import remember
from ertacache.integration.sample import PolicySampler, integrate_sampler, is_flow, read_run

__all__ = ["MODEL_KEY", "PolicyRun", "accelerate", "base_function", "prediction_of", "take_over"]

MODEL_KEY = "ComfyUI model"
"""Entry of a policy's provenance: ComfyUI's class of the model that it was calibrated for."""

_SAMPLERS = 8  # of one model whose plans are kept
_LOG = logging.getLogger("ertacache")


def accelerate(policy: Policy, sampler: Any, speedup: float) -> Any:
    """A SAMPLER that follows a policy in place of another SAMPLER.

    Raises:
        PolicyError: if the sampler is not one of ComfyUI's sampler functions.
    """
    base = base_function(sampler)
    if isinstance(base, PolicyRun):
        raise PolicyError("the sampler follows a policy already: connect the one before it")
    run = PolicyRun(policy, base, speedup)
    return comfy.samplers.KSAMPLER(run, sampler.extra_options, sampler.inpaint_options)


def take_over(policy: Policy, speedup: float) -> Callable[..., Any]:
    """What a MODEL does when a run starts: swap the sampler if it is deterministic.

    Otherwise the run is left alone, and the log says why. Plans are kept from run to run.
    """

    @functools.lru_cache(maxsize=_SAMPLERS)
    def follow(base: Callable[..., Tensor]) -> PolicyRun:
        return PolicyRun(policy, base, speedup, optional=True)

    def start(
        executor: Any, noise: Any, latent: Any, sampler: Any, *rest: Any, **named: Any
    ) -> Any:
        try:
            base = base_function(sampler)
        except PolicyError as reason:
            _LOG.warning("ERTACache leaves this run alone: %s", reason)
            return executor(noise, latent, sampler, *rest, **named)
        if not isinstance(base, PolicyRun):
            options = sampler.extra_options, sampler.inpaint_options
            sampler = comfy.samplers.KSAMPLER(follow(base), *options)
        return executor(noise, latent, sampler, *rest, **named)

    return start


def base_function(sampler: Any) -> Callable[..., Tensor]:
    """The function of a SAMPLER.

    Raises:
        PolicyError: if it has none.
    """
    function = getattr(sampler, "sampler_function", None)
    if function is None:
        raise PolicyError(
            f"a {type(sampler).__name__} is not a sampler function of ComfyUI: choose one with "
            "KSamplerSelect, such as euler, dpmpp_2m or uni_pc"
        )
    found: Callable[..., Tensor] = function
    return found


class PolicyRun:
    """The function of a SAMPLER that follows a policy."""

    def __init__(
        self, policy: Policy, base: Callable[..., Tensor], speedup: float, *, optional: bool = False
    ) -> None:
        """Keep how to run.

        Args:
            policy: the policy.
            base: the function of a full run.
            speedup: steps over computed steps.
            optional: whether a base that cannot be followed runs by itself.
        """
        self._policy, self._speedup, self._optional = policy, speedup, optional
        self._base = _Base(base)
        self._samplers: dict[str, PolicySampler] = {}
        self._followed: dict[object, bool] = {}

    def __call__(
        self,
        model: Any,
        x: Tensor,
        sigmas: Tensor,
        extra_args: dict[str, Any] | None = None,
        callback: Any = None,
        disable: bool | None = None,
        **options: Any,
    ) -> Tensor:
        """Sample; the arguments are those of every sampler function."""
        extra = extra_args or {}
        given = {"extra_args": extra, "callback": callback, "disable": disable, **options}
        sampling = model.inner_model.inner_model.model_sampling
        prediction = prediction_of(sampling)
        if self._optional and not self._can_follow(model, x, sigmas, prediction, extra, options):
            return self._base(model, x, sigmas, **given)
        self._check(model.inner_model, x)
        run = self._sampler(prediction)
        run.guidance = self._guidance(model.inner_model)
        levels = sigmas.clone()  # a base such as uni_pc writes to them, and ComfyUI keeps them
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            latent = run(model, x, levels, **given)
        for warning in caught:
            _LOG.warning("ERTACache: %s", warning.message)
        if run.plan is None:
            _LOG.info("ERTACache: every step was computed")
        else:
            _LOG.info("ERTACache: %d of %d steps computed", run.computed, run.plan.num_steps)
        last = self._base.last_sigma(sigmas)
        if run.plan is not None:
            latent = _keep_unmasked(model, latent, last, extra.get("denoise_mask"))
        # ComfyUI scales by the last sigma, which a base may have changed from 0.
        return latent if last == sigmas[-1] else sampling.inverse_noise_scaling(last, latent)

    def _sampler(self, prediction: str) -> PolicySampler:
        if prediction not in self._samplers:
            self._samplers[prediction] = PolicySampler(
                self._policy, self._base, speedup=self._speedup, prediction=prediction
            )
        return self._samplers[prediction]

    def _guidance(self, guider: Any) -> dict[str, float]:
        """The guidance of a run, under the name that the policy has for it."""
        name, scale = cfg_name(self._policy.fingerprint.guidance), getattr(guider, CFG, None)
        return {} if name is None or scale is None else {name: float(scale)}

    def _can_follow(
        self,
        model: Any,
        x: Tensor,
        sigmas: Tensor,
        prediction: str,
        extra: dict[str, Any],
        options: dict[str, Any],
    ) -> bool:
        """Whether the base is deterministic and linear; if not, log why."""
        key = _key(sigmas), prediction, x.ndim, repr(sorted(options.items()))
        if self._followed.get(key):
            return True
        integrate = integrate_sampler(self._base, like=model, extra_args=extra, **options)
        try:
            read_run(integrate, sigmas.clone(), flow=is_flow(prediction), sample=x)
        except PolicyError as reason:
            _LOG.warning("ERTACache leaves this run alone: %s", reason)
            return False
        remember(self._followed, key, True)
        return True

    def _check(self, guider: Any, x: Tensor) -> None:
        """Compare what only ComfyUI knows with what a policy says."""
        shape, known = tuple(x.shape[1:]), self._policy.fingerprint.latent_shape
        if x.ndim == 3 and x.shape[1] == 1 and shape != known:
            raise PolicyError(
                "latents of several parts, such as video and sound, are packed into one row: a "
                "policy for them serves the size that it was calibrated at; calibrate at this size"
            )
        was, now = self._policy.provenance.get(MODEL_KEY), type(guider.inner_model).__name__
        if was is not None and was != now:
            raise PolicyError(
                f"the policy was calibrated for {was}, but the model is {now}: choose the policy "
                "of this model, or calibrate one"
            )
        facts = self._policy.fingerprint
        for name, scale in self._guidance(guider).items():
            calibrated = replace(facts, guidance={CFG: facts.guidance[name]})
            for found in calibrated.compare(replace(facts, guidance={CFG: (scale,)})):
                _LOG.warning(
                    "ERTACache: the policy was calibrated under other conditions: %s; compare with "
                    "the full run, and calibrate with this cfg if it is worse than you like",
                    found,
                )


class _Base:
    """A sampler function that remembers which last sigma it left behind for which schedule.

    ComfyUI's uni_pc writes 0.001 in place of a final 0, and ComfyUI then scales the result by it.
    """

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self._function = function
        self._last: dict[tuple[float, ...], Tensor] = {}

    def __call__(self, model: Any, x: Tensor, sigmas: Tensor, **options: Any) -> Tensor:
        key = _key(sigmas)
        latent = self._function(model, x, sigmas, **options)
        self._last[key] = sigmas[-1].clone()
        return latent

    def last_sigma(self, sigmas: Tensor) -> Tensor:
        """The last sigma after a run on a schedule."""
        return self._last.get(_key(sigmas), sigmas[-1]).to(sigmas)


def _key(sigmas: Tensor) -> tuple[float, ...]:
    return tuple(sigmas.detach().cpu().double().tolist())


def prediction_of(sampling: Any) -> str:
    """What sigmas mean to a model: those of a flow, or the noise that is added to the data."""
    return "flow" if isinstance(sampling, comfy.model_sampling.CONST) else "epsilon"


def _keep_unmasked(model: Any, latent: Tensor, sigma: Tensor, mask: Tensor | None) -> Tensor:
    """Put the original where a mask forbids changes, at the noise level that was reached."""
    if mask is None:
        return latent
    level = sigma * torch.ones(len(latent), device=latent.device)
    original: Tensor = model.inner_model.inner_model.scale_latent_inpaint(
        x=latent, sigma=level, noise=model.noise, latent_image=model.latent_image
    )
    return latent * mask + original * (1 - mask)
