"""The raw output of one guidance branch, which a plan may combine besides the guided output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["branch_output", "tensors_of"]


def branch_output(output: Any, sample: Tensor, *, calls: int) -> Tensor | None:
    """The output of one branch, in the shape of the latent; None if there is none.

    Args:
        output: what the network returned in the first of a step's calls. With guidance that is one
            branch, or all of them in one batch.
        sample: the latent.
        calls: number of calls of the step.

    Example:
        >>> import torch
        >>> latent = torch.zeros(1, 2)
        >>> branch_output(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), latent, calls=1)
        tensor([[1., 2.]])
        >>> branch_output((torch.tensor([[1.0, 2.0]]),), latent, calls=2)
        tensor([[1., 2.]])
        >>> branch_output(torch.tensor([[1.0, 2.0]]), latent, calls=1) is None  # it is the output
        True
    """
    raw = next(tensors_of(output), None)
    if raw is None or raw.ndim != sample.ndim or (calls == 1 and len(raw) <= len(sample)):
        return None
    part = raw.detach()[: len(sample)]
    if part.ndim > 2 and part.shape[1] > sample.shape[1]:  # channels of a learned variance follow
        part = part[:, : sample.shape[1]]
    if part.shape != sample.shape:
        return None
    # A history of parts must not keep the memory of the whole.
    return part if part.numel() == raw.numel() else part.clone()


def tensors_of(output: Any) -> Iterator[Tensor]:
    """All tensors in nested outputs."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from tensors_of(list(output.values()))
    elif isinstance(output, Iterable) and not isinstance(output, str):
        for entry in output:
            yield from tensors_of(entry)
