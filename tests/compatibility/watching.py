"""Observation of a run: the network calls of each step, and what passed the scheduler."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

Calls = list[tuple[int, str]]
"""Step and name of the component, one pair per call."""


@dataclass(frozen=True)
class Seen:
    """Input and output of the scheduler at every step, and the calls of the networks."""

    samples: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)
    calls: Calls = field(default_factory=list)


@dataclass
class KeptOutput:
    """A pipeline that keeps the output of its last run, which ``record_run`` discards."""

    pipe: Any
    output: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)

    def __call__(self, **call: Any) -> Any:
        self.output = self.pipe(**call)
        return self.output


@contextmanager
def counted(pipe: Any, seen: Seen) -> Iterator[None]:
    """Count the calls of every component, known to ertacache or not.

    Enter it before a policy is attached.
    """
    parts = pipe.components.items()
    networks = {name: module for name, module in parts if isinstance(module, nn.Module)}
    for name, module in networks.items():
        vars(module)["forward"] = _counting(module, name, seen)
    try:
        yield
    finally:
        for module in networks.values():
            vars(module).pop("forward", None)


def _counting(module: nn.Module, name: str, seen: Seen) -> Callable[..., Any]:
    below = module.forward

    @functools.wraps(below)
    def forward(*args: Any, **kwargs: Any) -> Any:
        seen.calls.append((len(seen.outputs), name))
        return below(*args, **kwargs)

    return forward


@contextmanager
def watched(
    pipe: Any, seen: Seen, *, instead: Callable[[int, Any], Any] = lambda k, result: result
) -> Iterator[None]:
    """Observe ``scheduler.step`` from the outside; ``instead`` may return another latent."""
    scheduler = pipe.scheduler
    below, before = scheduler.step, vars(scheduler).get("step")
    signature = inspect.signature(below)

    @functools.wraps(below)
    def step(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        result = below(*args, **kwargs)
        x = instead(len(seen.outputs), result[0])
        seen.samples.append(given["sample"].clone())
        seen.outputs.append(given["model_output"].clone())
        seen.results.append(x.clone())
        if isinstance(result, tuple):
            return (x, *result[1:])
        return type(result)(prev_sample=x)

    scheduler.step = step
    try:
        yield
    finally:
        del scheduler.step
        if before is not None:
            scheduler.step = before


def led(pipe: Any, path: Seen, generate: Callable[[], Any]) -> Seen:
    """A full run whose latent is replaced by that of another run after each step."""
    seen = Seen()
    with watched(pipe, seen, instead=lambda k, result: path.results[k].clone()):
        generate()
    return seen
