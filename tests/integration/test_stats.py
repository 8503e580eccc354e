"""What attached runs are counted as, by a clock that the test turns."""

from __future__ import annotations

from itertools import count

import pytest

from ertacache.integration import run as run_module
from ertacache.integration.attach import attach
from tests.integration.setting import COMPUTED, STEPS, Setting
from tests.integration.tiny import CASES


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second passes whenever the time is read."""
    ticks = count()
    monkeypatch.setattr(run_module, "perf_counter", lambda: next(ticks) / 2)


def test_stats(setting: Setting) -> None:
    branches = setting.branches
    latent = setting.run.latents[0].nbytes
    with attach(setting.pipe, setting.trajectory_policy()) as handle:
        assert handle.stats.runs == 0
        setting.generate()
        one = handle.stats
        setting.generate()
        two = handle.stats
    assert one.last == one.total
    assert (one.runs, one.last.computed_steps, one.last.reused_steps) == (1, len(COMPUTED), 3)
    assert one.last.denoiser_calls == branches * len(COMPUTED)
    assert one.last.reused_calls == branches * (STEPS - len(COMPUTED))
    assert one.last.denoiser_seconds == branches * len(COMPUTED) / 2
    assert two.total == one.last + two.last
    assert two.runs == 2
    assert handle.stats == two  # also after detach
    # Three outputs of history, and the branches of guidance; Flux has none, so they are one.
    guided = 0 if setting.case is CASES["flux"] else 2
    assert one.last.cached_bytes == (3 + guided) * latent == two.total.cached_bytes


def test_summary(wan: Setting) -> None:
    """Two calls per step, of which every tenth of a second is known."""
    with attach(wan.pipe, wan.trajectory_policy()) as handle:
        assert handle.summary().splitlines()[:3] == [
            "no run yet",
            "0 runs: 0 steps computed, 0 reused",
            "network evaluations (NFE): 0 instead of 0, 0.00x fewer",
        ]
        for _ in range(2):
            wan.generate()
        assert handle.summary().splitlines() == [
            "last run: 5 of 8 steps computed: ██·█··██",
            "2 runs: 10 steps computed, 6 reused",
            "network evaluations (NFE): 20 instead of 32, 1.60x fewer",
            "seconds in the network: 10.00, about 6.00 saved",
            f"cache: {5 * wan.run.latents[0].nbytes / 1e6:.1f} MB",
        ]
