"""A real ComfyUI server on loopback, with our node pack, driven through its HTTP interface."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.comfyui.live.environment import ROOT, Environment, build

START_SECONDS = 240  # on a busy machine
RUN_SECONDS = 900
Workflow = Mapping[str, Any]


class WorkflowError(RuntimeError):
    """A node failed; the message is the one that ComfyUI shows."""


@dataclass(frozen=True)
class Result:
    """What a workflow left behind.

    Attributes:
        outputs: what output nodes report, by the id of the node.
        folder: where files were saved.
    """

    outputs: Mapping[str, Any]
    folder: Path

    def latent(self, node: str) -> Tensor:
        """The latent that a SaveLatent node wrote."""
        (entry,) = self.outputs[node]["latents"]
        return load_file(self.folder / entry["subfolder"] / entry["filename"])["latent_tensor"]

    def images(self, node: str) -> list[Path]:
        """The files that a SaveImage node wrote."""
        found = self.outputs[node]["images"]
        return [self.folder / entry["subfolder"] / entry["filename"] for entry in found]


class Server:
    """A running server."""

    def __init__(self, url: str, base: Path, log: Path) -> None:
        """Address, base directory, and the file of its log."""
        self.url, self.base, self._log = url, base, log

    def get(self, path: str) -> Any:
        """The JSON of an address."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Post JSON; return the JSON of the answer, if it has one."""
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise WorkflowError(error.read().decode()) from error
        return json.loads(text) if text else None

    def submit(self, workflow: Workflow) -> str:
        """Queue a workflow; return the id of its run."""
        run: str = self.post("/prompt", {"prompt": workflow})["prompt_id"]
        return run

    def wait(self, run: str) -> Result:
        """Wait for a run.

        Raises:
            WorkflowError: if a node failed, or the run was interrupted.
        """
        end = time.monotonic() + RUN_SECONDS
        while time.monotonic() < end:
            history = self.get(f"/history/{run}")
            if run in history:
                return self._result(history[run])
            time.sleep(0.05)
        raise TimeoutError(f"no result after {RUN_SECONDS} s; log:\n{self.log()[-4000:]}")

    def run(self, workflow: Workflow) -> Result:
        """Queue a workflow and wait for it."""
        return self.wait(self.submit(workflow))

    def log(self) -> str:
        """What the server wrote so far."""
        return self._log.read_text()

    def _result(self, entry: Mapping[str, Any]) -> Result:
        for kind, data in entry["status"]["messages"]:
            if kind == "execution_error":
                raise WorkflowError(data["exception_message"].strip())
            if kind == "execution_interrupted":
                raise WorkflowError("interrupted")
        return Result(entry["outputs"], self.base / "output")


@contextmanager
def start_server(base: Path, *, options: tuple[str, ...] = ()) -> Iterator[Server]:
    """Start a server with our node pack in ``base``, and stop it in the end.

    Args:
        base: an empty folder for models, custom nodes and outputs.
        options: further options of ComfyUI.
    """
    found = build()
    nodes = base / "custom_nodes"
    nodes.mkdir(parents=True)
    (nodes / "ertacache").symlink_to(ROOT / "comfyui")
    (nodes / "probe").symlink_to(Path(__file__).parent / "probe")
    port, log = _free_port(), base / "server.log"
    with log.open("w") as stream:
        process = _spawn(found, base, port, options, stream)
        server = Server(f"http://127.0.0.1:{port}", base, log)
        try:
            _await(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(timeout=30)


def _spawn(
    found: Environment, base: Path, port: int, options: tuple[str, ...], stream: Any
) -> subprocess.Popen[bytes]:
    command = [str(found.python), "main.py", "--cpu", "--listen", "127.0.0.1", "--port", str(port)]
    command += [
        "--base-directory",
        str(base),
        "--disable-api-nodes",
        "--preview-method",
        "latent2rgb",
    ]
    command += ["--database-url", "sqlite:///:memory:", *options]
    quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        command, cwd=found.comfyui, env=os.environ | quiet, stdout=stream, stderr=stream
    )


def _await(server: Server, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            server.get("/queue")
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError(f"ComfyUI did not start; log:\n{server.log()[-4000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
