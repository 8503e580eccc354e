from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.calibration.recorder import Recorder
from ertacache.core.flows import GaussianRing, shifted_sigmas
from ertacache.core.gram import profile_run
from ertacache.core.groups import Layout
from ertacache.core.sampler import run_reference
from ertacache.formats.fingerprint import UNKNOWN
from ertacache.formats.policy import Policy, PolicyError
from tests.core import samplers
from tests.core.solvers import AdamsBashforth

FLOW = GaussianRing(radius=2.0, width=0.3)
T = 8
SIGMAS = shifted_sigmas(T)


def noise(seed: int, count: int = 1) -> Tensor:
    return FLOW.noise(32 * count, seed).view(count, 2, 8, 2, 2)[:, :, :, 0]


def velocity(x: Tensor, sigma: Tensor) -> Tensor:
    return FLOW.velocity(x, sigma)


def model(x: Tensor, sigma: Tensor, **extra: Any) -> Tensor:
    return x - sigma[0] * velocity(x, sigma[0])


def test_the_profile_is_that_of_the_full_run() -> None:
    recorder = Recorder(SIGMAS)
    full = run_reference(recorder.wrap(velocity, "a cat", seed=3), noise(3), sigmas=SIGMAS)
    profile = recorder.policy().profile
    assert profile is not None
    torch.testing.assert_close(profile.statistics.inner, profile_run(full).inner)
    assert [(run.prompt, run.seed) for run in profile.runs] == [("a cat", 3)]
    assert profile.finest is not None  # channels are axis 1 of four


def test_steps_recorded_by_hand_are_the_same() -> None:
    recorder, x = Recorder(SIGMAS), noise(3)
    recorder.begin("a cat", seed=3)
    for k in range(T):
        v = velocity(x, SIGMAS[k])
        recorder.step(x, v)
        x += (SIGMAS[k + 1] - SIGMAS[k]) * v  # in place: the record keeps copies
    wrapped = Recorder(SIGMAS)
    run_reference(wrapped.wrap(velocity, "a cat", seed=3), noise(3), sigmas=SIGMAS)
    ours, theirs = recorder.policy().profile, wrapped.policy().profile
    assert ours is not None
    assert theirs is not None
    torch.testing.assert_close(ours.statistics.inner, theirs.statistics.inner)


def test_a_model_that_returns_x0_in_a_sampler_function() -> None:
    recorder = Recorder(SIGMAS, sampler=samplers.dpmpp_2m)
    seen: list[int] = []
    result = samplers.dpmpp_2m(
        recorder.wrap_model(model, seed=3), noise(3), SIGMAS, callback=lambda r: seen.append(r["i"])
    )
    assert seen == list(range(T))
    assert torch.equal(result, samplers.dpmpp_2m(model, noise(3), SIGMAS))
    profile = recorder.policy().profile
    assert profile is not None
    final = profile.statistics.gram.squares[0, T]
    torch.testing.assert_close(final, result.square().mean())


def test_a_batch_of_prompts_is_several_runs() -> None:
    recorder = Recorder(SIGMAS)
    run_reference(recorder.wrap(velocity, ["a", "b"], seed=5), noise(0, 2), sigmas=SIGMAS)
    run_reference(recorder.wrap(velocity, "c", seed=5), noise(1, 2), sigmas=SIGMAS)
    assert [(run.prompt, run.seed) for run in recorder.runs] == [
        ("a", 5),
        ("b", 6),
        ("c", 5),
        ("c", 6),
    ]
    with pytest.raises(PolicyError, match="3 prompts, but a batch of 2 latents"):
        run_reference(recorder.wrap(velocity, ["d", "e", "f"]), noise(0, 2), sigmas=SIGMAS)


def test_a_run_that_was_broken_off_is_dropped() -> None:
    recorder = Recorder(SIGMAS)
    half = recorder.wrap(velocity, "a")
    half(noise(0), SIGMAS[0])
    assert recorder.runs == ()
    with pytest.raises(PolicyError, match="no full run of 8 steps was recorded yet"):
        recorder.policy()
    run_reference(recorder.wrap(velocity, "b"), noise(0), sigmas=SIGMAS)
    assert recorder.has("b")
    assert not recorder.has("a")


def test_a_file_is_written_after_every_run_and_continued(tmp_path: Any) -> None:
    path = tmp_path / "loop.safetensors"
    first = Recorder(SIGMAS, path=path)
    run_reference(first.wrap(velocity, "a", seed=0), noise(0), sigmas=SIGMAS)
    assert len(Policy.load(path).profile.runs) == 1  # type: ignore[union-attr]
    second = Recorder(SIGMAS, path=path)
    assert second.has("a", 0)
    run_reference(second.wrap(velocity, "b", seed=1), noise(1), sigmas=SIGMAS)
    assert [run.prompt for run in Policy.load(path).profile.runs] == ["a", "b"]  # type: ignore[union-attr]


def test_a_file_of_another_loop_is_not_continued(tmp_path: Any) -> None:
    """Refused on the first step, before a run is paid for."""
    path = tmp_path / "loop.safetensors"
    first = Recorder(SIGMAS, path=path)
    run_reference(first.wrap(velocity, "a"), noise(0), sigmas=SIGMAS)
    others = {
        "another sigma schedule or solver": (Recorder(SIGMAS, solver=AdamsBashforth, path=path), 0),
        "latent_shape is": (Recorder(SIGMAS, path=path), 1),
        "pipeline is 'Mine', was 'loop'": (Recorder(SIGMAS, model="Mine", path=path), 0),
    }
    for reason, (other, narrow) in others.items():
        x = noise(1)[:, narrow:]
        with pytest.raises(PolicyError, match=f"cannot be continued: .*{reason}"):
            other.wrap(velocity, "b")(x, SIGMAS[0])


def test_a_run_that_is_there_is_refused_at_its_beginning() -> None:
    recorder = Recorder(SIGMAS)
    run_reference(recorder.wrap(velocity), noise(0), sigmas=SIGMAS)
    with pytest.raises(PolicyError, match="'' with seed 0 was recorded already: give every run"):
        recorder.wrap(velocity)


def test_another_solver_than_the_one_named_is_noticed() -> None:
    recorder = Recorder(SIGMAS)
    with pytest.raises(PolicyError, match=r"before step 2 is .* % off what the solver makes"):
        run_reference(recorder.wrap(velocity), noise(0), sigmas=SIGMAS, solver=AdamsBashforth)
    right = Recorder(SIGMAS, solver=AdamsBashforth)
    run_reference(right.wrap(velocity), noise(0), sigmas=SIGMAS, solver=AdamsBashforth)
    assert right.has()


def test_velocities_that_point_the_other_way_are_noticed() -> None:
    recorder, x = Recorder(SIGMAS), noise(0)
    recorder.begin()
    for k in range(T):  # as a loop with v = x0 - noise has them
        v, before = -velocity(x, SIGMAS[k]), x
        x = x + (SIGMAS[k] - SIGMAS[k + 1]) * v
        if k < T - 1:
            recorder.step(before, v)
    with pytest.raises(PolicyError, match=r"velocities \(x - x0\) / sigma"):
        recorder.step(before, v)


def test_half_precision_is_no_other_solver() -> None:
    recorder, x = Recorder(SIGMAS), noise(0).bfloat16()
    denoise = recorder.wrap(lambda x, s: velocity(x.float(), s.float()).bfloat16())
    for k in range(T):
        x = x + (SIGMAS[k + 1] - SIGMAS[k]).bfloat16() * denoise(x, SIGMAS[k])
    assert recorder.policy().fingerprint.dtype == "bfloat16"


def test_nan_is_refused() -> None:
    recorder = Recorder(SIGMAS)
    with pytest.raises(PolicyError, match="output on step 0 holds NaN"):
        run_reference(recorder.wrap(lambda x, s: x * torch.nan), noise(0), sigmas=SIGMAS)


def test_a_shape_that_changes_is_refused() -> None:
    recorder = Recorder(SIGMAS)
    recorder.begin()
    with pytest.raises(PolicyError, match="they must be equal, and stay so"):
        recorder.step(noise(0), noise(0)[:, :1])
    with pytest.raises(PolicyError, match="no run has begun"):
        Recorder(SIGMAS).step(noise(0), noise(0))


def test_what_is_known_is_kept() -> None:
    recorder = Recorder(SIGMAS, model="Mine", guidance_scale=5.0, layout=Layout(2, grid=(4, 4)))
    run_reference(recorder.wrap(velocity), noise(0).view(1, 16, 2), sigmas=SIGMAS)
    policy = recorder.policy()
    assert policy.fingerprint.denoiser == "Mine"
    assert policy.fingerprint.guidance == {"guidance_scale": (5.0,)}
    assert policy.profile is not None
    assert policy.profile.finest is not None
    unnamed = Recorder(SIGMAS)
    run_reference(unnamed.wrap(velocity), noise(0).view(1, 16, 2), sigmas=SIGMAS)
    assert unnamed.policy().fingerprint.denoiser == UNKNOWN
    assert unnamed.policy().profile.finest is None  # type: ignore[union-attr]


def test_a_loop_of_another_prediction_is_refused() -> None:
    with pytest.raises(PolicyError, match="predicts 'v_prediction'"):
        Recorder(SIGMAS, prediction="v_prediction")
