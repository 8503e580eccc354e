"""Wall time of a profile and a refit on 1, 2 and 4 processes, and whether their files are equal.

What is measured: the commands from start to end, as a user starts them, loading the model and the
libraries included, one thread per process. The files must be equal bit for bit; the hashes of all
are kept. On two cores four processes cannot be faster than two: they show that nothing breaks.

    python benchmarks/scale.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from rows import RESULTS, Row

from ertacache.formats.files import write_whole

MODEL = "emoji-flux"
COUNTS = (1, 2, 4)


def run(count: int, folder: Path, *arguments: str) -> float:
    """Run a command in so many processes; returns its seconds."""
    command = [sys.executable, "-m"]
    if count > 1:
        command += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m"]
    begun = perf_counter()
    subprocess.run(
        [*command, "ertacache", *arguments],
        check=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    return perf_counter() - begun


def measure(count: int, *, prompts: int, steps: int) -> Row:
    """Profile and refit in a folder of its own."""
    load = os.getloadavg()[0]
    with TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "policy.safetensors"
        call = ("--limit", str(prompts), "--steps", str(steps))
        profiled = run(count, folder, "profile", MODEL, *call, "-o", path.name)
        profile = hashlib.sha256(path.read_bytes()).hexdigest()
        refitted = run(count, folder, "refit", path.name, "--speedup", "2")
        policy = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "model": MODEL,
        "processes": count,
        "prompts": prompts,
        "steps": steps,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(load, 1),
        "profile_seconds": round(profiled, 1),
        "refit_seconds": round(refitted, 1),
        "profile_sha256": profile,
        "policy_sha256": policy,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure all numbers of processes and write the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16, help="calibration prompts")
    parser.add_argument("--steps", type=int, default=30, help="sampling steps")
    parser.add_argument("--output", type=Path, default=RESULTS / "scale.json")
    given = parser.parse_args(arguments)
    rows = []
    for count in COUNTS:
        rows.append(measure(count, prompts=given.prompts, steps=given.steps))
        print(f"{count} processes: {rows[-1]['profile_seconds']} s, {rows[-1]['refit_seconds']} s")
    if len({(row["profile_sha256"], row["policy_sha256"]) for row in rows}) != 1:
        raise SystemExit("the files differ between numbers of processes")
    write_whole(given.output, json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, separators=(",", ":")))


if __name__ == "__main__":
    main()
