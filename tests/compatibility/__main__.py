"""Run every check on every pipeline, and write results/compatibility.json.

python -m tests.compatibility && python benchmarks/tables.py
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

from ertacache.formats.files import write_whole
from tests.compatibility.checks import CHECKS, make_subject
from tests.compatibility.matrix import GREEN, REFUSED, green_facts, refused_facts

RESULTS = Path(__file__).parent.parent.parent / "results" / "compatibility.json"


def main() -> None:
    """Stop at the first pipeline that fails a check."""
    warnings.simplefilter("ignore")  # pipelines warn about their own configurations
    rows = []
    for row in GREEN:
        print(row.title)  # noqa: T201
        subject = make_subject(row)
        for check in CHECKS:
            check(subject)
        rows.append(green_facts(subject))
    rows += map(refused_facts, REFUSED)
    write_whole(RESULTS, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
