"""``ertacache app``: the web app, on this machine only unless another address is given."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ertacache.cli.console import print_line

__all__ = ["EXAMPLES", "app"]

EXAMPLES = ("ertacache app", "ertacache app --folder my-models --port 8000 --no-browser")
HOST, PORT = "127.0.0.1", 7860
OPEN = "warning: {} can be reached by others: everyone who can connect can use this machine"


def app(
    folder: Annotated[
        Path,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Working folder: pipelines, policies and results files; new policies go there.",
        ),
    ] = Path(),
    host: Annotated[
        str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on.")
    ] = HOST,
    port: Annotated[
        int, typer.Option("--port", metavar="N", min=1, max=65535, help="Port to listen on.")
    ] = PORT,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Try models and policies in a browser."""
    if find_spec("gradio") is None:
        raise ValueError("the app needs gradio: pip install 'ertacache[app]'")
    if not folder.is_dir():
        raise ValueError(f"there is no folder {str(folder)!r}")
    _check_port(host, port)
    from ertacache.app.engine import Engine
    from ertacache.app.server import serve

    if host not in (HOST, "localhost", "::1"):
        print_line(OPEN.format(host))
    shown = f"[{host}]" if ":" in host else host
    print_line(f"The app: http://{shown}:{port} (end it with Ctrl-C)")
    found = {_label(path, folder): path for path in _results(folder)}
    serve(Engine(folder), results=found, host=host, port=port, browser=browser)


def _results(folder: Path) -> list[Path]:
    """Results files in the working folder, and in ``results`` inside of it."""
    root = folder.resolve()
    found = [*root.glob("bench*.json"), *root.glob("results/bench*.json")]
    return sorted(path for path in found if path.resolve().is_relative_to(root))


def _label(path: Path, folder: Path) -> str:
    """The name of a results file in the working folder, without its suffix."""
    return path.relative_to(folder.resolve()).with_suffix("").as_posix()


def _check_port(host: str, port: int) -> None:
    """Raise if the address cannot be listened on."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family):
            pass
    except OSError as cause:
        reason = cause.strerror or str(cause)
        raise ValueError(
            f"cannot listen on {host}:{port}: {reason}; give another --port"
        ) from cause
