"""The server of ``examples/serve.py``: two speed-ups at once, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image

import ertacache
from ertacache.calibration.profile import profile_runs
from ertacache.calibration.session import Session, number_runs
from ertacache.models import MODELS, load_pipeline

SOURCE = Path(__file__).parent.parent.parent / "examples" / "serve.py"
CALL = MODELS["emoji-flux"].call_arguments | {
    "num_inference_steps": 6,
    "height": 32,
    "width": 32,
}
PROMPTS = ["a large cat on a blue background", "a small star on a red background"]


@pytest.fixture(scope="module")
def pipe() -> Any:
    return load_pipeline("emoji-flux")


@pytest.fixture(scope="module")
def policy_file(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:

    path = tmp_path_factory.mktemp("serve") / "policy.safetensors"
    policy = profile_runs(Session(pipe, CALL, batch_size=2), number_runs(PROMPTS))
    ertacache.solve(policy, speedup=2).save(path)
    return path


@pytest.fixture
def client(policy_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    serve = import_module("examples.serve")
    rows = {"emoji-flux": type("Row", (), {"call_arguments": CALL})}
    monkeypatch.setattr(serve, "MODELS", rows)  # smaller images, fewer steps
    monkeypatch.setenv("ERTACACHE_POLICY", str(policy_file))
    with TestClient(serve.app) as client:
        yield client
    assert serve.pipelines.empty()


def expected(pipe: Any, policy: Path, speedup: float, seed: int) -> Image.Image:
    with ertacache.attach(pipe, policy, speedup=speedup):
        made: Image.Image = pipe(
            PROMPTS[0], generator=torch.Generator().manual_seed(seed), **CALL
        ).images[0]
    return made


def test_two_speedups_in_one_process(client: TestClient, pipe: Any, policy_file: Path) -> None:
    """Requests side by side give what each gives alone."""
    wanted = [("best", 0), ("fast", 0), ("best", 1), ("fast", 1)]

    def ask(request: tuple[str, int]) -> Any:
        quality, seed = request
        query = {"prompt": PROMPTS[0], "quality": quality, "seed": seed}
        return client.get("/image", params=query)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, wanted))
    for (quality, seed), answer in zip(wanted, answers, strict=True):
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-computed-steps"] == {"best": "3", "fast": "2"}[quality]
        speedup = {"best": 2.0, "fast": 3.0}[quality]
        with Image.open(BytesIO(answer.content)) as made:
            assert made.tobytes() == expected(pipe, policy_file, speedup, seed).tobytes()


def test_bad_requests(client: TestClient) -> None:
    assert client.get("/image", params={"prompt": "a cat", "quality": "bad"}).status_code == 422
    assert client.get("/image").status_code == 422


def test_the_example_is_short() -> None:
    assert SOURCE.read_text().count("\n") < 60
