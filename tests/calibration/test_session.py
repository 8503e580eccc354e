"""A session: the arguments of calls, what is kept, and the number of network evaluations.

Evaluations are counted in the network itself, and compared with the formula.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.calibration import refit, trial
from ertacache.calibration.calibrate import calibrate
from ertacache.calibration.paper import PASSES
from ertacache.calibration.profile import profile
from ertacache.calibration.refit import ATTEMPTS
from ertacache.calibration.session import (
    Session,
    group_runs,
    interleave_runs,
    number_runs,
    split_runs,
)
from ertacache.calibration.sharing import Evaluations
from ertacache.calibration.solve import solve
from ertacache.core.groups import Groups, Layout
from ertacache.core.plans import TrajectoryPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from tests.calibration.conftest import (
    TINY_HELDOUT,
    TINY_PROMPTS,
    TINY_RUNS,
    TINY_STEPS,
    counting_rows,
    tiny_call,
)
from tests.integration.tiny import CASES


def test_bad_requests(tiny: Any) -> None:
    with pytest.raises(ValueError, match="list of at least one"):
        number_runs("a cat")
    with pytest.raises(ValueError, match="list of at least one"):
        number_runs([])
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        list(split_runs(number_runs(["a"]), 0))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        Session(tiny, batch_size=0)


def test_a_batch_holds_consecutive_runs(tiny: Any) -> None:
    batches = Session(tiny, batch_size=2).batches(TINY_RUNS)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    assert [run for batch in batches for run in batch] == TINY_RUNS


def test_one_prompt_is_a_plain_string_with_one_generator(tiny: Any) -> None:
    call = {"guidance_scale": 2.0, "negative_prompt": "black"}
    session = Session(tiny, call)
    found = session.arguments([ProfiledPrompt("a circle", 7)], output_type="latent")
    noise = found.pop("generator")
    steps = {"num_inference_steps": 28}  # the pipeline's default, named
    assert found == call | steps | {"prompt": "a circle", "output_type": "latent"}
    assert isinstance(noise, torch.Generator)
    assert noise.initial_seed() == 7


def test_a_batch_has_a_generator_and_a_negative_prompt_each(tiny: Any) -> None:
    call = {"guidance_scale": 2.0, "negative_prompt": "black", "num_inference_steps": 4}
    session = Session(tiny, call)
    found = session.arguments(TINY_RUNS[1:3], guidance_scale=3.0)
    assert [noise.initial_seed() for noise in found.pop("generator")] == [1, 2]
    assert found == {
        "prompt": TINY_PROMPTS[1:3],
        "negative_prompt": ["black", "black"],
        "guidance_scale": 3.0,
        "num_inference_steps": 4,
    }
    assert session.call == call  # the session's own call stays
    listed = session.arguments(TINY_RUNS[:2], negative_prompt=["black", "red"])
    assert listed["negative_prompt"] == ["black", "red"]
    assert Session(tiny).arguments(TINY_RUNS[:2], negative_prompt=None)["negative_prompt"] is None


def test_reference_latents_are_taken_from_what_was_kept(tiny: Any) -> None:
    session, runs = Session(tiny, tiny_call()), TINY_RUNS[:3]
    kept = session.record(runs[:2], phase="profile", keep=runs[:2])
    with counting_rows(tiny.transformer) as rows:
        found = session.reference(runs)
        assert sum(rows) == TINY_STEPS  # of the third alone
        again = session.reference(runs[1:])
        assert sum(rows) == TINY_STEPS
    assert found.runs == tuple(runs)
    assert len(found.latents) == TINY_STEPS + 1
    assert torch.equal(found.latents[-1][:2], kept.run.latents[-1])
    assert torch.equal(found.latents[-1][1:], again.latents[-1])
    assert found.schedule.same_run(kept.schedule)
    assert str(session.evaluations) == "profile 16 + trial 0 + refit 8 + validation 0 = 24"
    fresh = Session(tiny, tiny_call(), batch_size=3).reference(runs)
    assert torch.allclose(found.latents[-1], fresh.latents[-1], atol=1e-3)


def test_only_what_is_to_be_kept_is_kept(tiny: Any) -> None:
    session = Session(tiny, tiny_call())
    session.record(TINY_RUNS[:2], phase="profile", keep=TINY_RUNS[1:])
    session.reference(TINY_RUNS[:2])
    assert session.evaluations == Evaluations(profile=2 * TINY_STEPS, refit=TINY_STEPS)


def test_all_prompts_in_lockstep(tiny: Any, tiny_known: Policy) -> None:
    """One call of the pipeline; the network sees a few prompts at a time."""
    policy = solve(tiny_known, compute_steps=3)
    session = Session(tiny, tiny_call(), batch_size=2)
    with counting_rows(tiny.transformer) as rows:
        together = session.lockstep(TINY_RUNS, policy)
    assert rows == [2, 2, 1] * 3
    assert session.evaluations == Evaluations(refit=3 * len(TINY_RUNS))
    alone = torch.cat([session.lockstep([run], policy) for run in TINY_RUNS])
    assert torch.allclose(together, alone, atol=1e-3)


def test_results_are_images_and_their_evaluations_are_counted(
    tiny: Any, tiny_known: Policy, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, policy = Session(tiny, tiny_call()), solve(tiny_known, compute_steps=3)
    hook = tiny.transformer.proj_out.register_forward_hook(clock)
    readings = iter([7.0, 7.5])  # at the begin and the end of choosing a plan
    monkeypatch.setattr("ertacache.integration.choose.perf_counter", lambda: next(readings))
    full = session.generate(TINY_RUNS[:2])
    assert full.results.shape == (2, 3, 32, 32)
    assert 0 <= full.results.min() < full.results.max() <= 1
    assert (full.seconds, full.stats) == (TINY_STEPS, None)
    fast = session.generate(TINY_RUNS[:2], policy)
    assert (fast.seconds, session.evaluations.validation) == (2.5, 2 * TINY_STEPS + 2 * 3)
    assert fast.stats is not None
    assert (fast.stats.computed_steps, fast.stats.reused_steps) == (3, TINY_STEPS - 3)
    assert not torch.equal(fast.results, full.results)
    fewer = session.generate(TINY_RUNS[:1], num_inference_steps=5)
    assert (fewer.seconds, session.evaluations.validation) == (5, 2 * TINY_STEPS + 2 * 3 + 5)
    hook.remove()
    again = session.generate(TINY_RUNS[:2])
    assert torch.equal(again.results, full.results)  # nothing is left attached


def test_progress_is_reported_by_stage(tiny: Any) -> None:
    seen: list[object] = []

    def stage(name: str) -> Any:
        seen.append(name)
        return (lambda *now: seen.append(now)) if name == "profile" else None

    session = Session(tiny, stage=stage)
    session.progress("profile")(1, 2)
    session.progress("refit")(1, 2)
    Session(tiny).progress("profile")(1, 2)
    assert seen == ["profile", (1, 2), "refit"]


def parts(policy: Policy) -> tuple[int, int, int, int]:
    """The four numbers in the provenance of a policy; their sum must be there too."""
    words = policy.provenance["network calls"].split()
    assert words[0::3][:4] == ["profile", "trial", "refit", "validation"]
    *found, total = (int(word) for word in words if word.isdigit())
    assert sum(found) == total
    profile, trial, refit, validation = found
    return profile, trial, refit, validation


def validated(policy: Policy, prompts: int = len(TINY_HELDOUT)) -> int:
    """The full run, the plan, plain reuse and fewer steps, each once per held-out prompt."""
    computed = len(policy.default.compute_steps)
    return prompts * (TINY_STEPS + computed + max(2, computed) + computed)


@pytest.fixture
def refits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The compute schedules of the refit's runs, as they are made."""
    made: list[tuple[int, ...]] = []
    refit_plans = refit.refit_plans

    def spy(session: Session, reference: Any, steps: tuple[int, ...], **more: Any) -> Any:
        made.append(tuple(steps))
        return refit_plans(session, reference, steps, **more)

    monkeypatch.setattr(refit, "refit_plans", spy)
    return made


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Computed steps of the plans that are tried, and on how many prompts, as they are run."""
    return watched(trial, monkeypatch)


@pytest.fixture
def as_solved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The same of the plans that the refit runs as they are."""
    return watched(refit, monkeypatch)


def watched(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    run_plan = module.run_plan

    def spy(session: Session, reference: Any, plan: TrajectoryPlan, **more: Any) -> torch.Tensor:
        made.append((len(plan.compute_steps), len(reference.runs)))
        return run_plan(session, reference, plan, **more)

    monkeypatch.setattr(module, "run_plan", spy)
    return made


def evaluated(trials: list[tuple[int, int]]) -> int:
    return sum(steps * prompts for steps, prompts in trials)


@pytest.mark.parametrize(
    ("name", "batch_size"), [("flux", 1), ("flux", 2), ("wan", 1), ("cogvideox", 2)]
)
def test_the_count_is_the_formula_and_the_networks_own(
    name: str,
    batch_size: int,
    refits: list[tuple[int, ...]],
    trials: list[tuple[int, int]],
    as_solved: list[tuple[int, int]],
) -> None:
    pipe, prompts = CASES[name].build(), TINY_PROMPTS[:3]
    with counting_rows(pipe.transformer) as rows:
        policy = calibrate(
            pipe,
            prompts,
            heldout=TINY_HELDOUT[:1],
            compute_steps=4,
            batch_size=batch_size,
            **tiny_call(name),
        )
    profile, trial, refit, validation = parts(policy)
    assert profile == TINY_STEPS * len(prompts)
    # Plans are fitted on the folds 0 and 2 and tried on the prompt of fold 1, which is decoded once
    # in full and once with the plan of the middle budget. The best of each budget is run with the
    # halves exchanged; the response is measured on the others.
    assert {run for run in trials if run[1] == 1} == {(2, 1), (4, 1), (5, 1)}
    assert [run for run in trials if run[1] != 1] == [(2, 2), (4, 2), (5, 2)]
    assert trial == evaluated(trials) + TINY_STEPS + 4 + 2 * TINY_STEPS
    # The same prompt evaluates the plan as it is, and if that is best, the others do. Every refit
    # runs on all prompts.
    assert as_solved in ([(4, 1)], [(4, 1), (4, 2)])
    assert refit == evaluated(as_solved) + sum(len(steps) * len(prompts) for steps in refits)
    # 3 or 4 ridges, the other compute schedules, 1 or 2 histories, 2 to 4 divisions, the second
    # history; and the best of them, if it is better, once more.
    others = len(set(refits)) - 1 + (name != "flux")
    assert 3 + 1 + 2 + others <= len(refits) <= 4 + 2 + 4 + others + 1 <= ATTEMPTS
    assert validation == validated(policy, prompts=1)
    branches = 1 if name == "flux" else 2  # guidance: two rows, or two calls, for one prompt
    assert sum(rows) == branches * (profile + trial + refit + validation)
    assert max(rows) <= batch_size * (2 if name == "cogvideox" else 1)


def test_what_a_file_saves_and_what_it_does_not(
    tiny: Any,
    tmp_path: Path,
    refits: list[tuple[int, ...]],
    trials: list[tuple[int, int]],
    as_solved: list[tuple[int, int]],
) -> None:
    path = tmp_path / "profile.safetensors"
    call = {"heldout": TINY_HELDOUT, "compute_steps": 4, "profile_path": path} | tiny_call()
    bare = calibrate(tiny, TINY_PROMPTS, refit=False, **call)
    assert parts(bare) == (TINY_STEPS * len(TINY_PROMPTS), 0, 0, validated(bare))
    # All runs are in the file, but not their latents: those of the refit are run again.
    again = calibrate(tiny, TINY_PROMPTS, refit_prompts=2, **call)
    profile, trial, refit, validation = parts(again)
    assert (profile, validation) == (0, validated(again))
    assert trial == evaluated(trials) + TINY_STEPS + 4 + TINY_STEPS
    assert refit == 2 * TINY_STEPS + evaluated(as_solved) + 4 * 2 * len(refits)
    assert refits
    with pytest.raises(ValueError, match="refit_prompts must be at least 1"):
        calibrate(tiny, TINY_PROMPTS, refit_prompts=0, **call)


def test_the_papers_calibration_is_counted(tiny: Any) -> None:
    prompts = TINY_PROMPTS[:2]
    call = {"heldout": TINY_HELDOUT, "method": "paper", "batch_size": 2} | tiny_call()
    once = calibrate(tiny, prompts, threshold=0.9, rectify=False, **call)
    every = TINY_STEPS * len(prompts)
    assert parts(once) == (every, 0, every, validated(once))
    twice = calibrate(tiny, prompts, threshold=0.9, **call)
    assert parts(twice)[2] == 2 * every
    _, _, refit, _ = parts(calibrate(tiny, prompts, compute_steps=5, rectify=False, **call))
    runs, rest = divmod(refit, every)
    assert rest == 0
    assert 1 <= runs <= PASSES + 1


GUIDANCE = {"guidance_scale": [2.0, 5.0, 7.0]}


@pytest.mark.parametrize("varied", [{}, GUIDANCE, GUIDANCE | {"true_cfg_scale": [1.0, 2.0]}])
def test_a_fold_holds_all_values_of_a_varied_argument(tiny: Any, varied: dict[str, Any]) -> None:
    session = Session(tiny, tiny_call() | varied)
    runs = session.number_runs(["a circle"] * 96)
    folds = session.folds(runs)
    assert list(folds) == runs
    every = {run.arguments for run in runs}
    for fold in range(8):
        mine = [run for run in runs if folds[run] == fold]
        assert len(mine) == 12  # they take turns
        assert {run.arguments for run in mine} == every


def test_a_reference_knows_layout_and_branches(tiny: Any) -> None:
    """Of calls without guidance, with guidance in two calls of the network, and in one."""
    guided = {"true_cfg_scale": 2.0, "negative_prompt": "black"}
    wan, cogvideox = (CASES[name].build() for name in ("wan", "cogvideox"))
    packed, bands = Layout(channel=2, grid=(8, 8), patch=2), 3
    for pipe, name, more, layout, channels, branch in (
        (tiny, "flux", {}, packed, 4, False),
        (tiny, "flux", guided, packed, 4, True),
        (wan, "wan", {}, Layout(channel=1), 16, True),
        (wan, "wan", {"guidance_scale": 1.0}, Layout(channel=1), 16, False),
        (cogvideox, "cogvideox", {}, Layout(channel=2), 4, True),
        (cogvideox, "cogvideox", {"guidance_scale": 1.0}, Layout(channel=2), 4, False),
    ):
        found = Session(pipe, tiny_call(name) | more, batch_size=2).reference(TINY_RUNS[:2])
        assert (found.facts.layout, found.facts.branch) == (layout, branch)
        assert found.finest == found.select([1]).finest == Groups(channels, bands)
    assert replace(found, facts=replace(found.facts, layout=None)).finest is None


def test_values_are_spread_over_the_prompts_in_turn() -> None:
    runs = number_runs(TINY_PROMPTS, 3, varied=GUIDANCE | {"eta": [0, 1]})
    assert [run.prompt for run in runs] == TINY_PROMPTS
    assert [run.seed for run in runs] == [3, 4, 5, 6, 7]
    found = [dict(run.arguments) for run in runs]
    assert [each["guidance_scale"] for each in found] == [2.0, 5.0, 7.0, 2.0, 5.0]
    assert [each["eta"] for each in found] == [0, 1, 0, 1, 0]
    assert [list(each) for each in found] == [["eta", "guidance_scale"]] * 5  # sorted by name
    assert number_runs(TINY_PROMPTS, varied={}) == TINY_RUNS


def test_lists_vary_only_where_the_pipeline_takes_none(tiny: Any) -> None:
    call = GUIDANCE | {
        "sigmas": [1.0, 0.5],  # a list is what it takes
        "negative_prompt": ["black", "red"],
        "height": 32,
        "true_cfg_scale": (1.0, 2.0),  # no list
        "joint_attention_kwargs": {"scale": [1, 2]},
        "absent": [1, 2],  # an error of the pipeline's own
        "num_inference_steps": 4,
        "max_sequence_length": [],
        "num_images_per_prompt": [None, 1],
    }
    session = Session(tiny, call)
    assert session.varied == GUIDANCE
    assert session.call == {name: value for name, value in call.items() if name not in GUIDANCE}
    assert session.number_runs(TINY_PROMPTS[:1])[0].arguments == (("guidance_scale", 2.0),)


def test_batches_never_mix_values(tiny: Any) -> None:
    session = Session(tiny, tiny_call() | GUIDANCE, batch_size=2)
    runs = session.number_runs([*TINY_PROMPTS, *TINY_HELDOUT])
    batches = session.batches(runs)
    assert [[run.seed for run in batch] for batch in batches] == [[0, 3], [6], [1, 4], [2, 5]]
    assert all(len({run.arguments for run in batch}) == 1 for batch in batches)
    assert [len(group) for group in group_runs(runs)] == [3, 2, 2]
    assert interleave_runs([run for batch in batches for run in batch]) == runs
    scales = [session.arguments(batch)["guidance_scale"] for batch in batches]
    assert scales == [2.0, 2.0, 5.0, 7.0]
    assert session.arguments(batches[0], guidance_scale=3.0)["guidance_scale"] == 3.0


def test_a_run_has_its_own_value(tiny: Any) -> None:
    """In images and in reference latents, whatever the batch."""
    session = Session(tiny, tiny_call() | GUIDANCE, batch_size=2)
    runs = session.number_runs(TINY_PROMPTS[:2])
    reference = session.reference(runs)
    for place, run in enumerate(runs):
        scale = GUIDANCE["guidance_scale"][place]
        alone = Session(tiny, tiny_call() | {"guidance_scale": scale})
        expected = alone.reference([ProfiledPrompt(run.prompt, run.seed)])
        assert torch.equal(reference.latents[-1][place], expected.latents[-1][0])
        assert tiny.guidance_scale == scale
        session.generate([run])
        assert tiny.guidance_scale == scale


def test_a_second_history_is_there_only_if_all_runs_have_one() -> None:
    """Whichever value comes first; without guidance there is one branch, which is all."""
    pipe = CASES["sd3"].build()
    for values in ([1.0, 5.0], [5.0, 1.0]):
        session = Session(pipe, tiny_call("sd3") | {"guidance_scale": values})
        runs = session.number_runs(TINY_PROMPTS[:2])
        facts = [session.reference([run]).facts for run in runs]
        assert [each.branch for each in facts] == [value > 1 for value in values]
        assert not session.reference(runs).facts.branch


def test_every_value_needs_a_prompt(tiny: Any) -> None:
    call = tiny_call() | {"guidance_scale": [2.0, 5.0, 9.0]}
    sentence = (
        r"guidance_scale has 3 values, but of 2 prompts to calibrate on none is left for 9\.0"
    )
    with pytest.raises(ValueError, match=sentence):
        calibrate(tiny, TINY_PROMPTS[:3], **call)  # one is held out
    with pytest.raises(ValueError, match=sentence):
        profile(tiny, TINY_PROMPTS[:2], **call)
