"""What the commands print: lines, facts, tables, step masks, progress bars.

Results go to standard output, progress to standard error; colour only on a terminal that wants it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from ertacache.cli.group import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.text import Text

__all__ = ["Stages", "decibels", "draw_mask", "print_fact", "print_line", "print_table"]

COMPUTED, REUSED = "█", "·"
PLAIN_COMPUTED, PLAIN_REUSED = "#", "."  # where the output has no such characters
PLAIN_WIDTH = 200  # columns of a table in a file or a pipe


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    console = Console(
        file=stream,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PLAIN_WIDTH
    return console


def print_line(*parts: str | Text) -> None:
    """Print one line, however long; above a progress bar, if there is one."""
    console = _console()
    with console.capture() as captured:
        console.print(*parts, soft_wrap=True)
    # Not by the console, which would write past the stream that rich puts in place for its bars.
    print(captured.get(), end="", flush=True)


def print_fact(name: str, value: object) -> None:
    """Print a name and a value, without control characters that a file may hold."""
    from rich.text import Text

    shown = value if isinstance(value, Text) else Text(one_line(value))
    print_line(Text(f"{name:<13}", style="bold"), shown)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print a table; the first column holds words, the others numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    print_line("")
    print_line(Text(title, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    _console().print(table)
    print_line("")


def decibels(value: float) -> str:
    """A PSNR as it is printed.

    Example:
        >>> decibels(44.79), decibels(float("inf"))
        ('44.8 dB', 'identical')
    """
    return "identical" if math.isinf(value) else f"{value:.1f} dB"


def draw_mask(compute_steps: Iterable[int], num_steps: int) -> Text:
    """A step mask with one character per step.

    Example:
        >>> str(draw_mask([0, 2], 4)) in ("█·█·", "#.#.")
        True
    """
    from rich.text import Text

    computed = set(compute_steps)
    full, empty = _marks()
    text = Text()
    for step in range(num_steps):
        if step in computed:
            text.append(full, style="green")
        else:
            text.append(empty, style="yellow")
    return text


def _marks() -> tuple[str, str]:
    try:
        (COMPUTED + REUSED).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_COMPUTED, PLAIN_REUSED
    return COMPUTED, REUSED


class Stages:
    """Progress bars, one per stage of a command; shown on a terminal only."""

    def __init__(self) -> None:
        """Prepare the bars; they appear with the first stage."""
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        console = _console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # a file or a pipe must not lose its lines
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Stages:
        """Begin to draw."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop drawing; the stage that was under way is done unless something went wrong."""
        if kind is None:
            self._finish()
        self._bars.stop()

    def __call__(self, name: str) -> Callable[[int, int], None]:
        """Begin a stage; returns its progress callback, which takes the work done and the total."""
        self._finish()
        task = self._bars.add_task(name, total=None)
        self._task = task

        def update(done: int, total: int) -> None:
            self._bars.update(task, completed=done, total=total)

        return update

    def _finish(self) -> None:
        """Show a stage of unknown length as done."""
        if self._task is None:
            return
        task = self._bars.tasks[self._task]
        if task.total is None:
            self._bars.update(self._task, completed=1, total=1)
