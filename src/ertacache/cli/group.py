"""How a command ends: one readable line and an exit code, never a traceback for bad input.

Exit code 2 means bad input, 130 an interrupt; a command may define others. Warnings and messages of
the library are lines on standard error as well, and so is what takes seconds to import.
"""

from __future__ import annotations

import logging
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

import typer
from typer.core import TyperGroup

from ertacache.cli.output import is_quiet
from ertacache.distributed import ALONE, Processes, is_launched, launched_number
from ertacache.formats.text import one_line

__all__ = [
    "BAD_INPUT",
    "INTERRUPTED",
    "Interrupted",
    "OneLineGroup",
    "command_line",
    "processes_of",
]

BAD_INPUT = 2
INTERRUPTED = 130
LARGE = ("torch", "diffusers")  # each takes seconds to import
SHARED = ("bench", "calibrate", "generate", "profile", "refit")  # processes share their runs
_COMMAND, _NAME, _PROCESSES = (f"ertacache.{name}" for name in ("command", "name", "processes"))


class Interrupted(KeyboardInterrupt):
    """An interrupt of a command that reports what is left of its work."""


def command_line(context: typer.Context) -> str:
    """The command line as it was given."""
    command = str(context.meta.get(_COMMAND, "ertacache"))
    return command.encode("utf-8", "replace").decode()


class OneLineGroup(TyperGroup):
    """The commands, with every expected failure reported on one line of standard error."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command and end the process with its exit code."""
        given = sys.argv[1:] if args is None else list(args)
        try:
            code = super().main(
                given or ["--help"],
                prog_name or "ertacache",
                complete_var,
                standalone_mode=False,
                windows_expand_args=windows_expand_args,
                **extra,
            )
        except typer.TyperException as error:
            context = getattr(error, "ctx", None)
            where = "ertacache" if context is None else context.command_path
            _report(f"error: {error.format_message()} (see '{where} --help')")
            code = BAD_INPUT
        except typer.Abort:
            code = INTERRUPTED
        except OSError as error:  # the output itself cannot be written
            _report(f"error: {_reason(error)}")
            code = BAD_INPUT
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the command line for the provenance of files."""
        ctx.meta[_COMMAND] = shlex.join(["ertacache", *args])
        ctx.meta[_NAME] = next((arg for arg in args if not arg.startswith("-")), "")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command and report what went wrong."""
        with _readable_warnings(), _readable_messages(), _announced_imports():
            try:
                return self._invoke_together(ctx)
            except KeyboardInterrupt as error:
                _report(f"interrupted{f': {error}' if str(error) else ''}")
                raise typer.Exit(INTERRUPTED) from error
            except BrokenPipeError:
                raise
            except (ValueError, OSError) as error:
                _report(f"error: {_reason(error)}")
                raise typer.Exit(BAD_INPUT) from error

    def _invoke_together(self, ctx: Any) -> Any:
        """Run the command in all processes of a launch, or in the main one if it runs no model."""
        if not is_launched():
            return super().invoke(ctx)
        if ctx.meta[_NAME] not in SHARED:
            return super().invoke(ctx) if launched_number() == 0 else None
        processes = ctx.meta[_PROCESSES] = Processes.launched()
        code: typer.Exit | None = None
        with processes.together():
            try:
                super().invoke(ctx)
            except typer.Exit as ended:  # an exit code of its own is no failure
                code = ended
        processes.leave()
        if code is not None and processes.is_main:
            raise code
        return None


def processes_of(context: typer.Context) -> Processes:
    """The processes that share the work of a command; one unless it was launched with others."""
    found: Processes = context.meta.get(_PROCESSES, ALONE)
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename!r}: {error.strerror}"
    return str(error) or type(error).__name__


def _report(message: str) -> None:
    print(one_line(message), file=sys.stderr, flush=True)  # rich puts it above a progress bar


@contextmanager
def _readable_warnings() -> Iterator[None]:
    """Show warnings as a line each, without the place in the source that they come from."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        _report(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of other libraries, to their users
        warnings.showwarning = show
        yield


@contextmanager
def _readable_messages() -> Iterator[None]:
    """Show what the library logs from INFO upwards, each message once, above any progress bar."""
    logger, handler = logging.getLogger("ertacache"), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


class _Lines(logging.Handler):
    """Writes every message as a line, the first time that it comes."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if is_quiet() and record.levelno < logging.WARNING:
            return
        if message not in self._seen:
            self._seen.add(message)
            _report(message if record.levelno < logging.WARNING else f"warning: {message}")


@contextmanager
def _announced_imports() -> Iterator[None]:
    """Report every large library before it is imported, from whatever place it is."""
    announcer = _Announcer()
    sys.meta_path.insert(0, announcer)
    try:
        yield
    finally:
        sys.meta_path.remove(announcer)


class _Announcer(MetaPathFinder):
    """Finds no module itself: it comes first, which is before the import begins."""

    def __init__(self) -> None:
        self._unseen = {name for name in LARGE if name not in sys.modules}

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname in self._unseen:
            self._unseen.remove(fullname)
            if not is_quiet():
                _report(f"loading {fullname} ...")
