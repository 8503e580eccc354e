"""How long a newcomer waits: the quick start, on a fresh clone, from nothing to an attached policy.

What is measured: seconds of every part, as a user starts it, loading the libraries included, with
the threads that torch takes by itself: the installation (``make setup`` in a clone of this
repository; how long that takes depends on the network), ``make demo`` after it, and every command
and script of ``docs/start.md``. Nothing else should run meanwhile. Writes
``results/newcomer.json``.

    python benchmarks/newcomer.py
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from rows import RESULTS, ROOT, Row

from ertacache.formats.files import write_whole

INSTALLATION = "Installation"
MAKE = {INSTALLATION: "setup", "Demo": "demo"}
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.M | re.S)
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.M | re.S)
BUSY = 1.0  # load of other programs, from which on times say little


def parts(page: str) -> Iterator[tuple[str, list[str]]]:
    """Title and command lines of every section of the quick start that runs something."""
    for title, text in SECTION.findall(page):
        lines = list[str]()
        for language, block in BLOCK.findall(text):
            if language == "python":
                lines.append(shlex.join(["python", "-c", block]))
            else:
                words = [shlex.split(line, comments=True) for line in block.splitlines()]
                lines += [shlex.join(line) for line in words if line[:1] == ["ertacache"]]
        if lines:
            yield title, lines


def seconds(lines: Sequence[str], folder: Path, programs: Path) -> float:
    """Run command lines one after the other, with the programs of an environment first."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{programs}{os.pathsep}{environment['PATH']}"
    begun = perf_counter()
    for line in lines:
        done = subprocess.run(
            shlex.split(line), cwd=folder, env=environment, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"{line} ended with {done.returncode}: {done.stderr[-2000:]}")
    return perf_counter() - begun


def measure(repository: str) -> list[Row]:
    """A row for every part, in a clone that is removed at the end."""
    rows, load = [], os.getloadavg()[0]
    with TemporaryDirectory() as name:
        clone, folder = Path(name) / "clone", Path(name) / "work"
        folder.mkdir()
        subprocess.run(["git", "clone", "--quiet", repository, str(clone)], check=True)
        todo = [(part, [f"make -C {clone} {target}"]) for part, target in MAKE.items()]
        todo += parts((clone / "docs" / "start.md").read_text())
        for part, lines in todo:
            taken = seconds(lines, folder, clone / ".venv" / "bin")
            print(f"{part}: {taken:.0f} s", file=sys.stderr, flush=True)
            rows.append(
                {
                    "part": part,
                    "seconds": round(taken, 1),
                    "cores": len(os.sched_getaffinity(0)),
                    "load_before": round(load, 1),
                }
            )
    return rows


def newcomer_table(rows: Sequence[Row]) -> str:
    """Seconds of every part."""
    if not rows:
        return "Not measured yet."
    cores, load = rows[0]["cores"], rows[0]["load_before"]
    lines = [
        f"On {cores} CPU core{'' if cores == 1 else 's'}, without a GPU:",
        "",
        "| part | seconds |",
        "|---|--:|",
        *(f"| {row['part']} | {row['seconds']:.0f} |" for row in rows),
    ]
    if load > BUSY:
        lines += ["", f"The machine was busy (load {load:g}): these times say little."]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run all parts and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repository", default=str(ROOT), help="what is cloned")
    parser.add_argument("--output", type=Path, default=RESULTS / "newcomer.json")
    given = parser.parse_args(arguments)
    rows = measure(given.repository)
    write_whole(given.output, json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
