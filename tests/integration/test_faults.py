"""Exceptions at every touch of a run, one after another: the run after each is bit-equal.

Faults lie below what is attached (the scheduler's own methods, the inside of the network) and above
it (before and after the attached ones return), and between steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from ertacache.integration.schedulers import first_order_update
from tests.integration.sampling import DETERMINISTIC, Field, Sampling, make
from tests.integration.setting import make_setting, paper_plan, trajectory_plan

ENOUGH = 90  # touches of each of the five tests below, which are 300 and more together


class Broken(Exception):  # noqa: N818
    """What is thrown at the touches with even numbers; at the others a KeyboardInterrupt."""


class Faults:
    """Counts the touches of one kind, and throws at one of them."""

    def __init__(self) -> None:
        self.kind, self.at, self.count = "", -1, 0

    def arm(self, kind: str, at: int) -> None:
        self.kind, self.at, self.count = kind, at, 0

    def touch(self, kind: str) -> None:
        if kind != self.kind:
            return
        self.count += 1
        if self.count - 1 == self.at:
            raise Broken if self.at % 2 == 0 else KeyboardInterrupt

    def around(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.touch(f"before {name}")
            result = method(*args, **kwargs)
            self.touch(f"after {name}")
            return result

        return call


METHODS = ("set_timesteps", "step")
KINDS = [
    *(f"{when} own {name}" for name in METHODS for when in ("before", "after")),
    *(f"{when} attached {name}" for name in METHODS for when in ("before", "after")),
    "before network",
    "inside network",
    "after network",
    "between steps",
]


@contextmanager
def wrapped(faults: Faults, scheduler: Any, where: str) -> Iterator[None]:
    before = {name: vars(scheduler).get(name) for name in METHODS}
    for name in METHODS:
        setattr(scheduler, name, faults.around(getattr(scheduler, name), f"{where} {name}"))
    try:
        yield
    finally:
        for name, method in before.items():
            vars(scheduler).pop(name)
            if method is not None:
                setattr(scheduler, name, method)


@contextmanager
def faulty(pipe: Any, network: Any, inside: Any, policy: Policy) -> Iterator[Faults]:
    """The pipeline with a policy attached, and faults wherever they can be."""
    faults = Faults()
    hooks = [
        inside.register_forward_hook(lambda *_: faults.touch("inside network")),
        network.register_forward_pre_hook(lambda *_: faults.touch("before network")),
        network.register_forward_hook(lambda *_: faults.touch("after network")),
    ]
    scheduler = pipe.scheduler
    try:
        with (
            wrapped(faults, scheduler, "own"),
            attach(pipe, policy),
            wrapped(faults, scheduler, "attached"),
        ):
            yield faults
    finally:
        for hook in hooks:
            hook.remove()


def try_all(faults: Faults, generate: Callable[[], Tensor]) -> int:
    """Throw at every touch of every kind; returns how many there were."""
    expected, cases = generate(), 0
    for kind in KINDS:
        faults.arm(kind, -1)
        assert torch.equal(generate(), expected)
        for at in range(faults.count):
            faults.arm(kind, at)
            with pytest.raises((Broken, KeyboardInterrupt)):
                generate()
            faults.arm("", -1)
            assert torch.equal(generate(), expected), f"after a fault at {kind}, number {at}"
            cases += 1
    return cases


@contextmanager
def encoded_once(pipe: Any) -> Iterator[None]:
    """One prompt in all runs: its embeddings, without its encoders."""
    encode, known = pipe.encode_prompt, list[Any]()

    def encode_prompt(**kwargs: Any) -> Any:
        if not known:
            known.append(encode(**kwargs))
        return known[0]

    pipe.encode_prompt = encode_prompt
    yield
    del pipe.encode_prompt


@pytest.mark.parametrize(("name", "num_steps"), [("flux", 7), ("wan", 5)])
def test_pipelines(name: str, num_steps: int) -> None:
    """Runs that are just long enough for so many touches; Wan calls its network twice per step."""
    setting = make_setting(name, num_inference_steps=num_steps)
    pipe, network = setting.pipe, setting.pipe.transformer
    steps, cases = (0, 2, num_steps - 1), 0
    for policy in (setting.trajectory_policy(steps), setting.paper_policy(steps)):
        with encoded_once(pipe), faulty(pipe, network, network.proj_out, policy) as faults:

            def between(
                pipe: Any, step: int, timestep: Any, values: Any, faults: Faults = faults
            ) -> Any:
                faults.touch("between steps")
                return values

            cases += try_all(faults, lambda: setting.generate(callback_on_step_end=between))
        assert torch.equal(setting.generate(), setting.run.latents[-1])
    assert cases >= ENOUGH


class Nested(Field):
    """A network that has an inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        output: Tensor = self.inside(super().forward(x, t))
        return output


@pytest.mark.parametrize("name", list(DETERMINISTIC)[:3])
def test_schedulers(name: str) -> None:
    """Loops without a progress bar: their end is not seen, the next beginning is."""
    sampling = Sampling(make(name))
    sampling.unet = Nested()
    run, sigmas = sampling.record()
    steps = (0, 1, 4, 6, 9)
    plans = (
        trajectory_plan(first_order_update(sampling.scheduler), steps),
        paper_plan(sigmas, steps),
    )
    cases = 0
    for plan in plans:
        with faulty(sampling, sampling.unet, sampling.unet.inside, sampling.policy(plan)) as faults:
            cases += try_all(faults, sampling)
        assert torch.equal(sampling(), run.latents[-1])
    assert cases >= ENOUGH
