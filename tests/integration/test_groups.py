"""Plans with groups and with a second history in pipelines, against explicit filters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.groups import ONE_GROUP, Groups
from ertacache.core.plans import TrajectoryPlan
from ertacache.formats.policy import Policy
from ertacache.integration.attach import attach
from tests.compatibility.checks import attributes
from tests.core.filters import grouped_update
from tests.integration.sampling import Sampling, make
from tests.integration.setting import (
    COMPUTED,
    STEPS,
    Seen,
    Setting,
    count_calls,
    make_setting,
    trajectory_plan,
    watch_steps,
)
from tests.integration.test_coexistence import CountingBackend, compile_network
from tests.integration.test_memory import live_tensors, watch_bytes
from tests.integration.test_run import operations
from tests.integration.test_schedulers import NoWaiting
from tests.integration.tiny import CASES, generate

HISTORY = 2
GUIDED: dict[str, dict[str, Any]] = {
    "flux": {"true_cfg_scale": 2.0, "negative_prompt": "black", "height": 48},  # two calls
    "wan": {},  # two calls, with a multistep scheduler
    "cogvideox": {},  # one call
    "sd3": {},
}
BOTH = Groups(channels=4, bands=3)
_BUILT: dict[str, Setting] = {}


@pytest.fixture(params=list(GUIDED))
def guided(request: pytest.FixtureRequest) -> Setting:
    """A pipeline of every kind, with guidance."""
    return guided_setting(request.param)


def guided_setting(name: str) -> Setting:
    if name not in _BUILT:
        _BUILT[name] = make_setting(name, **GUIDED[name])
    return _BUILT[name]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    for setting in _BUILT.values():
        assert "step" not in vars(setting.pipe.scheduler)
        assert "forward" not in vars(setting.pipe.transformer)


def grouped_plan(setting: Setting, groups: Groups, *, branch: bool = False) -> TrajectoryPlan:
    """Weights that mean nothing but are all different, for every group its own."""
    generator, update = torch.Generator().manual_seed(1), setting.nominal
    columns = HISTORY * (2 if branch else 1)
    share = torch.rand(STEPS, groups.count, columns, generator=generator, dtype=torch.float64)
    latent = update[:, None, :1].expand(-1, groups.count, -1)
    z = torch.cat([latent, update[:, None, 1:] * share], dim=2)
    return TrajectoryPlan(COMPUTED, z, groups, branch=branch)


def unpacked(setting: Setting, latents: Tensor) -> Tensor:
    """Channels behind the batch, then the grid, as the pipeline itself sees it."""
    if setting.case.build is CASES["flux"].build:
        size = (setting.case.arguments["height"], setting.case.arguments["width"])
        result: Tensor = setting.pipe._unpack_latents(latents, *size, setting.pipe.vae_scale_factor)
        return result
    if setting.case.build is CASES["cogvideox"].build:
        return latents.permute(0, 2, 1, 3, 4)
    return latents


@contextmanager
def watch_branch(pipe: Any, seen: Seen) -> Iterator[dict[int, Tensor]]:
    """The first output of the network on every step, in the shape of the latent."""
    found: dict[int, Tensor] = {}

    def note(_: Any, args: Any, output: Any) -> None:
        found.setdefault(len(seen.outputs), output[0].clone())

    hook = pipe.transformer.register_forward_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def follow(setting: Setting, pipe: Any, **changes: Any) -> tuple[Tensor, Seen, dict[int, Tensor]]:
    """A run of a pipeline that has a policy: its result, and what was seen of it."""
    with watch_steps(pipe) as seen, watch_branch(pipe, seen) as raws:
        result = generate(pipe, setting.case, **changes)
    raws = {k: raw[: len(x)] for (k, raw), x in zip(raws.items(), seen.samples, strict=True)}
    return result, seen, raws


def check_steps(
    setting: Setting,
    plan: TrajectoryPlan,
    seen: Seen,
    raws: dict[int, Tensor],
    *,
    steps: int = STEPS,
    rounding: float = 1e-5,
) -> None:
    """Every latent is the sum over groups and outputs, by explicit filters in float64."""
    past: list[Tensor] = []
    branch: list[Tensor] = []
    H = plan.history
    for k in range(steps):
        x, v, reached = seen.samples[k], seen.outputs[k], seen.results[k][0]
        if k in plan.compute_steps:
            past, branch = [v, *past][:H], [raws[k], *branch][: H if plan.branch else 0]
        columns = [0, *range(1, 1 + len(past)), *range(1 + H, 1 + H + len(branch))]
        vectors = [unpacked(setting, u) for u in (*past, *branch)]
        z = plan.coefficients[k][:, columns]
        expected = grouped_update(unpacked(setting, x), vectors, z, plan.groups)
        size = float(expected.abs().max())
        found = unpacked(setting, reached).double()
        torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding * size)


PLANS = [
    (Groups(channels=4), False),
    (Groups(bands=3), False),
    (BOTH, False),
    (ONE_GROUP, True),
    (BOTH, True),
]


@pytest.mark.parametrize(("groups", "branch"), PLANS)
def test_every_step_is_that_of_explicit_filters(
    guided: Setting, groups: Groups, branch: bool
) -> None:
    plan = grouped_plan(guided, groups, branch=branch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with attach(guided.pipe, guided.policy(plan)) as handle:
            result, seen, raws = follow(guided, guided.pipe)
            again = guided.generate()
    check_steps(guided, plan, seen, raws)
    assert handle.stats.last.computed_steps == len(COMPUTED)
    assert torch.equal(result, seen.results[-1][0])
    assert torch.equal(again, result)
    assert not torch.equal(result, guided.run.latents[-1])


def test_groups_and_branches_make_a_difference(guided: Setting) -> None:
    """So that the other tests can fail."""
    results = []
    for groups, branch in PLANS:
        with attach(guided.pipe, guided.policy(grouped_plan(guided, groups, branch=branch))):
            results.append(guided.generate())
    for i, one in enumerate(results):
        assert all((one - other).abs().max() > 1e-3 for other in results[:i])


@pytest.mark.parametrize("name", ["flux", "sd3"])
@pytest.mark.parametrize(("groups", "branch"), PLANS[2:])
def test_half_precision_is_combined_in_single(name: str, groups: Groups, branch: bool) -> None:
    setting = guided_setting(name)
    plan, pipe = grouped_plan(setting, groups, branch=branch), setting.another().pipe
    pipe.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="dtype is 'bfloat16', was 'float32'"):
        handle = attach(pipe, setting.policy(plan))
    with handle:
        result, seen, raws = follow(setting, pipe)
    assert result.dtype == raws[0].dtype == torch.bfloat16
    # Each step is rounded once, to the latent's number type.
    check_steps(setting, plan, seen, raws, rounding=2**-8)


@pytest.mark.parametrize("branch", [False, True])
def test_a_cache_kept_elsewhere_changes_nothing(guided: Setting, branch: bool) -> None:
    policy, results = guided.policy(grouped_plan(guided, BOTH, branch=branch)), []
    for device in (None, "cpu"):
        with attach(guided.pipe, policy, cache_device=device):
            results.append(guided.generate())
    assert torch.equal(*results)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("how", ["module", "wrapper"])
def test_a_compiled_network(how: str) -> None:
    """The same steps; more runs compile nothing."""
    setting = guided_setting("flux")
    pipe, backend = setting.another().pipe, CountingBackend()
    policy = setting.policy(grouped_plan(setting, BOTH, branch=True))
    with attach(setting.pipe, policy):
        expected = setting.generate()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compile_network(pipe, how, backend)
    graphs = []
    with attach(pipe, policy):
        for _ in range(2):
            result = generate(pipe, setting.case)
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    assert backend.runs >= 2 * len(COMPUTED)
    assert graphs[0] == graphs[1] > 0


def drop_guidance(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
    if step == 3:
        pipe._guidance_scale = 0.0
        values = {name: value.chunk(2)[-1] for name, value in values.items()}
    return values


EMBEDDINGS = ["prompt_embeds", "pooled_prompt_embeds"]


def test_a_callback_that_drops_guidance() -> None:
    """With groups the plan is followed on what the scheduler saw."""
    setting = guided_setting("sd3")
    plan = grouped_plan(setting, BOTH)
    call = {"callback_on_step_end": drop_guidance, "callback_on_step_end_tensor_inputs": EMBEDDINGS}
    with attach(setting.pipe, setting.policy(plan)) as handle:
        with pytest.warns(UserWarning, match="input changed its shape at reused step 4") as seen:
            _, steps, raws = follow(setting, setting.pipe, **call)
        assert len(seen) == 1
        assert handle.stats.last.computed_steps == len(COMPUTED) + 1
    check_steps(setting, plan, steps, raws)


def scheduler_steps(setting: Setting, seen: Seen, steps: Any) -> None:
    """These steps are the scheduler's own."""
    scheduler = type(setting.pipe.scheduler).from_config(setting.pipe.scheduler.config)
    scheduler.set_timesteps(STEPS)
    for k in steps:
        scheduler.set_begin_index(k)
        scheduler._step_index = None
        time = scheduler.timesteps[k]
        own = scheduler.step(seen.outputs[k], time, seen.samples[k], return_dict=False)[0]
        assert torch.equal(seen.results[k][0], own)


def test_a_callback_that_drops_the_branch_of_a_plan() -> None:
    """From the next planned step on there is no branch: the rest is computed, with a warning."""
    setting = guided_setting("sd3")
    plan = grouped_plan(setting, BOTH, branch=True)
    call = {"callback_on_step_end": drop_guidance, "callback_on_step_end_tensor_inputs": EMBEDDINGS}
    with attach(setting.pipe, setting.policy(plan)) as handle:
        with pytest.warns(UserWarning, match="shape at reused step 4|but step 6 has none") as seen:
            _, steps, raws = follow(setting, setting.pipe, **call)
        assert ["step 6 has none" in str(each.message) for each in seen] == [False, True]
        assert handle.stats.last.computed_steps == len(COMPUTED) + 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            setting.generate()
        assert handle.stats.last.computed_steps == len(COMPUTED)
    check_steps(setting, plan, steps, raws, steps=6)
    scheduler_steps(setting, steps, (6, 7))


@pytest.mark.parametrize("branch", [False, True])
def test_a_callback_that_drops_a_sample_of_the_batch(branch: bool) -> None:
    setting = guided_setting("sd3")
    plan = grouped_plan(setting, BOTH, branch=branch)

    def drop(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 3:
            values = {name: value[::2] for name, value in values.items()}
        return values

    names = ["latents", *EMBEDDINGS]
    call = {"callback_on_step_end": drop, "callback_on_step_end_tensor_inputs": names}
    call["prompt"] = ["a red circle", "a blue square"]
    with attach(setting.pipe, setting.policy(plan)) as handle:
        with pytest.warns(UserWarning, match="rest of the run is computed"):
            result, steps, raws = follow(setting, setting.pipe, **call)
        assert handle.stats.last.computed_steps == 3 + 4  # 0, 1, 3, and 4 to 7
    assert len(steps.samples[0]) == 2
    assert len(result) == 1
    check_steps(setting, plan, steps, raws, steps=4)
    scheduler_steps(setting, steps, range(4, STEPS))


def test_a_pipeline_whose_layout_is_unknown() -> None:
    """Every step is computed, with one warning, and the result is that of the full run."""
    sampling = Sampling(make("UniPCMultistepScheduler"))
    full = sampling.record()[0].latents[-1]
    one = trajectory_plan(sampling.schedule().nominal, (0, 4, 7))
    groups = Groups(channels=3, bands=2)
    z = one.coefficients.repeat(1, groups.count, 1)
    policy = sampling.policy(TrajectoryPlan((0, 4, 7), z, groups))
    with attach(sampling, policy) as handle:
        with pytest.warns(UserWarning, match=r"latent of shape \(2, 3, 4\) are not known") as seen:
            assert torch.equal(sampling(), full)
        assert len(seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert torch.equal(sampling(), full)
        assert handle.plan is None
        assert handle.stats.last.computed_steps == 10


@pytest.mark.parametrize(("name", "away"), [("flux", "true_cfg_scale"), ("wan", "guidance_scale")])
@pytest.mark.parametrize("groups", [ONE_GROUP, BOTH])
def test_a_plan_with_a_branch_in_a_run_without_guidance(
    name: str, away: str, groups: Groups
) -> None:
    setting = guided_setting(name)
    full = setting.generate(**{away: 1.0})
    policy = setting.policy(grouped_plan(setting, groups, branch=True))
    with attach(setting.pipe, policy) as handle:
        with pytest.warns(UserWarning, match=rf"step 0 has none|{away} is 1\.0, was") as seen:
            assert torch.equal(setting.generate(**{away: 1.0}), full)
        assert sum("step 0 has none" in str(each.message) for each in seen) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert torch.equal(setting.generate(**{away: 1.0}), full)
        assert handle.plan is None
        assert handle.stats.last.computed_steps == STEPS
        setting.generate()  # with guidance it is followed
        assert handle.stats.last.computed_steps == len(COMPUTED)


@pytest.mark.parametrize(("name", "away"), [("flux", "true_cfg_scale"), ("wan", "guidance_scale")])
def test_a_run_without_guidance_follows_a_plan_without_a_branch(name: str, away: str) -> None:
    setting = guided_setting(name)
    second = setting.policy(grouped_plan(setting, ONE_GROUP, branch=True))
    single = setting.policy(grouped_plan(setting, ONE_GROUP))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with attach(setting.pipe, single):
            expected, guided = setting.generate(**{away: 1.0}), setting.generate()
    policy = replace(second, plans=(*second.plans, *single.plans))
    with attach(setting.pipe, policy) as handle:
        expected_words = rf"has no guidance, so a plan|{away} is 1\.0, was"
        with pytest.warns(UserWarning, match=expected_words) as seen:
            assert torch.equal(setting.generate(**{away: 1.0}), expected)
        assert sum("has no guidance" in str(each.message) for each in seen) == 1
        assert handle.plan is single.default
        assert handle.stats.last.computed_steps == len(COMPUTED)
        assert not torch.equal(setting.generate(), guided)  # with guidance, the one with a branch
        assert handle.plan is second.default


@pytest.mark.parametrize("branch", [False, True])
def test_detach_leaves_no_trace(guided: Setting, branch: bool) -> None:
    guided.generate()
    before = attributes(guided.pipe)
    policy = guided.policy(grouped_plan(guided, BOTH, branch=branch))

    def leave(pipe: Any, step: int, timestep: Any, values: Any) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return values

    with attach(guided.pipe, policy):
        guided.generate()
        with pytest.raises(KeyboardInterrupt):
            guided.generate(callback_on_step_end=leave)
    assert attributes(guided.pipe) == before
    with count_calls(guided.pipe.transformer) as calls:
        assert torch.equal(guided.generate(), guided.run.latents[-1])
    branches = {"flux": 2, "wan": 2}
    name = next(name for name, each in _BUILT.items() if each is guided)
    assert len(calls) == branches.get(name, 1) * STEPS


@pytest.mark.parametrize("branch", [False, True])
def test_the_history_keeps_its_outputs_and_no_more(guided: Setting, branch: bool) -> None:
    """Besides the outputs of the last computed step, with and without the prompt."""
    latent = guided.run.latents[0].nbytes
    policy = guided.policy(grouped_plan(guided, BOTH, branch=branch))
    with attach(guided.pipe, policy) as handle:
        held = watch_bytes(guided, handle)
        # In a call of its own the newest raw output of a branch is one of those.
        shared = branch and handle.stats.last.denoiser_calls == 2 * len(COMPUTED)
    assert held[-1] == (HISTORY * (2 if branch else 1) + 2 - shared) * latent
    assert max(held) == held[-1]


@pytest.mark.parametrize("name", ["wan", "sd3"])
def test_a_run_leaves_no_tensor_behind(name: str) -> None:
    setting, counts = guided_setting(name), []
    with attach(setting.pipe, setting.policy(grouped_plan(setting, BOTH, branch=True))):
        for _ in range(3):
            setting.generate()
            counts.append(live_tensors())
    assert counts[1] == counts[2]


@pytest.mark.parametrize("branch", [False, True])
def test_steps_read_no_number_off_a_tensor(guided: Setting, branch: bool) -> None:
    """After the first, which looks up where the run begins and lays the coefficients out."""
    policy = guided.policy(grouped_plan(guided, BOTH, branch=branch))
    with attach(guided.pipe, policy):
        below, count = guided.pipe.scheduler.step, iter(range(STEPS))

        def step(*args: Any, **kwargs: Any) -> Any:
            with NoWaiting() if next(count) else nullcontext():
                return below(*args, **kwargs)

        guided.pipe.scheduler.step = step
        guided.generate()
        guided.pipe.scheduler.step = below
    assert next(count, None) is None  # every step was watched


def test_a_reused_step_combines_all_bands_at_once(flux: Setting) -> None:
    """One multiplication per kept output, whatever the number of groups; the latent is another."""
    with attach(flux.pipe, flux.policy(grouped_plan(flux, BOTH))):
        counts = operations(flux)
    for k in (2, 4, 5):
        assert counts[k]["mul"] == 2
        assert counts[k]["addcmul_"] == HISTORY - 1
        assert counts[k]["avg_pool2d"] == BOTH.bands - 1
        assert counts[k]["upsample_nearest2d"] == BOTH.bands - 1


def test_a_policy_with_groups_is_the_same_from_its_file(guided: Setting, tmp_path: Any) -> None:
    policy, path = guided.policy(grouped_plan(guided, BOTH, branch=True)), tmp_path / "policy"
    policy.save(path)
    results = []
    for each in (policy, Policy.load(path)):
        with attach(guided.pipe, each):
            results.append(guided.generate())
    assert torch.equal(*results)
