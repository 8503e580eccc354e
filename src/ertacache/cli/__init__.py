"""The command line: one module per command, named as the command.

Importing it loads neither torch nor diffusers; a command imports what it needs when it runs. A new
command is a module with a function of its own name and ``EXAMPLES``, and a line in ``_COMMANDS``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import ertacache
from ertacache.cli import (
    app,
    bench,
    calibrate,
    check,
    demo,
    generate,
    inspect,
    merge,
    metrics,
    profile,
    refit,
    report,
    solve,
)
from ertacache.cli.group import OneLineGroup
from ertacache.cli.options import expand_bundles
from ertacache.cli.output import with_quiet
from ertacache.distributed import launched_number

__all__ = ["main", "program"]

program = typer.Typer(
    cls=OneLineGroup,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_COMMANDS: dict[str, tuple[Callable[..., None], Sequence[str]]] = {
    "demo": (demo.demo, demo.EXAMPLES),
    "profile": (profile.profile, profile.EXAMPLES),
    "merge": (merge.merge, merge.EXAMPLES),
    "solve": (solve.solve, solve.EXAMPLES),
    "calibrate": (calibrate.calibrate, calibrate.EXAMPLES),
    "refit": (refit.refit, refit.EXAMPLES),
    "check": (check.check, check.EXAMPLES),
    "generate": (generate.generate, generate.EXAMPLES),
    "inspect": (inspect.inspect, inspect.EXAMPLES),
    "bench": (bench.bench, bench.EXAMPLES),
    "report": (report.report, report.EXAMPLES),
    "metrics": (metrics.metrics, metrics.EXAMPLES),
    "app": (app.app, app.EXAMPLES),
}


def _epilog(examples: Sequence[str]) -> str:
    # \b keeps the lines of a paragraph as they are.
    return "\n".join(["\b\nExamples:", *(f"  {line}" for line in examples)])


for _name, (_function, _examples) in _COMMANDS.items():
    program.command(_name, epilog=_epilog(_examples))(with_quiet(expand_bundles(_function)))


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ertacache {ertacache.__version__}")
        raise typer.Exit


@program.callback(epilog=_epilog([examples[0] for _, examples in _COMMANDS.values()]))
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Profile a diffusers pipeline once, then choose any speed-up."""


def main() -> None:
    """Run the command line of this process."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None or launched_number() > 0:  # the main process speaks for all
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a prompt must not end a run on an ASCII terminal
    for name in ("SIGTERM", "SIGHUP"):  # of a job's time limit, or a closed terminal
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, signal.default_int_handler)
    program()
