"""All rows, and the published facts of each, none of which depends on the machine."""

from __future__ import annotations

from typing import Any

from ertacache.integration.identity import find_denoisers
from tests.compatibility import flux, image, newer, unets, video, wan
from tests.compatibility.checks import Subject, refusal
from tests.compatibility.rows import COMPUTED, STEPS, Row
from tests.compatibility.watching import Calls

ROWS: tuple[Row, ...] = tuple(
    row for module in (flux, unets, image, newer, wan, video) for row in module.ROWS
)
GREEN = tuple(row for row in ROWS if not row.refused)
REFUSED = tuple(row for row in ROWS if row.refused)


def green_facts(subject: Subject) -> dict[str, Any]:
    """The published facts of a pipeline that passes every check."""
    networks, scheduler = find_denoisers(subject.pipe), subject.pipe.scheduler
    _, seen = subject.attached
    return {
        "model": subject.row.title,
        "pipeline": subject.row.pipeline,
        "networks": {name: type(module).__name__ for name, module in networks.items()},
        "scheduler": type(scheduler).__name__,
        "steps": STEPS,
        "compute_steps": len(COMPUTED),
        "calls": {name: count_calls(subject.calls, name) for name in networks},
        "calls_attached": {name: count_calls(seen.calls, name) for name in networks},
    }


def count_calls(calls: Calls, name: str) -> int:
    return sum(network == name for _, network in calls)


def refused_facts(row: Row) -> dict[str, Any]:
    """The published facts of a pipeline that is refused."""
    scheduler = type(row.build().scheduler).__name__
    return {
        "model": row.title,
        "pipeline": row.pipeline,
        "scheduler": scheduler,
        "refused": refusal(row),
    }
