"""Pipelines that users wrote: each works, or is refused before anything is profiled."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

import ertacache
from ertacache.calibration.rehearsal import rehearse
from ertacache.calibration.session import Session, number_runs
from ertacache.formats.fingerprint import UNKNOWN, UNKNOWN_HASH
from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.identity import fingerprint
from ertacache.metrics.image import to_image

STEPS = 8
PROMPTS = ["a cat", "a dog", "a red apple", "a blue car"]
RUN = number_runs(PROMPTS)[0]
QUICK: dict[str, Any] = {"compute_steps": 4, "num_inference_steps": STEPS}


class Network(nn.Module):
    """A smooth flow that depends on the prompt; it has no configuration."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            0.4 * torch.randn(width, width, generator=torch.Generator().manual_seed(1))
        )
        self.evaluated: list[int] = []  # batch sizes; copies of the network share it

    @property
    def calls(self) -> int:
        return len(self.evaluated)

    def velocity(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        self.evaluated.append(len(x))
        mixed = torch.einsum("bchw,cd->bdhw", x, self.weight)
        return torch.tanh(mixed * (1 + t / 1000) + text.view(-1, 1, 1, 1)) + 0.5 * x

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        return self.velocity(x, t, text)


class AnyArguments(Network):
    def forward(self, *args: Any) -> Tensor:
        return self.velocity(*args)


class TimeFirst(Network):
    def forward(self, t: Tensor, x: Tensor, text: Tensor) -> Tensor:  # type: ignore[override]
        return self.velocity(x, t, text)


class Engine(nn.Module):
    """A network outside of torch: no parameters, no configuration."""

    def __init__(self) -> None:
        super().__init__()
        self._inner = [Network()]  # in a list, so that torch does not see it

    def forward(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        return self._inner[0].velocity(x, t, text)


class Mine(DiffusionPipeline):
    """What somebody writes in an afternoon: a bare tensor, whatever output is asked for."""

    def __init__(self, transformer: nn.Module | None = None) -> None:
        super().__init__()
        self.register_modules(scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0))
        self.transformer = Network() if transformer is None else transformer
        self.calls = 0

    def encode(self, prompt: Any) -> Tensor:
        prompts = [prompt] if isinstance(prompt, str) else prompt
        return torch.tensor([len(p) / 10 for p in prompts])

    def evaluate(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
        return self.transformer(x, t, text)

    @torch.no_grad()
    def loop(self, prompt: Any, steps: int, generator: Any) -> Tensor:
        self.calls += 1
        text = self.encode(prompt)
        each = generator if isinstance(generator, list) else [generator] * len(text)
        x = torch.stack([torch.randn(3, 8, 8, generator=one) for one in each])
        self.scheduler.set_timesteps(steps)
        for t in self.scheduler.timesteps:
            x = self.scheduler.step(self.evaluate(x, t, text), t, x).prev_sample
        return x

    def __call__(
        self,
        prompt: Any,
        num_inference_steps: int = STEPS,
        generator: Any = None,
        output_type: str = "pil",
    ) -> Any:
        return torch.sigmoid(self.loop(prompt, num_inference_steps, generator))


def calibrated(pipe: Any, **changes: Any) -> Policy:
    policy = ertacache.calibrate(pipe, PROMPTS, **({"refit_prompts": 2} | QUICK | changes))
    (plan,) = policy.plans
    assert plan.measured is not None
    rows = {row.method: row.psnr for row in plan.validation}
    assert rows["policy"] > rows["plain reuse"]
    return policy


def test_a_call_that_returns_a_bare_tensor_and_ignores_the_output_type() -> None:
    """The latents are taken from the scheduler, and the error of the plan is that of latents."""
    pipe = Mine()
    policy = calibrated(pipe)
    (plan,) = policy.plans
    noise = torch.Generator().manual_seed(77)
    full = pipe.loop("a dog", STEPS, noise)
    with ertacache.attach(pipe, policy):
        fast = pipe.loop("a dog", STEPS, torch.Generator().manual_seed(77))
    assert plan.measured_error is not None
    ratio = (fast - full).square().mean().sqrt().item() / plan.measured_error
    assert 0.2 < ratio < 5


def test_a_call_without_an_output_type() -> None:
    class Plain(Mine):
        def __call__(  # type: ignore[override]
            self, prompt: Any, num_inference_steps: int = STEPS, generator: Any = None
        ) -> Any:
            return (torch.sigmoid(self.loop(prompt, num_inference_steps, generator)),)

    calibrated(Plain())


@pytest.mark.parametrize("known", ["np", "pil"])
def test_a_call_that_knows_no_tensors_as_output(known: str) -> None:
    class Images(Mine):
        def __call__(self, *args: Any, output_type: str = known, **more: Any) -> Any:
            if output_type not in (known, "latent"):
                raise ValueError(f"output_type must be {known!r} or 'latent'")
            images = super().__call__(*args, **more)
            if known == "np":
                return images.permute(0, 2, 3, 1).numpy()
            return {"images": [to_image(image) for image in images]}

    pipe = Images()
    session = Session(pipe, {"num_inference_steps": STEPS})
    assert rehearse(session, RUN, lockstep=True) == STEPS
    assert session.output_type == known
    calibrated(pipe)


def test_a_prompt_that_may_only_be_one_string() -> None:
    class One(Mine):
        def encode(self, prompt: Any) -> Tensor:
            return super().encode(prompt.strip())

    policy = calibrated(One())
    together = calibrated(Mine())
    torch.testing.assert_close(
        policy.plans[0].plan.coefficients,  # type: ignore[union-attr]
        together.plans[0].plan.coefficients,  # type: ignore[union-attr]
        rtol=1e-4,
        atol=1e-4,
    )
    pipe = One()
    with pytest.raises(ValueError, match=r"one prompt at a time \(AttributeError.*batch_size=1"):
        ertacache.calibrate(pipe, PROMPTS, batch_size=2, **QUICK)
    assert pipe.transformer.calls == 1


def test_a_list_of_prompts_that_is_taken_for_one() -> None:
    class Joined(Mine):
        def encode(self, prompt: Any) -> Tensor:
            return super().encode(str(prompt))

        @torch.no_grad()
        def loop(self, prompt: Any, steps: int, generator: Any) -> Tensor:
            one = generator[0] if isinstance(generator, list) else generator
            return super().loop(prompt, steps, one)

    session = Session(Joined())
    rehearse(session, RUN, lockstep=True)
    assert session.one_by_one
    calibrated(Joined())


def test_a_call_that_takes_no_list_of_generators() -> None:
    class Single(Mine):
        @torch.no_grad()
        def loop(self, prompt: Any, steps: int, generator: Any) -> Tensor:
            torch.randn(1, generator=generator)  # a list raises a TypeError
            return super().loop(prompt, steps, generator)

    calibrated(Single())


def test_a_forward_of_any_arguments() -> None:
    calibrated(Mine(AnyArguments()), refit_prompts=3)


def test_a_timestep_without_axes_as_the_first_argument() -> None:
    class First(Mine):
        def evaluate(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
            assert t.ndim == 0
            return self.transformer(t, x, text)

    calibrated(First(TimeFirst()), refit_prompts=3)


def test_a_network_without_a_configuration() -> None:
    """Its parameters tell it from another architecture."""
    policy = calibrated(Mine())
    assert ertacache.attach(Mine(), policy).policy is policy
    with pytest.raises(PolicyError, match="denoiser_hash is"):
        ertacache.attach(Mine(Network(width=4)), policy)


def test_a_network_without_torch_parameters() -> None:
    pipe = Mine(Engine())
    facts = fingerprint(pipe, latent_shape=(3, 8, 8), guidance={})
    assert (facts.denoiser, facts.denoiser_hash, facts.dtype) == ("Engine", UNKNOWN_HASH, UNKNOWN)
    policy = calibrated(pipe)
    with pytest.raises(PolicyError, match="denoiser is 'Network', was 'Engine'"):
        ertacache.attach(Mine(), policy)


def test_a_network_that_is_no_module() -> None:
    pipe = Mine()
    object.__setattr__(pipe, "transformer", numpy.zeros(3))
    for work in (ertacache.calibrate, ertacache.profile):
        with pytest.raises(TypeError, match=r"transformer of Mine is a ndarray.*nn.Module whose"):
            work(pipe, PROMPTS)
    assert pipe.calls == 0


@pytest.mark.parametrize("missing", ["generator", "num_inference_steps", "prompt"])
def test_a_call_that_lacks_an_argument(missing: str) -> None:
    calls: dict[str, Any] = {
        "generator": lambda self, prompt, num_inference_steps: None,
        "num_inference_steps": lambda self, prompt, generator: None,
        "prompt": lambda self, text, generator, num_inference_steps: None,
    }
    pipe = type("Lacking", (Mine,), {"__call__": calls[missing]})()
    with pytest.raises(ValueError, match=rf"Lacking.__call__ takes no {missing}, .*: add this arg"):
        ertacache.calibrate(pipe, PROMPTS)
    if missing != "num_inference_steps":
        with pytest.raises(ValueError, match=f"takes no {missing}"):
            ertacache.profile(pipe, PROMPTS)


def test_no_scheduler() -> None:
    pipe = Mine()
    pipe.scheduler = None
    with pytest.raises(TypeError, match="it needs a scheduler and one of transformer"):
        ertacache.calibrate(pipe, PROMPTS)


def test_a_loop_that_takes_its_own_steps() -> None:
    class Own(Mine):
        @torch.no_grad()
        def loop(self, prompt: Any, steps: int, generator: Any) -> Tensor:
            text, x = self.encode(prompt), torch.randn(1, 3, 8, 8, generator=generator)
            self.scheduler.set_timesteps(steps)
            for t in self.scheduler.timesteps:
                x = x - self.evaluate(x, t, text) / steps
            return x

    pipe = Own()
    with pytest.raises(PolicyError, match="never called the step of its scheduler"):
        ertacache.calibrate(pipe, PROMPTS)
    assert pipe.transformer.calls == 1


def test_a_loop_that_calls_the_forward_of_its_network() -> None:
    class Forward(Mine):
        def evaluate(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
            return type(self.transformer).forward(self.transformer, x, t, text)

    with pytest.raises(PolicyError, match="none of the pipeline's networks before it"):
        ertacache.calibrate(Forward(), PROMPTS)


def test_results_that_are_no_images() -> None:
    class Text(Mine):
        def __call__(self, *args: Any, **more: Any) -> Any:
            super().__call__(*args, **more)
            return "done"

    class Whole(Mine):
        def __call__(self, *args: Any, **more: Any) -> Any:
            return super().__call__(*args, **more)[0]

    for kind, message in ((Text, "a str that holds no images"), (Whole, r"of shape \(3, 8, 8\)")):
        pipe = kind()
        with pytest.raises(ValueError, match=message):
            ertacache.calibrate(pipe, PROMPTS)
        assert pipe.transformer.calls <= 3  # one for every output type that was tried


def test_results_that_are_latents() -> None:
    class Raw(Mine):
        def __call__(self, *args: Any, **more: Any) -> Any:
            return 20 * super().__call__(*args, **more) - 10

    with pytest.warns(UserWarning, match=r"values from -.* to .*: PSNR is measured as if"):
        ertacache.calibrate(Raw(), PROMPTS, refit=False, **QUICK)


def test_an_error_of_the_pipeline_itself() -> None:
    class Broken(Mine):
        def encode(self, prompt: Any) -> Tensor:
            raise ValueError("the text encoder is not there")

    with pytest.raises(ValueError, match="the text encoder is not there"):
        ertacache.calibrate(Broken(), PROMPTS)


def test_an_impossible_speedup_is_refused_before_the_profile() -> None:
    """Also without num_inference_steps in the call."""
    pipe = Mine()
    with pytest.raises(ValueError, match="speedup must be between 1 and 4, got 6"):
        ertacache.calibrate(pipe, PROMPTS, speedup=6)
    with pytest.raises(ValueError, match="cannot compute 9 of 8 steps"):
        ertacache.calibrate(pipe, PROMPTS, compute_steps=9)
    assert pipe.transformer.calls == 2  # a step each
    policy = calibrated(pipe)
    before = pipe.transformer.calls
    with pytest.raises(ValueError, match="cannot compute 8 of 8 steps"):
        ertacache.refit(pipe, policy, compute_steps=8)
    assert pipe.transformer.calls == before + 1


def test_validation_can_be_left_out() -> None:
    pipe = Mine()
    policy = ertacache.calibrate(pipe, PROMPTS, heldout=[], refit=False, **QUICK)
    assert policy.profile is not None
    assert policy.profile.num_runs == len(PROMPTS)
    assert policy.plans[0].validation == ()
    assert "validation 0" in policy.provenance["network calls"]
    assert pipe.transformer.calls == 1 + len(PROMPTS) * STEPS
    before = pipe.transformer.calls
    with pytest.raises(ValueError, match="min_psnr is measured on held-out prompts"):
        ertacache.calibrate(pipe, PROMPTS, heldout=[], min_psnr=40.0)
    assert pipe.transformer.calls == before


def test_evaluations_are_counted_with_the_rehearsal() -> None:
    pipe = Mine()
    policy = calibrated(pipe)
    total = int(policy.provenance["network calls"].split()[-1])
    rows = pipe.transformer.calls  # every call is of one prompt
    assert total == rows


def test_a_guidance_interval() -> None:
    """Calibrated with it, nothing is reported; with another, the interval is named."""

    class Interval(Mine):
        def __call__(  # type: ignore[override]
            self,
            prompt: Any,
            num_inference_steps: int = STEPS,
            generator: Any = None,
            output_type: str = "pil",
            guidance_interval: Sequence[float] = (0.2, 0.8),
        ) -> Any:
            self.interval = guidance_interval
            return torch.sigmoid(self.loop(prompt, num_inference_steps, generator))

        def evaluate(self, x: Tensor, t: Tensor, text: Tensor) -> Tensor:
            v = self.transformer(x, t, text)
            if self.interval[0] < t / 1000 < self.interval[1]:
                v = v + 0.5 * (v - self.transformer(x, t, 0 * text))
            return v

    pipe = Interval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy = calibrated(pipe)
        with ertacache.attach(pipe, policy) as handle:
            pipe("a cat")
            assert handle.stats.last.reused_steps == 4
    assert policy.fingerprint.guidance == {
        "guidance_interval[0]": (0.2,),
        "guidance_interval[1]": (0.8,),
    }
    named = r"guidance_interval\[1\] is 0\.9, was 0\.8"
    with ertacache.attach(pipe, policy), pytest.warns(UserWarning, match=named):
        pipe("a cat", guidance_interval=(0.2, 0.9))
