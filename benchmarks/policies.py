"""The calibrated policy of a bundled model, made once for all benchmarks.

Profile, trials and refitted plans are those of ``calibrate``. They are kept in ``build/policies``
under a name that changes with the weights, the call, the prompts and the code that calibrates, so
that a policy of another state is never taken.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from rows import ROOT

import ertacache
from ertacache.calibration.profile import profile_runs
from ertacache.calibration.refit import refit_budget
from ertacache.calibration.session import Session
from ertacache.calibration.trial import measure_fits
from ertacache.core.plans import steps_for_speedup
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.identity import find_denoisers
from ertacache.integration.solve import profile_of

FOLDER = ROOT / "build" / "policies"
LAYERS = ("core", "formats", "integration", "calibration")


def calibrated(
    session: Session,
    runs: Sequence[ProfiledPrompt],
    *,
    speedups: Iterable[float] = (),
    folder: Path | None = None,
) -> Policy:
    """The policy of some calibration prompts, with a plan refitted for every speed-up.

    Args:
        session: the pipeline and how it is called.
        runs: the calibration prompts, all of which are refitted on.
        speedups: of the plans.
        folder: where policies are kept.
    """
    path = (folder or FOLDER) / f"{_name(session, runs)}.safetensors"
    if path.exists():
        policy = Policy.load(path)
    else:
        policy = measure_fits(session, profile_runs(session, runs, keep=runs), runs)
        _save(policy, path)
    schedule = profile_of(policy).schedule
    for speedup in speedups:
        budget = steps_for_speedup(schedule.num_steps, speedup)
        if policy.find_plan(schedule, budget) is None:
            plan = refit_budget(session, policy, session.reference(runs), budget)
            policy = policy.with_plan(plan)
            _save(policy, path)
    return policy


def _save(policy: Policy, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    policy.save(path)


def _name(session: Session, runs: Sequence[ProfiledPrompt]) -> str:
    """A digest of all that a policy depends on."""
    digest = hashlib.sha256()
    for network in find_denoisers(session.pipe).values():
        for name, weights in network.state_dict().items():
            digest.update(name.encode() + weights.cpu().contiguous().numpy().tobytes())
    digest.update(repr((sorted(session.call.items()), session.batch_size, list(runs))).encode())
    source = Path(ertacache.__file__).parent
    for layer in LAYERS:
        for path in sorted((source / layer).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
