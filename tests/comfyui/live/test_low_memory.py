"""The nodes on a server that keeps nothing in memory between runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch

from tests.comfyui.live.comparing import full, ours, sample
from tests.comfyui.live.conftest import STEPS, folder
from tests.comfyui.live.server import Server, start_server

# Models are unloaded after every run, and no result of a node is kept. The modes that divide a
# model between a GPU and the main memory have no effect on a CPU.
OPTIONS = ("--disable-smart-memory", "--cache-none")


@pytest.fixture(scope="module")
def frugal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with start_server(tmp_path_factory.mktemp("frugal") / "base", options=OPTIONS) as running:
        yield running


def test_the_same_results_run_after_run(server: Server, policy: str, frugal: Server) -> None:
    folder(frugal).mkdir(parents=True, exist_ok=True)
    shutil.copy(folder(server) / policy, folder(frugal))
    fast = sample(server, ours(policy, 2.0, steps=STEPS))
    for _ in range(2):
        same = sample(frugal, ours(policy, 2.0, steps=STEPS))
        assert torch.equal(same.latent, fast.latent)
        assert same.calls == fast.calls == STEPS // 2
        untouched = sample(frugal, full(steps=STEPS))
        assert untouched.calls == STEPS
