"""Everything in a policy file as HTML: what it is for, its plans, frontier, fits and profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from ertacache.app.views import draw_frontier, show_mask, show_table
from ertacache.calibration.validate import recommend
from ertacache.core.frontier import MeasuredFit
from ertacache.formats.fingerprint import Fingerprint
from ertacache.formats.fitted import FittedPlan
from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.formats.text import decibels
from ertacache.integration.solve import PlanSolver

__all__ = ["frontier_html", "policy_html"]


def policy_html(policy: Policy) -> str:
    """The whole policy, section by section."""
    profile = policy.profile
    parts = [
        f'<p class="erta-lead">{escape(repr(policy)[1:-1])}</p>',
        _section("Frontier", frontier_html(policy)),
        *(_section(_title(plan), _plan(plan)) for plan in policy.plans),
        _section("Made for", _facts(dict(_made_for(policy.fingerprint)))),
        _section("Where it comes from", _facts(policy.provenance)),
    ]
    if profile is not None:
        parts.append(_section("Profile", _profile(profile)))
    if policy.fits:
        parts.append(_section("Fits measured on the network", _fits(policy.fits)))
    return "".join(parts)


def frontier_html(policy: Policy) -> str:
    """The frontier of a policy: a figure, and a row for every number of computed steps."""
    figure = draw_frontier(policy)
    if policy.profile is None:
        return figure
    steps = policy.profile.num_steps
    rows = [
        [
            str(len(row.compute_steps)),
            f"{steps / len(row.compute_steps):.2f}x",
            decibels(row.predicted_psnr) if len(row.compute_steps) < steps else "identical",
            "" if row.measured_psnr is None else decibels(row.measured_psnr),
            show_mask(row.compute_steps, steps),
        ]
        for row in PlanSolver(policy).rows()
    ]
    columns = ["computed steps", "fewer", "predicted PSNR", "measured PSNR", "compute schedule"]
    table = show_table(columns, rows, label="frontier")
    return f"{figure}<details><summary>All {len(rows)} points</summary>{table}</details>"


def _section(title: str, content: str) -> str:
    return f"<section><h3>{escape(title)}</h3>{content}</section>"


def _title(plan: FittedPlan) -> str:
    computed = len(plan.compute_steps)
    return f"Plan: {computed} of {plan.num_steps} steps computed, {plan.speedup:.2f}x fewer"


def _plan(plan: FittedPlan) -> str:
    """The compute schedule of a plan, and what was measured of it."""
    strip = show_mask(plan.compute_steps, plan.num_steps)
    facts: dict[str, str] = {"method": plan.method}
    for name, error in (("predicted", plan.predicted_error), ("measured", plan.measured_error)):
        if error is not None:
            facts[f"{name} error of the final latent"] = f"{error:.3g}"
    shown = strip + _facts(facts)
    if not plan.validation:
        return f"{shown}<p>Not measured on held-out prompts.</p>"
    rows = [
        [escape(r.method), str(r.computed_steps), f"{r.speedup:.2f}x", decibels(r.psnr)]
        for r in plan.validation
    ]
    columns = ["", "computed steps", "speed-up", "PSNR"]
    where = f"Measured on {plan.validation[0].measured_on}, to the full run"
    table = show_table(columns, rows, label=where)
    verdict = escape(str(recommend(plan.validation)))
    return f"{shown}<p>{where}:</p>{table}<p>{verdict}</p>"


def _made_for(run: Fingerprint) -> Iterator[tuple[str, str]]:
    yield "pipeline", run.pipeline
    yield "network", f"{run.denoiser} ({run.denoiser_hash[:12]}), {run.dtype}"
    yield "scheduler", run.scheduler
    config = ", ".join(f"{key}={value}" for key, value in run.scheduler_config.items())
    yield "scheduler settings", config or "default configuration"
    yield "prediction", run.prediction
    guidance = (f"{k} {', '.join(f'{v:g}' for v in values)}" for k, values in run.guidance.items())
    yield "guidance", "; ".join(guidance) or "none"
    yield "latent", " x ".join(map(str, run.latent_shape)) or "a scalar"
    yield "versions", ", ".join(f"{name} {text}" for name, text in run.versions.items())


def _facts(facts: Mapping[str, str]) -> str:
    """Names and values, both escaped."""
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f'<table class="erta-facts"><tbody>{rows}</tbody></table>'


def _profile(profile: Profile) -> str:
    """Steps, noise levels and groups, and every prompt."""
    sigmas = profile.schedule.sigmas
    facts = {
        "runs": f"{profile.num_runs} of {profile.num_steps} steps",
        "sigmas": f"{sigmas[0]:.4g} to {sigmas[-1]:.4g}",
        "groups": "one" if profile.finest is None else str(profile.finest),
    }
    if profile.expert_steps:
        facts["networks change at"] = ", ".join(f"step {k}" for k in profile.expert_steps)
    rows = [
        [
            escape(run.prompt),
            str(run.seed),
            escape(", ".join(f"{name}={value}" for name, value in run.arguments)),
        ]
        for run in profile.runs
    ]
    table = show_table(["prompt", "seed", "arguments"], rows, label="profiled prompts")
    return (
        f"{_facts(facts)}<details><summary>All {profile.num_runs} prompts</summary>"
        f"{table}</details>"
    )


def _fits(fits: Sequence[MeasuredFit]) -> str:
    """How plans are fitted best, by the number of computed steps."""
    rows = [
        [
            str(found.computed),
            str(found.fit.history),
            f"{found.fit.ridge:g}",
            str(found.fit.order),
            escape(str(found.fit.groups)),
            "uniform" if found.uniform else "searched",
            f"{found.error_ratio:.2f}",
        ]
        for found in fits
    ]
    names = ["computed steps", "history", "ridge", "order", "groups", "schedule", "error ratio"]
    return show_table(names, rows, label="fits")
