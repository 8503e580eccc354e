"""The processes of one launch: which of them this is, and how their results come together.

The only module that knows of several processes. They exchange bytes, on the CPU and over gloo,
whatever their devices use. Every exchange is labelled, and one that fails says why, so that an
error of one process ends all of them. With one process nothing is imported and nothing is copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ALONE", "FailedError", "Processes", "is_launched", "launched_number"]

PATIENCE = 21600.0  # seconds: all variants of a large video on held-out prompts take hours
LOST = (
    "another process of this launch has ended, or does not answer: finished runs are kept, and the "
    "same command continues from there"
)


class FailedError(ValueError):
    """Another process failed, or is gone."""


class Processes:
    """This process among those of a launch; by itself unless it was launched with others.

    Attributes:
        number: of this process, from 0.
        count: of all processes.
        device: where its pipeline belongs, such as ``"cuda:1"``; None leaves it to the caller.

    Example:
        >>> ALONE.exchange("a label", b"mine")
        [b'mine']
    """

    def __init__(
        self, number: int = 0, count: int = 1, *, group: Any = None, device: str | None = None
    ) -> None:
        """Keep which process this is; ``group`` is the process group of gloo."""
        self.number, self.count, self.device = number, count, device
        self._group, self._failed = group, False

    @classmethod
    def launched(cls, *, timeout: float = PATIENCE) -> Processes:
        """The processes that ``accelerate launch`` or ``torchrun`` started; itself without them.

        Args:
            timeout: seconds to wait for the others in one exchange.

        Raises:
            ValueError: if the others cannot be reached.
        """
        if not is_launched():
            return ALONE
        import torch
        from accelerate import PartialState  # type: ignore[import-untyped]
        from torch import distributed

        patience = timedelta(seconds=timeout)
        on_cpu = not getattr(torch, "accelerator", torch.cuda).is_available()
        try:
            state = PartialState(cpu=on_cpu)
            if state.num_processes != int(os.environ["WORLD_SIZE"]):
                raise ValueError(f"{os.environ['WORLD_SIZE']} were started, but none is connected")
            group = distributed.new_group(backend="gloo", timeout=patience)
        except (RuntimeError, ValueError) as cause:
            raise ValueError(f"cannot reach the other processes: {cause}") from cause
        device = None if on_cpu else str(state.device)
        return cls(state.process_index, state.num_processes, group=group, device=device)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.number == 0

    def exchange(self, label: str, data: bytes = b"") -> list[bytes]:
        """What every process gives, in their order.

        Args:
            label: what is exchanged; the same in all processes.
            data: what this process gives.

        Raises:
            FailedError: another process failed, or is gone.
        """
        return [data] if self.count == 1 else self._exchange(label, data, failed=False)

    def from_main(self, label: str, data: bytes = b"") -> bytes:
        """What the main process gives."""
        return self.exchange(label, data if self.is_main else b"")[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let an error of one process end all of them; wait for each other at the end.

        An interruption is left to the launcher, which ends all processes. May be nested.
        """
        try:
            yield
            self.exchange("end")
        except FailedError:
            raise
        except Exception as error:
            if self.count > 1 and not self._failed:
                self._failed = True
                known = isinstance(error, ValueError | OSError)  # repr leaves out the file
                reason = (str(error) if known else "") or repr(error)
                with suppress(FailedError):
                    self._exchange("", reason.encode(), failed=True)
            raise

    def leave(self) -> None:
        """Close the connections, at the end of a launch."""
        if self.count > 1:
            from torch import distributed

            distributed.destroy_process_group()

    def _exchange(self, label: str, data: bytes, *, failed: bool) -> list[bytes]:
        import torch

        head = torch.tensor([len(data), failed, crc32(label.encode())])
        heads = self._gather(head)
        sizes = [int(found[0]) for found in heads]
        mine = torch.zeros(max(sizes), dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = self._gather(mine) if max(sizes) else [mine] * self.count
        found = [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
        for number, (other, text) in enumerate(zip(heads, found, strict=True)):
            if other[1]:
                raise FailedError(f"process {number} failed: {text.decode(errors='replace')}")
        if any(int(other[2]) != int(head[2]) for other in heads):
            raise RuntimeError(f"the processes do different work, one of them {label!r}")
        return found

    def _gather(self, mine: Tensor) -> list[Tensor]:
        import torch
        from torch import distributed

        found = [torch.empty_like(mine) for _ in range(self.count)]
        try:
            distributed.all_gather(found, mine, group=self._group)
        except RuntimeError as cause:  # a closed connection, or too long a wait
            raise FailedError(LOST) from cause
        return found


ALONE = Processes()
"""One process by itself."""


def is_launched() -> bool:
    """Whether this process was started with others, by ``accelerate launch`` or ``torchrun``."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_number() -> int:
    """The number of this process, known before the others are reached."""
    return int(os.environ["RANK"]) if is_launched() else 0
