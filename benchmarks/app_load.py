"""Fifty visitors of the web app at once: is everyone answered, and is anything left behind?

Starts ``ertacache app`` with a small policy, and lets 50 visitors ask for an image at the same
moment, several times over. Every request has to be answered; jobs run one at a time, and the others
wait. After each round: memory and threads of the server, files of its session; at the end, what is
left of it. Writes ``results/app.json``; the last line of standard output is the same, compact.

    python benchmarks/app_load.py
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from ertacache.app.engine import Engine
from ertacache.app.requests import Request

RESULTS = Path(__file__).parent.parent / "results"
MODEL, STEPS = "emoji-flux", 4
PROMPTS = "a small pig on a green background\na large crown on a black background"
WAIT = 600.0  # seconds


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def find_handler(address: str, inputs: int, outputs: int) -> int:
    """Number of the handler of a button, by the number of its inputs and outputs."""
    config = httpx.get(f"{address}/config").json()
    (found,) = [
        each["id"]
        for each in config["dependencies"]
        if (len(each["inputs"]), len(each["outputs"])) == (inputs, outputs)
        and any(event == "click" for _, event in each["targets"])
    ]
    return int(found)


def ask(address: str, handler: int, data: Sequence[Any], session: str) -> dict[str, Any]:
    """Start a job as the page does, and wait for its last message."""
    body = {"data": list(data), "fn_index": handler, "session_hash": session}
    # No certificates: to load them takes longer than the request.
    with httpx.Client(base_url=f"{address}/gradio_api", timeout=WAIT, verify=False) as client:
        joined = client.post("/queue/join", json=body)
        if joined.status_code != 200:
            return {"success": False, "status": joined.status_code}
        waited: list[int] = []
        with client.stream("GET", "/queue/data", params={"session_hash": session}) as lines:
            for line in lines.iter_lines():
                message = json.loads(line.removeprefix("data: ")) if line else {}
                if message.get("msg") == "estimation":
                    waited.append(message["rank"])
                if message.get("msg") == "process_completed":
                    return message | {"waited": waited}
    return {"success": False}


def flood(address: str, handler: int, data: Sequence[Any], count: int) -> list[dict[str, Any]]:
    """Ask so many times at once; returns the last message of each."""
    with ThreadPoolExecutor(count) as pool:
        jobs = [pool.submit(ask, address, handler, data, f"visitor{k}") for k in range(count)]
        return [job.result() for job in jobs]


@contextmanager
def started(folder: Path, port: int) -> Iterator[psutil.Process]:
    """The command as a process, with its temporary files in a folder of their own."""
    temporary = folder / "tmp"
    temporary.mkdir()
    options = ["--folder", str(folder), "--port", str(port), "--no-browser", "--quiet"]
    command = [sys.executable, "-m", "ertacache", "app", *options]
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(temporary)}) as process:
        try:
            while process.poll() is None:
                try:
                    httpx.get(f"http://127.0.0.1:{port}/")
                    break
                except httpx.TransportError:
                    time.sleep(0.5)
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def measure(folder: Path, visitors: int, rounds: int) -> list[dict[str, Any]]:
    """A row for every round."""
    asked = Request("a small lemon on a red background", 0, STEPS, 64, 64)
    Engine(folder).calibrate(MODEL, PROMPTS, asked, quick=True)
    data = [MODEL, asked.prompt, asked.seed, STEPS, 64, 64, None, 2.0]
    port, rows = free_port(), []
    with started(folder, port) as server:
        address = f"http://127.0.0.1:{port}"
        handler = find_handler(address, len(data), 1)
        for _ in range(rounds):
            start = time.perf_counter()
            answers = flood(address, handler, data, visitors)
            row = {
                "answered": sum(each["success"] for each in answers),
                "longest_queue": max(max(each["waited"], default=0) for each in answers),
                "seconds": round(time.perf_counter() - start, 1),
                "memory_mb": round(server.memory_info().rss / 2**20),
                "threads": server.num_threads(),
                "files": sum(path.is_file() for path in (folder / "tmp").rglob("*")),
            }
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--visitors", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "app.json")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        rows = measure(Path(place), chosen.visitors, chosen.rounds)
        left = sorted(path.name for path in (Path(place) / "tmp").iterdir())
    found = {"model": MODEL, "steps": STEPS, "visitors": chosen.visitors, "rounds": rows}
    chosen.output.write_text(json.dumps(found | {"left": left}, indent=1) + "\n")
    print(json.dumps(found | {"left": left}))


if __name__ == "__main__":
    main()
