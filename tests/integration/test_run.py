"""One run under a policy: what it evaluates, reuses and keeps, and what a step does to tensors."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ertacache.core.plans import PaperPlan, Target, TrajectoryPlan
from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from ertacache.integration.choose import PlanChooser
from ertacache.integration.run import PolicyRun, RunSetup, _OutputCache
from ertacache.integration.schedulers import StepForms, read_sigmas
from ertacache.integration.tracker import NetworkCall, StepCall
from ertacache.integration.warnings import RunWarnings
from tests.integration.sampling import STEPS as SAMPLED
from tests.integration.sampling import Sampling, make
from tests.integration.setting import COMPUTED, STEPS, Setting


class CountOperations(TorchDispatchMode):
    """Names of the operations that read or write numbers; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not function.is_view:
            self.seen[function.overloadpacket.__name__] += 1
        return result


def operations(setting: Setting) -> list[Counter[str]]:
    """Of every step of a run, from the end of the step before to its own."""
    counts: list[Counter[str]] = []
    with CountOperations() as mode:

        def look(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
            counts.append(mode.seen)
            mode.seen = Counter()
            return values

        setting.generate(callback_on_step_end=look)
    return counts


def test_a_reused_step_is_one_sum(flux: Setting) -> None:
    """One product and a sum per kept output; the time divided by 1000 is the pipeline's."""
    policy = flux.trajectory_policy()
    plan = policy.default.plan
    assert isinstance(plan, TrajectoryPlan)
    with attach(flux.pipe, policy):
        counts = operations(flux)
    kept = 0
    for k in range(1, STEPS):
        kept = min(plan.history, sum(c <= k for c in COMPUTED))
        if k not in COMPUTED:
            assert counts[k] == {"mul": 1, "add": kept, "div": 1}
    assert kept == plan.history


@pytest.mark.parametrize("reuse", ["residual", "velocity"])
def test_a_reused_step_of_the_paper_is_the_schedulers(flux: Setting, reuse: str) -> None:
    """On top of the scheduler's own step, the residual is added to the latent: nothing else."""
    plain = operations(flux)
    policy = flux.paper_policy(reuse=reuse, scale=1.0, rectified=False)
    with attach(flux.pipe, policy):
        counts = operations(flux)
    assert COMPUTED[2:4] == (3, 6)
    for k in (2, 4, 5):
        assert counts[k]["mul"] == 1
        assert counts[k]["add"] == (2 if reuse == "residual" else 1)
        assert sum(counts[k].values()) < sum(plain[k].values()) / 10


class Driven:
    """A run that is driven call by call, as the tracker drives it."""

    def __init__(
        self, policy: Policy, sampling: Sampling, *, cache_device: torch.device | None = None
    ) -> None:
        scheduler = sampling.scheduler
        scheduler.set_begin_index(0)
        self._scheduler, self.step = scheduler, 0
        self.run = PolicyRun(
            RunSetup(
                pipe=sampling,
                chooser=PlanChooser(policy, Target()),
                warnings=RunWarnings(),
                forms=StepForms(scheduler),
                cache_device=cache_device,
                stepper=None,
            )
        )

    def call(self, index: int, module: nn.Module, output: Any) -> Any:
        """What a call returns, if the network would return ``output``."""
        x = torch.zeros(2, 3, 4)
        call = NetworkCall(self.step, index, module, (x,), {}, lambda _: output)
        return self.run.call(call)

    def advance(self, calls: int, output: Tensor) -> None:
        scheduler, x = self._scheduler, torch.zeros(2, 3, 4)
        own = inspect.signature(scheduler.step)
        bound = own.bind(output, scheduler.timesteps[self.step], x, return_dict=False)
        self.run.step(StepCall(self.step, calls, bound, scheduler.step))
        self.step += 1


def driven(kind: str, *, cache_device: torch.device | None = None) -> Driven:
    """Of ten steps the first is computed, and the last with the paper's method."""
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    sampling.scheduler.set_timesteps(SAMPLED)
    plan: Any
    if kind == "paper":
        plan = PaperPlan((0, SAMPLED - 1), "velocity", read_sigmas(sampling.scheduler))
    else:
        plan = TrajectoryPlan((0,), torch.ones(SAMPLED, 1, 2, dtype=torch.float64))
    policy = sampling.policy(plan)
    return Driven(policy, sampling, cache_device=cache_device)


@pytest.mark.filterwarnings("ignore:step . called the network")
def test_calls_that_were_never_computed_are() -> None:
    """A reused step that calls the network more often than the computed one did."""
    driver, a, b = driven("paper"), nn.Identity(), nn.Identity()
    first, second, third, new = (torch.full((2, 3, 4), float(k)) for k in range(4))
    assert torch.equal(driver.call(0, a, first), first)
    driver.advance(1, first)
    assert torch.equal(driver.call(0, a, new), first)
    assert torch.equal(driver.call(1, b, second), second)
    driver.advance(2, first)
    assert torch.equal(driver.call(0, b, third), third)  # another network: computed again
    driver.advance(1, third)
    assert torch.equal(driver.call(0, b, new), third)
    # Of the first network, and gone with it.
    assert torch.equal(driver.call(1, b, new), new)
    driver.advance(2, third)
    stats = driver.run.stats
    assert (stats.computed_steps, stats.reused_steps) == (2, 2)
    assert (stats.denoiser_calls, stats.reused_calls) == (4, 2)


def test_outputs_come_back_from_the_other_device() -> None:
    driver, module = driven("trajectory", cache_device=torch.device("meta")), nn.Identity()
    driver.call(0, module, {"sample": torch.ones(2)})
    assert driver.run.stats.cached_bytes == 8
    driver.step = 1
    # What was on the meta device has no numbers to come back with: it tries, and that is seen.
    with pytest.raises(NotImplementedError, match="out of meta tensor"):
        driver.call(0, module, None)


def test_outputs_are_kept_in_their_structure() -> None:
    """Moved, and in memory of their own."""
    x, meta = torch.ones(2), torch.device("meta")
    for device in (None, meta):
        cache = _OutputCache(device)
        cache.clear(nn.Identity(), ())
        returned = cache.put(0, {"sample": [x, (x, None)]})
        (kept,) = cache.values()
        for output in (returned, kept):
            assert isinstance(output["sample"][1], tuple)
            assert output["sample"][1][1] is None
        assert torch.equal(returned["sample"][0], x)
        assert returned["sample"][0].data_ptr() != x.data_ptr()
        assert kept["sample"][0].device == kept["sample"][1][0].device == (device or x.device)


def test_stats_stay_when_the_run_is_over() -> None:
    """The outputs are released, what was counted is not."""
    driver, v = driven("trajectory"), torch.ones(2, 3, 4)
    driver.call(0, nn.Identity(), v)
    driver.advance(1, v)
    before = driver.run.stats
    assert before.cached_bytes == 2 * v.nbytes  # the raw output, and the one the scheduler saw
    driver.run.end(failed=False, restarted=False)
    assert driver.run.stats == before


def test_rectification_per_channel(flux: Setting) -> None:
    """One gain for every channel of the packed latent, in the dimension after the batch."""
    plan = flux.paper_policy().default.plan
    assert isinstance(plan, PaperPlan)
    assert plan.gain is not None
    assert plan.bias is not None
    wide = replace(
        plan,
        gain=plan.gain[:, None, None].repeat(1, 1, 16),
        bias=plan.bias[:, None, None].repeat(1, 1, 16),
    )
    with attach(flux.pipe, flux.policy(wide)):
        assert torch.equal(flux.generate(), flux.attached_paper)
