"""Plans on the network, in one call of the pipeline or in several that meet at every step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import accelerate
import pytest
import torch
from torch import Tensor

from ertacache.calibration import lockstep
from ertacache.calibration.lockstep import refit_plans, run_plan
from ertacache.calibration.profile import profile_runs
from ertacache.calibration.reference import Reference
from ertacache.calibration.session import Session, number_runs
from ertacache.calibration.sharing import Evaluations
from ertacache.calibration.solve import solve
from ertacache.core.distance import distances, typical_distance
from ertacache.core.groups import ONE_GROUP, Groups
from ertacache.core.plans import TrajectoryPlan
from ertacache.core.simulate import Fit
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.attach import find_handle
from tests.calibration.conftest import RUNS, TINY_PROMPTS, TINY_STEPS, counting_rows, tiny_call
from tests.integration.test_coexistence import offload
from tests.integration.tiny import CASES, generate

STEPS = (0, 3, 5)
GUIDANCE = {"guidance_scale": [2.0, 5.0]}
GUIDED = number_runs(TINY_PROMPTS[:4], varied=GUIDANCE)
HARMLESS = number_runs(TINY_PROMPTS[:4], varied={"negative_prompt": ["black", "red"]})
"""Without classifier-free guidance a negative prompt is not looked at."""


def refitted(
    session: Session,
    known: Policy,
    runs: Sequence[ProfiledPrompt],
    *,
    fit: Fit | None = None,
    fitted: Sequence[int] | None = None,
) -> tuple[TrajectoryPlan, Tensor]:
    reference = session.reference(runs)
    weights = torch.zeros(1, len(runs), dtype=torch.float64)
    weights[0, list(range(len(runs)) if fitted is None else fitted)] = 1.0
    (plan,), found = refit_plans(
        session,
        reference,
        STEPS,
        fingerprint=known.fingerprint,
        fit=fit or Fit(),
        weights=weights,
    )
    return plan, found


@pytest.fixture(scope="module")
def guided(tiny_known: Policy) -> Policy:
    """As if calibrated for both values of guidance."""
    guidance = {"guidance_scale": (2.0, 5.0)}
    return replace(tiny_known, fingerprint=replace(tiny_known.fingerprint, guidance=guidance))


@pytest.fixture
def unchanged(tiny: Any) -> Iterator[Any]:
    """The pipeline of a test, after which it must be as before, to the bit."""
    before, threads = generate(tiny, CASES["flux"]), threading.active_count()
    yield tiny
    assert torch.equal(generate(tiny, CASES["flux"]), before)
    assert find_handle(tiny) is None
    assert threading.active_count() == threads


def test_distances_are_in_the_order_of_the_runs(unchanged: Any, guided: Policy) -> None:
    session = Session(unchanged, tiny_call(), batch_size=2)
    policy, reference = solve(guided, compute_steps=3), session.reference(GUIDED)
    plan = policy.default.plan
    assert isinstance(plan, TrajectoryPlan)
    before = session.evaluations.refit
    found = run_plan(session, reference, plan, fingerprint=guided.fingerprint)
    assert session.evaluations == Evaluations(trial=3 * len(GUIDED), refit=before)
    for place, run in enumerate(GUIDED):
        final = session.lockstep([run], policy)
        alone = distances(final, reference.latents[-1][place : place + 1])
        assert found[place].item() == pytest.approx(alone.item(), rel=1e-3)


@pytest.fixture(scope="module")
def precise() -> Any:
    """In double precision, in which batches of other sizes round too little to matter."""
    return CASES["flux"].build().to(torch.float64)


def test_a_joint_refit_is_that_of_one_batch(precise: Any) -> None:
    """Calls that differ in an argument without effect are fitted as if they were one."""
    session = Session(precise, tiny_call())
    runs = number_runs(TINY_PROMPTS[:4])
    known = profile_runs(session, runs)
    for fitted in (None, [0, 1], [0, 2]):  # the last: all of them in one of the calls
        one, near = refitted(session, known, runs, fitted=fitted)
        joint, far = refitted(session, known, HARMLESS, fitted=fitted)
        assert joint.compute_steps == one.compute_steps == STEPS
        torch.testing.assert_close(joint.coefficients, one.coefficients, rtol=0, atol=1e-10)
        torch.testing.assert_close(far, near, rtol=1e-8, atol=0)


@pytest.mark.parametrize(
    "fit",
    [
        Fit(groups=Groups(channels=4, bands=3)),
        Fit(branch=True, order=1),
        Fit(groups=Groups(bands=3), branch=True, ridge=0.1),
    ],
    ids=["groups", "branch", "both"],
)
def test_a_joint_refit_with_groups_and_a_second_history(precise: Any, fit: Fit) -> None:
    """As the one before, also where a call has no prompt that is fitted on."""
    guided = {"true_cfg_scale": 3.0, "negative_prompt": "black"}
    session = Session(precise, tiny_call() | guided, batch_size=2)
    runs = number_runs(TINY_PROMPTS[:4])
    harmless = number_runs(TINY_PROMPTS[:4], varied={"return_dict": [True, False]})
    known = profile_runs(session, runs)
    for fitted in (None, [0, 1], [0, 2]):
        one, near = refitted(session, known, runs, fit=fit, fitted=fitted)
        joint, far = refitted(session, known, harmless, fit=fit, fitted=fitted)
        assert (joint.groups, joint.branch) == (fit.groups, fit.branch)
        torch.testing.assert_close(joint.coefficients, one.coefficients, rtol=0, atol=1e-8)
        torch.testing.assert_close(far, near, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["wan", "cogvideox"])
def test_values_of_guidance_share_groups_and_a_second_history(name: str) -> None:
    session = Session(CASES[name].build(), tiny_call(name) | GUIDANCE, batch_size=2)
    runs = session.number_runs(TINY_PROMPTS[:4])
    known, reference = profile_runs(session, runs, keep=runs), session.reference(runs)
    assert reference.finest is not None
    errors = []
    for fit in (Fit(), Fit(groups=reference.finest, branch=True)):
        plan, found = refitted(session, known, runs, fit=fit)
        again = run_plan(session, reference, plan, fingerprint=known.fingerprint)
        torch.testing.assert_close(again, found, rtol=1e-3, atol=1e-5)
        errors.append(typical_distance(found))
    assert errors[1] < 0.9 * errors[0]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("flux", {}),  # tokens
        ("flux", {"true_cfg_scale": 3.0, "negative_prompt": "black"}),
        ("wan", {}),  # one branch after the other
        ("cogvideox", {}),  # both in one batch
    ],
    ids=["flux", "flux-guided", "wan", "cogvideox"],
)
def test_finer_refits_come_closer_to_the_runs_that_they_are_fitted_on(
    name: str, more: dict[str, Any]
) -> None:
    """Groups as well as a second history; and the plan leads where its refit came to."""
    session = Session(CASES[name].build(), tiny_call(name) | more, batch_size=4)
    runs = number_runs(TINY_PROMPTS[:4])
    known, reference = profile_runs(session, runs, keep=runs), session.reference(runs)
    finest = reference.finest
    assert finest is not None
    assert reference.facts.branch == (name != "flux" or bool(more))
    errors: dict[tuple[Groups, bool], float] = {}
    for groups in (ONE_GROUP, Groups(bands=3), Groups(channels=finest.channels), finest):
        for branch in (False, True)[: 1 + reference.facts.branch]:
            fit = Fit(ridge=1e-4, groups=groups, branch=branch)
            plan, found = refitted(session, known, runs, fit=fit)
            assert (plan.groups, plan.branch) == (groups, branch)
            assert plan.coefficients.shape == (TINY_STEPS, groups.count, 9 if branch else 5)
            again = run_plan(session, reference, plan, fingerprint=known.fingerprint)
            torch.testing.assert_close(again, found, rtol=1e-3, atol=1e-5)
            errors[groups, branch] = typical_distance(found)
    for (groups, branch), error in errors.items():
        assert error <= errors[ONE_GROUP, branch]
        assert errors[finest, branch] <= error <= errors[groups, False]
    assert errors[finest, False] < 0.9 * errors[ONE_GROUP, False]


def test_several_values_share_their_coefficients(unchanged: Any, guided: Policy) -> None:
    session = Session(unchanged, tiny_call(), batch_size=2)
    with counting_rows(unchanged.transformer) as rows:
        session.reference(GUIDED)
        before, rows[:] = session.evaluations.refit, []
        joint, found = refitted(session, guided, GUIDED)
    assert rows == [2, 2] * len(STEPS)  # the calls have two prompts each
    assert session.evaluations.refit - before == len(GUIDED) * len(STEPS)
    alone, best = refitted(session, guided, GUIDED[0::2])
    assert not torch.allclose(joint.coefficients, alone.coefficients, atol=1e-4)
    # In open loop the plan leads where its refit came to.
    again = run_plan(session, session.reference(GUIDED), joint, fingerprint=guided.fingerprint)
    torch.testing.assert_close(again, found, rtol=1e-3, atol=1e-5)
    assert (best > 0).all()


def test_prompts_that_are_not_fitted_on_run_along(session: Session, known: Policy) -> None:
    whole, _ = refitted(session, known, RUNS)
    half, found = refitted(session, known, RUNS, fitted=[0, 1])
    assert not torch.equal(whole.coefficients, half.coefficients)
    unseen = session.reference(RUNS).select([2, 3])
    again = run_plan(session, unseen, half, fingerprint=known.fingerprint)
    torch.testing.assert_close(again, found[2:], rtol=1e-3, atol=0)


def test_a_reference_may_be_a_part(tiny: Any) -> None:
    session = Session(tiny, tiny_call(), batch_size=4)
    whole = session.reference(GUIDED)
    part = whole.select([2, 0])
    assert isinstance(part, Reference)
    assert part.runs == (GUIDED[2], GUIDED[0])
    assert torch.equal(part.latents[-1], whole.latents[-1][[2, 0]])
    assert part.schedule is whole.schedule


def failing(pipe: Any, *, at: int) -> Callable[[], None]:
    """Let the network fail on a call with a guidance of 5; returns what ends it."""
    calls = []

    def fail(_: Any, given: Any, arguments: dict[str, Any]) -> None:
        if float(arguments["guidance"][0]) == 5.0:
            calls.append(given)
            if len(calls) == at:
                raise ArithmeticError("out of range")

    remove: Callable[[], None] = pipe.transformer.register_forward_pre_hook(
        fail, with_kwargs=True
    ).remove
    return remove


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_error_in_one_call_ends_all(unchanged: Any, guided: Policy, at: int) -> None:
    session = Session(unchanged, tiny_call(), batch_size=4)
    session.reference(GUIDED)
    stop = failing(unchanged, at=at)
    try:
        with pytest.raises(ArithmeticError, match="out of range"):
            refitted(session, guided, GUIDED)
    finally:
        stop()
    plan, _ = refitted(session, guided, GUIDED)  # and the next one is none the worse
    assert plan.compute_steps == STEPS


def test_an_interruption_ends_all(
    unchanged: Any, guided: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(unchanged, tiny_call(), batch_size=4)
    session.reference(GUIDED)
    join, joined = threading.Thread.join, list[str]()

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        joined.append(thread.name)
        if len(joined) == 1:
            raise KeyboardInterrupt
        join(thread, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            refitted(session, guided, GUIDED)
    assert len(joined) == 3  # the first again, and the second


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_calls_run_in_the_modes_of_the_caller(unchanged: Any, guided: Policy) -> None:
    session = Session(unchanged, tiny_call(), batch_size=4)
    session.reference(GUIDED)
    seen: set[tuple[torch.dtype | None, bool]] = set()

    def look(*_: Any) -> None:
        cast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        seen.add((cast, torch.is_inference_mode_enabled()))

    hook = unchanged.transformer.register_forward_pre_hook(look)
    try:
        with torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
            refitted(session, guided, GUIDED)
        assert seen == {(torch.float16, True)}
        refitted(session, guided, GUIDED)
        assert seen == {(torch.float16, True), (None, False)}
    finally:
        hook.remove()


def test_threads_take_over_that_gradients_are_off() -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            modes = lockstep._modes()
        with ExitStack() as stack:
            for each in modes:
                stack.enter_context(each())
            assert not torch.is_grad_enabled()
    assert torch.no_grad not in lockstep._modes()


def test_a_compiled_network_and_one_with_hooks_of_its_own(guided: Policy) -> None:
    """A copy must not register its hook where that of another copy is."""
    pipe = CASES["flux"].build()
    session = Session(pipe, tiny_call(), batch_size=4)
    session.reference(GUIDED)
    expected, _ = refitted(session, guided, GUIDED)
    with pipe.transformer.cache_context("cond"):
        pass  # leaves a registry of hooks behind
    found, _ = refitted(session, guided, GUIDED)
    assert torch.equal(found.coefficients, expected.coefficients)
    pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float32, compute_dtype=torch.float32
    )
    found, _ = refitted(session, guided, GUIDED)
    assert torch.equal(found.coefficients, expected.coefficients)
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    found, _ = refitted(session, guided, GUIDED)
    assert torch.equal(found.coefficients, expected.coefficients)


def dispatch(pipe: Any) -> None:
    """As a device map leaves it, with one device."""
    accelerate.dispatch_model(pipe.transformer, device_map={"": "cpu"}, force_hooks=True)


def test_batches_run_on_copies_of_offloaded_and_dispatched_pipelines() -> None:
    found = []
    for prepare in (None, "model", "sequential", "leaf_level", dispatch):
        pipe = CASES["flux"].build()
        if isinstance(prepare, str):
            offload(pipe, prepare)
        elif prepare is not None:
            prepare(pipe)
        session, runs = Session(pipe, tiny_call()), number_runs(TINY_PROMPTS[:2])
        known = profile_runs(session, runs, keep=runs)
        found.append(refitted(session, known, runs)[0].coefficients)
    assert all(torch.equal(each, found[0]) for each in found)
