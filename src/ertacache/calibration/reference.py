"""Full runs that plans are fitted to: their latents, held by the process that runs their batch.

In memory, or a step at a time from the files of finished work. Runs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, overload

import torch
from torch import Tensor

from ertacache.core.gram import Schedule
from ertacache.core.groups import Groups, Layout, finest_groups
from ertacache.formats.profile import ProfiledPrompt
from ertacache.integration.record import Recording

__all__ = ["Latents", "Reference", "RunFacts"]


@dataclass(frozen=True, eq=False)
class RunFacts:
    """What full runs have in common.

    Attributes:
        schedule: of all runs.
        expert_steps: steps after 0 at which another network takes over.
        layout: of the latents; None if it is not known.
        branch: whether the output of one guidance branch is there in the shape of the latent.
        shape: of one latent.
    """

    NAMES: ClassVar = (
        *("schedule.sigmas", "schedule.nominal", "schedule.latents", "schedule.scale"),
        *("expert_steps", "flags", "layout", "shape"),
    )

    schedule: Schedule
    expert_steps: tuple[int, ...] = ()
    layout: Layout | None = None
    branch: bool = False
    shape: tuple[int, ...] = ()

    @classmethod
    def of(cls, found: Recording) -> RunFacts:
        """Those of a recording."""
        shape = tuple(found.run.latents[0].shape[1:])
        return cls(found.schedule, found.expert_steps, found.layout, found.branch, shape)

    def to_tensors(self) -> dict[str, Tensor]:
        """As tensors, to be kept and exchanged."""
        layout = self.layout
        place = [] if layout is None else [layout.channel, layout.patch, *layout.grid]
        whole = {
            "expert_steps": self.expert_steps,
            "flags": (self.schedule.begun, self.branch),
            "layout": place,
            "shape": self.shape,
        }
        names = ("sigmas", "nominal", "latents", "scale")
        return {f"schedule.{name}": getattr(self.schedule, name) for name in names} | {
            name: torch.tensor(values, dtype=torch.int64) for name, values in whole.items()
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> RunFacts:
        """Undo ``to_tensors``."""
        names = ("sigmas", "nominal", "latents", "scale")
        begun, branch = (bool(flag) for flag in tensors["flags"])
        parts = {name: tensors[f"schedule.{name}"] for name in names}
        layout: Layout | None = None
        if len(tensors["layout"]):
            channel, patch, *grid = tensors["layout"].tolist()
            layout = Layout(channel, tuple(grid), patch)
        return cls(
            Schedule(begun=begun, **parts),
            tuple(tensors["expert_steps"].tolist()),
            layout,
            branch,
            tuple(tensors["shape"].tolist()),
        )


class Latents(Sequence[Tensor]):
    """The latents x_0 ... x_T of several runs, each of shape (P, ...), put together when asked for.

    Example:
        >>> runs = [[torch.zeros(2), torch.ones(2)], [torch.ones(2), torch.zeros(2)]]
        >>> Latents(runs)[-1]
        tensor([[1., 1.],
                [0., 0.]])
    """

    def __init__(self, runs: Sequence[Sequence[Tensor] | None]) -> None:
        """Keep the latents of every run; None for those that another process has."""
        self._runs = runs

    def __len__(self) -> int:
        """Number of latents, T + 1."""
        return next((len(run) for run in self._runs if run is not None), 0)

    @overload
    def __getitem__(self, step: int) -> Tensor: ...

    @overload
    def __getitem__(self, step: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, step: int | slice) -> Tensor | Sequence[Tensor]:
        """The latents of all runs at a step."""
        if isinstance(step, slice):
            return [self[k] for k in range(len(self))[step]]
        held = [run for run in self._runs if run is not None]
        assert len(held) == len(self._runs), "the latents of a run are in another process"
        return torch.stack([run[step] for run in held])

    def select(self, places: Sequence[int]) -> Latents:
        """The latents of some of the runs."""
        return Latents([self._runs[place] for place in places])


@dataclass(frozen=True, eq=False)
class Reference:
    """Full runs that plans are fitted to and compared with.

    Attributes:
        runs: prompts and seeds.
        latents: x_0 ... x_T of the runs of this process, in the order of the runs.
        facts: what the runs have in common.
        batches: the runs as they are run together, whatever the number of processes.
        owners: the process of every batch.
    """

    runs: tuple[ProfiledPrompt, ...]
    latents: Latents
    facts: RunFacts
    batches: tuple[tuple[ProfiledPrompt, ...], ...] = field(default=())
    owners: tuple[int, ...] = field(default=())

    @property
    def schedule(self) -> Schedule:
        """Of all runs."""
        return self.facts.schedule

    @property
    def finest(self) -> Groups | None:
        """The finest groups of the latents; None if their layout is not known."""
        if self.facts.layout is None:
            return None
        return finest_groups(torch.empty(1, *self.facts.shape, device="meta"), self.facts.layout)

    def find_layout(self, latents: Tensor) -> Layout:
        """The layout of the latents, which must be known."""
        assert self.facts.layout is not None
        return self.facts.layout

    def places(self, runs: Sequence[ProfiledPrompt]) -> list[int]:
        """Places of some of the runs."""
        return [self.runs.index(run) for run in runs]

    def select(self, places: Sequence[int]) -> Reference:
        """Some of the runs, given by their places; batches lose the others."""
        runs = tuple(self.runs[place] for place in places)
        kept, chosen = [], set(runs)
        for batch, owner in zip(self.batches, self.owners, strict=True):
            left = tuple(run for run in batch if run in chosen)
            kept += [(left, owner)] * bool(left)
        return replace(
            self,
            runs=runs,
            latents=self.latents.select(places),
            batches=tuple(batch for batch, _ in kept),
            owners=tuple(owner for _, owner in kept),
        )
