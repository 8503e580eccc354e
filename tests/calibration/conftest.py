"""Two pipelines, each profiled once: the bundled image model, and a tiny one of random weights.

Whatever is about the quality of results runs on the first, all else on the second. No test reads a
clock: one is put in its place, whose time passes in the network only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ertacache.calibration.profile import profile_runs
from ertacache.calibration.session import Session, number_runs
from ertacache.formats.policy import Policy
from ertacache.models import MODELS, load_pipeline, load_prompts
from tests.integration.tiny import CASES
from tests.integration.tiny import STEPS as TINY_STEPS

NAME = "emoji-flux"
STEPS = 12
CALL = MODELS[NAME].call_arguments | {"num_inference_steps": STEPS}
PROMPTS = load_prompts(NAME, "calibration")[:4]
RUNS = number_runs(PROMPTS)
HELDOUT = load_prompts(NAME, "heldout")[:2]

TINY_PROMPTS = ["a red circle", "a blue square", "a red square", "a blue circle", "a circle"]
TINY_RUNS = number_runs(TINY_PROMPTS)
TINY_HELDOUT = ["a black square", "a red circle moving left"]


def tiny_call(name: str = "flux") -> dict[str, Any]:
    """The arguments of a tiny pipeline, without prompts."""
    words = {"max_sequence_length": 8, "num_inference_steps": TINY_STEPS}
    return words | CASES[name].arguments


@pytest.fixture(scope="session")
def pipe() -> Any:
    return load_pipeline(NAME)


@pytest.fixture(scope="session")
def session(pipe: Any) -> Session:
    """The bundled model; it keeps the latents of all calibration prompts."""
    return Session(pipe, CALL, batch_size=len(PROMPTS))


@pytest.fixture(scope="session")
def known(session: Session) -> Policy:
    """Its profile, in a policy without plans."""
    return profile_runs(session, RUNS, keep=RUNS)


@pytest.fixture(scope="session")
def tiny() -> Any:
    return CASES["flux"].build()


@pytest.fixture(scope="session")
def tiny_known(tiny: Any) -> Policy:
    return profile_runs(Session(tiny, tiny_call(), batch_size=5), TINY_RUNS)


@contextmanager
def counting_rows(network: Any) -> Iterator[list[int]]:
    """The rows of every batch that reaches the network's last layer."""
    rows: list[int] = []
    hook = network.proj_out.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    try:
        yield rows
    finally:
        hook.remove()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A clock that stands still but for a second with every call of it; usable as a hook."""
    seconds = [0.0]

    def tick(*_: Any) -> None:
        seconds[0] += 1

    monkeypatch.setattr("ertacache.calibration.session.synchronized_time", lambda: seconds[0])
    monkeypatch.setattr("ertacache.integration.choose.perf_counter", lambda: seconds[0])
    return tick
