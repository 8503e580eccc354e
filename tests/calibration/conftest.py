"""The bundled image model and one profile of it, made once."""

from __future__ import annotations

from typing import Any

import pytest

from ertacache.calibration import profile
from ertacache.formats.profile import Profile
from ertacache.models import MODELS, load_pipeline, load_prompts

NAME = "emoji-flux"
STEPS = 16
CALL = MODELS[NAME].call_arguments | {"num_inference_steps": STEPS}
PROMPTS = load_prompts(NAME, "calibration")[:6]
HELDOUT = load_prompts(NAME, "heldout")[:4]


@pytest.fixture(scope="session")
def pipe() -> Any:
    return load_pipeline(NAME)


@pytest.fixture(scope="session")
def known(pipe: Any) -> Profile:
    return profile(pipe, PROMPTS, batch_size=6, **CALL)
