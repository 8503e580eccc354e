"""A launcher for tests: forks processes that have loaded everything, and runs a task in each.

``python -m tests.distributed.launch LAUNCHES``, with LAUNCHES as JSON, runs the
launches one after another and prints the exit codes of their processes as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

STEPS, COMPUTED = 6, 3
PROMPTS = ["a red circle", "a blue square", "a red square", "a blue circle", "a circle"]
HELDOUT = ["a black square", "a red circle moving left"]

Launch = dict[str, Any]


def launch(*launches: Launch) -> list[list[int]]:
    """Run launches in a process of its own with one thread; exit codes by launch and process."""
    root = Path(__file__).parents[2]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    command = [sys.executable, "-m", "tests.distributed.launch", json.dumps(launches, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def finished(folder: Path) -> Counter[str]:
    """Calls of the pipeline that ended, in all processes of all launches in a folder."""
    found: Counter[str] = Counter()
    for path in folder.glob("calls-*"):
        found.update(path.read_text().splitlines())
    return found


def _main(launches: list[Launch]) -> None:
    from tests.distributed import tasks  # loads everything, before the processes are forked

    tasks.prepare()
    codes = []
    for number, each in enumerate(launches):
        task: Callable[..., None] = getattr(tasks, each.pop("task"))
        count, folder = each.pop("count"), Path(each.pop("folder"))
        folder.mkdir(parents=True, exist_ok=True)
        codes.append(_fork(task, count, folder, number, each))
    sys.stdout.write(json.dumps(codes) + "\n")


def _fork(
    task: Callable[..., None], count: int, folder: Path, launch: int, settings: Launch
) -> list[int]:
    port, children = _free_port(), []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            _run(task, folder, f"{launch}-{rank}", settings)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def _run(task: Callable[..., None], folder: Path, name: str, settings: Launch) -> None:
    """Run a task in a forked process, and end it."""
    code = 1
    try:
        for stream, kind in ((1, "out"), (2, "err")):
            file = os.open(folder / f"{kind}-{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, stream)
        signal.alarm(120)  # a test must not hang
        task(folder, name, **settings)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port: int = place.getsockname()[1]
        return port


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
