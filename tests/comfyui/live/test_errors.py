"""Errors on a real server: one sentence each, and the server works afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from ertacache import Policy
from ertacache.models import load_prompts
from tests.comfyui.live.comparing import SEED, ours, sample
from tests.comfyui.live.conftest import STEPS, folder
from tests.comfyui.live.server import Server, WorkflowError
from tests.comfyui.live.workflows import Graph


@pytest.fixture(autouse=True)
def _works_afterwards(server: Server, policy: str) -> Iterator[None]:
    yield
    assert sample(server, ours(policy, 3.0, steps=STEPS)).calls == STEPS // 3


def test_a_sampler_that_adds_noise(server: Server, policy: str) -> None:
    with pytest.raises(WorkflowError, match="the sampler adds noise on its way"):
        sample(server, ours(policy, 2.0, "euler_ancestral", steps=STEPS))


def test_a_sampler_that_repeats_a_noise_level(server: Server, policy: str) -> None:
    with pytest.raises(WorkflowError, match="twice at one noise level"):
        sample(server, ours(policy, 2.0, "heun", steps=STEPS))


def test_a_policy_of_another_model(server: Server, policy: str) -> None:
    known = Policy.load(folder(server) / policy)
    other = replace(known, provenance={"ComfyUI model": "WAN21"})
    other.save(folder(server) / "other.safetensors")
    message = "calibrated for WAN21, but the model is Flux: choose the policy of this model"
    with pytest.raises(WorkflowError, match=message):
        sample(server, ours("other.safetensors", 2.0, steps=STEPS))


def test_a_policy_for_another_kind_of_network(server: Server, policy: str) -> None:
    known = Policy.load(folder(server) / policy)
    facts = replace(known.fingerprint, prediction="epsilon")
    replace(known, fingerprint=facts).save(folder(server) / "epsilon.safetensors")
    with pytest.raises(WorkflowError, match="prediction is 'flow', was 'epsilon'"):
        sample(server, ours("epsilon.safetensors", 2.0, steps=STEPS))


def test_a_policy_for_other_latents(server: Server, policy: str) -> None:
    known = Policy.load(folder(server) / policy)
    facts = replace(known.fingerprint, latent_shape=(16, 16, 16))
    replace(known, fingerprint=facts).save(folder(server) / "wide.safetensors")
    with pytest.raises(WorkflowError, match="latent_shape is"):
        sample(server, ours("wide.safetensors", 2.0, steps=STEPS))


def test_a_damaged_file(server: Server, policy: str) -> None:
    data = (folder(server) / policy).read_bytes()
    (folder(server) / "damaged.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(WorkflowError, match=r"cannot load .*damaged\.safetensors"):
        sample(server, ours("damaged.safetensors", 2.0, steps=STEPS))


def test_a_missing_file_is_refused_before_anything_runs(server: Server, policy: str) -> None:
    with pytest.raises(WorkflowError, match="Value not in list"):
        sample(server, ours("absent.safetensors", 2.0, steps=STEPS))


def test_names_and_numbers_of_a_calibration(server: Server, policy: str) -> None:
    for changes, message in [
        ({"name": "../escape"}, "cannot be the name of a policy"),
        ({"name": policy}, "exists: choose another name, or switch overwrite on"),
        ({"name": "a", "speedups": "two"}, "speedups must be numbers"),
        ({"name": "a", "speedups": "0.5"}, "speedup"),
        ({"name": "a", "one_prompt": True}, "at least two prompts"),
    ]:
        graph = Graph()
        texts = load_prompts("emoji-flux", "calibration")[: 1 if "one_prompt" in changes else 3]
        given = {key: value for key, value in changes.items() if key != "one_prompt"}
        name = str(given.pop("name"))
        graph.calibrate(name, graph.prompts(texts), **(given | {"sigmas": graph.sigmas(STEPS)}))
        with pytest.raises(WorkflowError, match=message):
            server.run(graph.nodes)
    assert not (server.base / "models" / "escape.safetensors").exists()


def slowly(graph: Graph) -> None:
    """Have every evaluation of the network take a second."""
    graph.nodes[graph.model[0]]["inputs"]["seconds_per_call"] = 1


def interrupt(server: Server, graph: Graph) -> None:
    """Run a workflow, and interrupt it once its network is evaluated."""
    run = server.submit(graph.nodes)
    time.sleep(3)
    while run not in server.get(f"/history/{run}"):  # one that comes before the run begins is lost
        server.post("/interrupt", {})
        time.sleep(0.5)
    with pytest.raises(WorkflowError, match="interrupted"):
        server.wait(run)


def test_an_interrupted_run(server: Server, policy: str) -> None:
    graph = Graph()
    slowly(graph)
    options = {"sampler": graph.sampler(policy, 2.0), "sigmas": graph.sigmas(STEPS)}
    graph.save(graph.sample(graph.encode("a lemon"), SEED, **options))
    interrupt(server, graph)


def test_an_interrupted_calibration_is_continued(server: Server, policy: str) -> None:
    def calibration() -> tuple[Graph, str]:
        graph = Graph()
        texts = load_prompts("emoji-flux", "calibration")[8:11]
        found = graph.calibrate("resumed", graph.prompts(texts), sigmas=graph.sigmas(4))
        latent = graph.sample(graph.encode("a lemon"), SEED, sampler=graph.sampler(found, 1.0))
        return graph, graph.save(latent)[1]

    graph, _ = calibration()
    slowly(graph)
    run = server.submit(graph.nodes)
    profile = folder(server)
    for _ in range(400):
        if list(profile.glob("resumed-*.profile")):
            break
        time.sleep(0.1)
    server.post("/interrupt", {})
    with pytest.raises(WorkflowError, match="interrupted"):
        server.wait(run)
    (kept,) = profile.glob("resumed-*.profile")
    before = Policy.load(kept).profile
    assert before is not None
    first = before.runs
    graph, _ = calibration()
    server.run(graph.nodes)
    after = Policy.load(profile / "resumed.safetensors").profile
    assert after is not None
    assert set(first) <= set(after.runs)
    assert not kept.exists()
