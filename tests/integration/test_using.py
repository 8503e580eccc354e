"""``using``: the target of one request, restored afterwards, and one pipeline per thread."""

from __future__ import annotations

from threading import Barrier, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import ertacache
from ertacache.integration.attach import attach, using
from tests.integration.setting import STEPS, Setting


def test_the_target_of_a_block_and_after(flux: Setting) -> None:
    with attach(flux.pipe, flux.policy(profile=flux.profile()), speedup=2) as handle:
        before = flux.generate()
        with ertacache.using(flux.pipe, compute_steps=3) as used:
            assert used is handle
            assert (handle.speedup, handle.compute_steps) == (None, 3)
            inside = flux.generate()
            assert handle.stats.last.computed_steps == 3
        assert (handle.speedup, handle.compute_steps) == (2, None)
        assert torch.equal(flux.generate(), before)
        assert not torch.equal(inside, before)
        with using(flux.pipe, speedup=1):
            assert torch.equal(flux.generate(), flux.run.latents[-1])


def test_a_failed_request_leaves_nothing(flux: Setting) -> None:
    with attach(flux.pipe, flux.policy(profile=flux.profile()), speedup=2) as handle:
        with pytest.raises(KeyError), using(flux.pipe, min_psnr=40):
            raise KeyError("of the request")
        assert (handle.speedup, handle.min_psnr) == (2, None)
        with pytest.raises(ValueError, match="speedup must be a finite number of at least 1"):
            using(flux.pipe, speedup=0.5).__enter__()
        with using(flux.pipe, speedup=4):
            flux.generate()
        assert handle.stats.last.computed_steps == STEPS // 4


def test_nothing_attached(flux: Setting) -> None:
    with (
        pytest.raises(RuntimeError, match="no policy is attached to this pipeline: call erta"),
        using(flux.pipe, speedup=2),
    ):
        pytest.fail("the block was entered")


def test_one_request_at_a_time(flux: Setting) -> None:
    """A second one, of this thread or another, would change the target of the first."""
    refused: list[str] = []

    def request() -> None:
        try:
            with using(flux.pipe, speedup=4):
                pytest.fail("the block was entered")
        except RuntimeError as error:
            refused.append(str(error))

    with (
        attach(flux.pipe, flux.policy(profile=flux.profile()), speedup=1) as handle,
        using(flux.pipe, speedup=2),
    ):
        request()
        other = Thread(target=request)
        other.start()
        other.join()
        assert handle.speedup == 2
    assert len(refused) == 2
    assert all("give every worker a pipeline of its own" in words for words in refused)


def test_one_pipeline_per_thread(flux: Setting) -> None:
    """Requests of two threads at once give what they give one after the other."""
    policy, speedups = flux.policy(profile=flux.profile()), (2.0, 4.0)
    workers = [flux.another(), flux.another()]
    expected = {}
    for speedup in speedups:
        with attach(workers[0].pipe, policy, speedup=speedup):
            expected[speedup] = workers[0].generate()
    made: dict[tuple[int, int, float], Tensor] = {}
    begin = Barrier(2)

    def serve(place: int) -> None:
        worker: Any = workers[place]
        with attach(worker.pipe, policy, speedup=3):
            begin.wait(timeout=60)
            for turn in range(2):
                # The threads never have the same target.
                for speedup in speedups[place:] + speedups[:place]:
                    with using(worker.pipe, speedup=speedup):
                        made[place, turn, speedup] = worker.generate()

    threads = [Thread(target=serve, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 2 * 2 * len(speedups)
    for (_, _, speedup), result in made.items():
        assert torch.equal(result, expected[speedup])
