"""Where the output of a command goes: ``--quiet`` of every command, and ``--json`` of many.

Results are lines on standard output. With ``--json -`` it holds JSON and nothing else, and the
lines go to standard error.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

__all__ = ["STDOUT", "JsonFile", "is_quiet", "results_stream", "with_quiet"]

STDOUT = Path("-")
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Also write all values to a .json file; - prints only them."
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="Print results, warnings and errors only, no progress."),
]
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
_TAKEN: ContextVar[bool] = ContextVar("taken", default=False)


def is_quiet() -> bool:
    """Whether the command that runs prints no progress."""
    return _QUIET.get()


def results_stream() -> TextIO:
    """Where lines for people go: standard output, unless it holds JSON."""
    return sys.stderr if _TAKEN.get() else sys.stdout


def with_quiet(command: Callable[..., None]) -> Callable[..., None]:
    """The command with ``--quiet``; its ``--json``, if it has one, may take standard output.

    Example:
        >>> def command(*, model: str) -> None:
        ...     print(model, is_quiet())
        >>> with_quiet(command)(model="emoji-flux", quiet=True), is_quiet()
        emoji-flux True
        (None, False)
    """

    def run(quiet: bool, **values: Any) -> None:
        quieted, taken = _QUIET.set(quiet), _TAKEN.set(values.get("json") == STDOUT)
        try:
            command(**values)
        finally:
            _QUIET.reset(quieted)
            _TAKEN.reset(taken)

    signature = inspect.signature(command)
    option = inspect.Parameter(
        "quiet", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Quiet
    )
    shown: Any = run
    shown.__name__, shown.__doc__ = command.__name__, command.__doc__
    shown.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])
    shown.__annotations__ = {**command.__annotations__, "quiet": Quiet}
    return run
