"""How often calibration asks the network: counted in the network itself, and by formula."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ertacache.calibration import calibrate, refining, solve
from ertacache.calibration.paper import PASSES
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.integration.refit import refit_run
from tests.integration.tiny import CASES, STEPS

PROMPTS = ["a red circle", "a blue square", "a red square", "a blue circle", "a circle on black"]
HELDOUT = ["a black square", "a red circle moving left"]
WORDS = {"max_sequence_length": 8, "num_inference_steps": STEPS}


@contextmanager
def counting_rows(network: Any) -> Iterator[list[int]]:
    """The rows of every batch that reaches the network's last layer."""
    rows: list[int] = []
    hook = network.proj_out.register_forward_hook(lambda _, args, out: rows.append(len(out)))
    yield rows
    hook.remove()


def parts(policy: Policy) -> tuple[int, int, int]:
    """The three numbers that the policy tells; their sum must be there too."""
    words = policy.provenance["network calls"].split()
    assert words[0::3][:3] == ["profile", "refit", "validation"]
    profile, refit, validation, total = (int(word) for word in words if word.isdigit())
    assert profile + refit + validation == total
    return profile, refit, validation


def validated(policy: Policy) -> int:
    """The full run, the policy, plain reuse and fewer steps, each once per held-out prompt."""
    computed = len(policy.compute_steps)
    return len(HELDOUT) * (STEPS + computed + max(2, computed) + computed)


@pytest.fixture
def refits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The schedules of the refit's runs, as they are made."""
    made: list[tuple[int, ...]] = []

    def spy(pipe: Any, policy: Policy, **arguments: Any) -> Any:
        made.append(policy.compute_steps)
        return refit_run(pipe, policy, **arguments)

    monkeypatch.setattr(refining, "refit_run", spy)
    return made


@pytest.mark.parametrize("name", ["flux", "wan", "cogvideox"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_count_is_the_formula_and_the_networks_own(
    name: str, batch_size: int, refits: list[tuple[int, ...]]
) -> None:
    pipe, case = CASES[name].build(), CASES[name]
    with counting_rows(pipe.transformer) as rows:
        policy = calibrate(
            pipe,
            PROMPTS,
            heldout=HELDOUT,
            compute_steps=4,
            batch_size=batch_size,
            **(WORDS | case.arguments),
        )
    profile, refit, validation = parts(policy)
    assert profile == STEPS * len(PROMPTS)
    # The larger half of the prompts judges the policy as it is. Then its schedule, fitted in all
    # ways, and the uniform one run on all of them, and the best, if it is better, once more.
    assert refit == 4 * 3 + sum(len(steps) * len(PROMPTS) for steps in refits)
    tried = len(refining.FITS) - 1 + len(set(refits))
    assert len(refits) in {tried, tried + 1}
    assert validation == validated(policy)
    branches = 1 if name == "flux" else 2  # guidance: two rows, or two calls, for one prompt
    assert sum(rows) == branches * (profile + refit + validation)
    assert max(rows) <= batch_size * (2 if name == "cogvideox" else 1)


def test_what_a_file_saves_and_what_it_does_not(
    tmp_path: Path, refits: list[tuple[int, ...]]
) -> None:
    pipe, case = CASES["flux"].build(), CASES["flux"]
    path = tmp_path / "profile.safetensors"
    call = {"heldout": HELDOUT, "compute_steps": 4, "profile_path": path}
    call |= WORDS | case.arguments
    bare = calibrate(pipe, PROMPTS, refit=False, **call)
    assert parts(bare) == (STEPS * len(PROMPTS), 0, validated(bare))
    # All runs are in the file, but not their latents: those of the refit are run again.
    again = calibrate(pipe, PROMPTS, refit_prompts=2, **call)
    profile, refit, validation = parts(again)
    assert (profile, validation) == (0, validated(again))
    assert refit == 2 * STEPS + 4 * 1 + 4 * 2 * len(refits)
    assert refits
    with pytest.raises(ValueError, match="refit_prompts must be at least 1"):
        calibrate(pipe, PROMPTS, refit_prompts=0, **call)


def test_the_papers_calibration_is_counted() -> None:
    pipe, case = CASES["flux"].build(), CASES["flux"]
    call = {"heldout": HELDOUT, "method": "paper"} | WORDS | case.arguments
    once = calibrate(pipe, PROMPTS, threshold=0.9, rectify=False, **call)
    assert parts(once) == (40, STEPS * len(PROMPTS), validated(once))
    twice = calibrate(pipe, PROMPTS, threshold=0.9, **call)
    assert parts(twice)[1] == 2 * STEPS * len(PROMPTS)
    assert twice.provenance["threshold"] == "0.9"
    _, refit, _ = parts(calibrate(pipe, PROMPTS, compute_steps=5, rectify=False, **call))
    runs, rest = divmod(refit, STEPS * len(PROMPTS))
    assert rest == 0
    assert 1 <= runs <= PASSES + 1


def test_solving_asks_no_network(known: Profile, pipe: Any) -> None:
    with counting_rows(pipe.transformer) as rows:
        solve(known, speedup=2.0)
        solve(known, method="paper", speedup=2.0)
    assert rows == []
