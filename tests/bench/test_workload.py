"""How a batch is called."""

from __future__ import annotations

from typing import Any

import pytest

from ertacache.bench.workload import Workload
from ertacache.formats.profile import ProfiledPrompt

RUNS = [ProfiledPrompt("a", 1), ProfiledPrompt("b", 2)]


class Recorder:
    """A pipeline that keeps what it was called with."""

    def __call__(self, **call: Any) -> None:
        self.call = call


@pytest.mark.parametrize(
    ("given", "passed"), [("blurred", ["blurred"] * 2), (["x", "y"], ["x", "y"]), (None, None)]
)
def test_every_prompt_gets_its_negative_prompt(given: Any, passed: Any) -> None:
    pipe: Any = Recorder()
    call = {"num_inference_steps": 3, "negative_prompt": given}
    Workload("any", pipe, call, RUNS, RUNS, batch_size=2).run(RUNS, output_type="latent")
    assert pipe.call["negative_prompt"] == passed
    assert pipe.call["prompt"] == ["a", "b"]
    assert pipe.call["output_type"] == "latent"
    assert call["negative_prompt"] == given  # the workload's own call is left as it was
