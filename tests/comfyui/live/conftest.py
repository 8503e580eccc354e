"""One server for all tests, and a policy that was calibrated on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ertacache.models import load_prompts
from tests.comfyui.live.server import Server, start_server
from tests.comfyui.live.workflows import Graph

STEPS = 10
POLICY = "tests.safetensors"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("comfyui") / "base") as running:
        yield running


@pytest.fixture(scope="session")
def policy(server: Server) -> str:
    """The name of a policy for runs of ``STEPS`` steps, in the server's folder."""
    graph = Graph()
    prompts = graph.prompts(load_prompts("emoji-flux", "calibration")[:3])
    graph.calibrate(POLICY, prompts, sigmas=graph.sigmas(STEPS))
    server.run(graph.nodes)
    assert (folder(server) / POLICY).exists()
    return POLICY


def folder(server: Server) -> Path:
    """Where the server's policies are."""
    return server.base / "models" / "ertacache"
