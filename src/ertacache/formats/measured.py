"""The measured work in a policy, and what of it would be lost if another policy took its place.

Profiled runs, fits and plans that were measured cost evaluations of the network. Plans that were
only solved are not counted: they are solved again in a moment.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import replace

from ertacache.formats.fingerprint import Fingerprint
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import ProfiledPrompt

__all__ = ["lost_work"]


def lost_work(old: Policy, new: Policy | None) -> str:
    """What was measured in ``old`` and is not in ``new``, in words; empty if nothing is lost.

    A plan that was measured again is not lost.

    Args:
        old: a policy that is to be overwritten.
        new: the policy in its place; None if it will hold nothing of ``old``.
    """
    if new is not None and not _covers(new.fingerprint, old.fingerprint):
        new = None
    runs, fits = _runs(old), {fit.computed for fit in old.fits}
    if new is not None and _same_schedule(old, new):
        runs -= _runs(new)
        fits -= {fit.computed for fit in new.fits}
    again = [] if new is None else _measured_plans(new)
    plans = [plan for plan in _measured_plans(old) if not any(p.replaces(plan) for p in again)]
    lost = [
        *_counted(runs, "run", " of a profile"),
        *_counted(fits, "measured fit"),
        *_counted(plans, "measured plan"),
    ]
    return ", ".join(lost)


def _covers(new: Fingerprint, old: Fingerprint) -> bool:
    """Whether both are of the same runs; the new one may add values of guidance."""
    values = all(set(old.guidance[k]) <= set(new.guidance.get(k, ())) for k in old.guidance)
    return values and replace(new, guidance=old.guidance, versions=old.versions) == old


def _same_schedule(old: Policy, new: Policy) -> bool:
    if old.profile is None or new.profile is None:
        return False
    return new.profile.schedule.same_run(old.profile.schedule)


def _runs(policy: Policy) -> set[ProfiledPrompt]:
    return set() if policy.profile is None else set(policy.profile.runs)


def _measured_plans(policy: Policy) -> list[FittedPlan]:
    return [p for p in policy.plans if p.measured_error is not None or p.validation]


def _counted(found: Sized, what: str, of: str = "") -> list[str]:
    """How many there are, in words; nothing if there are none."""
    return [f"{len(found)} {what}{'' if len(found) == 1 else 's'}{of}"] if found else []
