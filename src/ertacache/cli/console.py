"""What the commands print: lines, facts, tables, step masks, progress.

Results go to standard output, progress to standard error; colour only on a terminal that wants it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

from ertacache.cli.output import is_quiet, results_stream
from ertacache.formats.text import one_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.text import Text

__all__ = [
    "Stages",
    "draw_mask",
    "duration",
    "print_fact",
    "print_line",
    "print_table",
]

COMPUTED, REUSED = "█", "·"
PLAIN_COMPUTED, PLAIN_REUSED = "#", "."  # where the output has no such characters
ANY_WIDTH = 100_000  # columns: a narrow terminal wraps a table, and does not cut off its numbers
SECONDS_APART = 10.0  # two lines of progress, where there is no terminal


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else results_stream()
    return Console(
        file=stream,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        highlight=False,
        markup=False,
        emoji=False,
    )


def print_line(*parts: str | Text) -> None:
    """Print one line, however long; above a progress bar, if there is one."""
    console = _console()
    with console.capture() as captured:
        console.print(*parts, soft_wrap=True)
    # Not by the console, which would write past the stream that rich puts in place for its bars.
    print(captured.get(), end="", flush=True, file=results_stream())


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
    console = _console()
    console.width = ANY_WIDTH
    console.print(table)
    print_line("")


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
    """The stages of a command and their progress: bars on a terminal, otherwise plain lines."""

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        """Prepare to show stages; ``clock`` gives the seconds that the lines are timed by."""
        console = _console(stderr=True)
        self._shown: _Bars | _Lines | _Nothing
        if is_quiet():
            self._shown = _Nothing()
        else:
            self._shown = _Bars(console) if console.is_terminal else _Lines(clock)

    def __enter__(self) -> Stages:
        """Begin to show stages."""
        self._shown.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop; the stage that was under way is done unless something went wrong."""
        if kind is None:
            self._shown.finish()
        self._shown.stop()

    def __call__(self, name: str) -> Callable[[int, int], None]:
        """Begin a stage; returns its progress callback, which takes the work done and the total."""
        self._shown.finish()
        return self._shown.begin(name)


class _Nothing:
    """Shows no stage."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def begin(self, _name: str) -> Callable[[int, int], None]:
        return lambda _done, _total: None

    def finish(self) -> None: ...


class _Bars:
    """One bar per stage."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bars = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            redirect_stdout=sys.stdout.isatty(),  # a file or a pipe must not lose its lines
        )
        self._task: TaskID | None = None
        self.start, self.stop = self._bars.start, self._bars.stop

    def begin(self, name: str) -> Callable[[int, int], None]:
        task = self._task = self._bars.add_task(name, total=None)

        def update(done: int, total: int) -> None:
            self._bars.update(task, completed=done, total=total)

        return update

    def finish(self) -> None:
        """Show a stage of unknown length as done."""
        if self._task is not None and self._bars.tasks[self._task].total is None:
            self._bars.update(self._task, completed=1, total=1)


class _Lines:
    """A line when a stage begins, when it ends, and in between as often as ``SECONDS_APART``."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage: _LinesOfStage | None = None

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def begin(self, name: str) -> Callable[[int, int], None]:
        self._stage = _LinesOfStage(name, self._clock)
        return self._stage.update

    def finish(self) -> None:
        """Show a stage of unknown length as done."""
        if self._stage is not None and not self._stage.counted:
            self._stage.print_end()
        self._stage = None


class _LinesOfStage:
    """One stage; its last line is the basis of the estimate, for what is known is quickly done."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name, self._clock, self._begun = name, clock, clock()
        self._last, self._last_done = self._begun, 0
        self.counted = self._ended = False
        self._print(" ...")

    def update(self, done: int, total: int) -> None:
        self.counted, now = True, self._clock()
        if done >= total and not self._ended:
            self.print_end(f"{done} of {total} ")
        elif done < total and now - self._last >= SECONDS_APART:
            left = ""
            if done > self._last_done:
                pace = (now - self._last) / (done - self._last_done)
                left = f", about {duration(pace * (total - done))} left"
            self._print(f": {done} of {total} in {duration(now - self._begun)}{left}")
            self._last, self._last_done = now, done

    def print_end(self, count: str = "") -> None:
        self._ended = True
        self._print(f": {count or 'done '}in {duration(self._clock() - self._begun)}")

    def _print(self, text: str) -> None:
        print(f"{self._name}{text}", file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time span as it is printed.

    Example:
        >>> duration(7.4), duration(200), duration(7500)
        ('7 s', '3 min 20 s', '2 h 5 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
