"""All rows, and what is published of each: no number that another machine would change."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ertacache.integration.fingerprints import find_denoisers
from tests.compatibility.checks import Subject, refusal
from tests.compatibility.image import ROWS as IMAGES
from tests.compatibility.rows import COMPUTED, STEPS, Row
from tests.compatibility.video import ROWS as VIDEOS

GREEN = tuple(row for row in (*IMAGES, *VIDEOS) if not row.refused)
REFUSED = tuple(row for row in (*IMAGES, *VIDEOS) if row.refused)


def green_facts(subject: Subject) -> dict[str, Any]:
    """What a row of the page says of a pipeline that holds every check."""
    networks, scheduler = find_denoisers(subject.pipe), subject.pipe.scheduler
    _, seen = subject.attached
    return {
        "model": subject.row.title,
        "pipeline": subject.row.pipeline,
        "networks": {name: type(module).__name__ for name, module in networks.items()},
        "scheduler": type(scheduler).__name__,
        "steps": STEPS,
        "compute_steps": len(COMPUTED),
        "calls": dict(Counter(name for _, name in subject.calls)),
        "calls_attached": dict(Counter(name for _, name in seen.calls)),
    }


def refused_facts(row: Row) -> dict[str, Any]:
    """What a row of the page says of a pipeline that no policy is made for."""
    scheduler = type(row.build().scheduler).__name__
    return {
        "model": row.title,
        "pipeline": row.pipeline,
        "scheduler": scheduler,
        "refused": refusal(row),
    }
