"""The command line: a list of commands, one file each. Knows no algorithm.

Importing it loads neither torch nor diffusers; a command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import ertacache
from ertacache.cli import (
    benching,
    calibrating,
    generating,
    inspecting,
    measuring,
    profiling,
    reporting,
    solving,
)
from ertacache.cli.demo import demo
from ertacache.cli.group import OneLineGroup

__all__ = ["app", "main"]

app = typer.Typer(
    cls=OneLineGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_COMMANDS: dict[str, tuple[Callable[..., None], Sequence[str]]] = {
    "demo": (demo, ()),
    "profile": (profiling.profile, profiling.PROFILE_EXAMPLES),
    "merge": (profiling.merge, profiling.MERGE_EXAMPLES),
    "solve": (solving.solve, solving.EXAMPLES),
    "calibrate": (calibrating.calibrate, calibrating.EXAMPLES),
    "generate": (generating.generate, generating.EXAMPLES),
    "inspect": (inspecting.inspect, inspecting.EXAMPLES),
    "bench": (benching.bench, benching.EXAMPLES),
    "report": (reporting.report, reporting.EXAMPLES),
    "metrics": (measuring.metrics, measuring.EXAMPLES),
}


def _epilog(examples: Sequence[str]) -> str | None:
    # \b keeps the lines of a paragraph as they are.
    return "\n".join(["\b\nExamples:", *(f"  {line}" for line in examples)]) if examples else None


for _name, (_function, _examples) in _COMMANDS.items():
    app.command(_name, epilog=_epilog(_examples))(_function)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ertacache {ertacache.__version__}")
        raise typer.Exit


@app.callback(
    epilog="\b\nExample:\n  ertacache calibrate emoji-flux --speedup 2 -o policy.safetensors"
)
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Profile a diffusers pipeline once, then pick any speed-up; the picture stays."""


def main() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a prompt must not end a run on an ASCII terminal
    app()
