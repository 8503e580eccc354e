"""Which policy a run follows: the attached one, or one for the last steps of its table.

Knows where a run begins and what is said if no policy is there for it; how one is solved again is
for ``later`` to know.
"""

from __future__ import annotations

import logging
from time import perf_counter

import torch
from torch import Tensor

from ertacache.formats.policy import Policy, PolicyError
from ertacache.integration.compat import Pipeline, keeps_history
from ertacache.integration.fingerprints import calibrate_command, model_name
from ertacache.integration.later import MULTISTEP, solve_later
from ertacache.integration.updates import Update, make_update

__all__ = ["Parts", "find_step"]

_LOG = logging.getLogger(__name__)


class Parts:
    """The policies of one handle, each solved when it is first needed."""

    def __init__(
        self,
        pipe: Pipeline,
        policy: Policy,
        *,
        cache_device: torch.device | None,
        update: Update | None,
    ) -> None:
        """Begin with the attached policy; ``update`` takes the place of its own."""
        self._pipe, self._scheduler = pipe, pipe.scheduler
        self._policy, self._cache_device = policy, cache_device
        self._substituted = update is not None
        update = update or make_update(policy, self._scheduler, cache_device=cache_device)
        self._solved = {0: policy}
        self._updates = {(0, 0): update}

    def get(self, first: int, *, begin: int) -> tuple[Policy, Update]:
        """Return the policy and the update of a run.

        Args:
            first: the step of the attached policy's table with which the run begins.
            begin: the place of that step in the scheduler's table.
        """
        if first not in self._solved:
            self._solved[first] = self._solve(first, begin=begin)
        policy = self._solved[first]
        if (first, begin) not in self._updates:
            self._updates[first, begin] = make_update(
                policy, self._scheduler, cache_device=self._cache_device, begin=begin
            )
        return policy, self._updates[first, begin]

    def _solve(self, first: int, *, begin: int) -> Policy:
        start, left = perf_counter(), self._policy.num_steps - first
        try:
            if self._substituted:
                raise PolicyError("a run to calibrate with must be whole")
            # In half precision the profile alone could not tell them apart.
            if keeps_history(self._scheduler):
                raise PolicyError(MULTISTEP)
            policy = solve_later(self._policy, first)
        except PolicyError as cause:
            raise PolicyError(self._refusal(cause, left=left, begin=begin)) from None
        _LOG.info(
            "solved the policy again for the last %d of its %d steps: %d computed; took %.0f ms",
            left,
            self._policy.num_steps,
            len(policy.compute_steps),
            1e3 * (perf_counter() - start),
        )
        return policy

    def _refusal(self, cause: PolicyError, *, left: int, begin: int) -> str:
        if begin:
            return (
                f"the run does not begin with step 0, as image to image does, and {cause}; "
                "pass strength=1, or detach it for this call"
            )
        command = calibrate_command(self._policy, model_name(self._pipe), steps=left)
        return (
            f"the run takes the last {left} steps of the policy's table, but {cause}; "
            f"run: {command} (with --arg sigmas=[...] as in this call)"
        )


def find_step(timesteps: Tensor, timestep: Tensor) -> int:
    """Return the place of a timestep in a scheduler's table.

    Example:
        >>> find_step(torch.tensor([900, 500, 100]), torch.tensor(500))
        1
    """
    places: list[int] = (timesteps == timestep).nonzero().flatten().tolist()
    if len(places) != 1:
        raise PolicyError(
            f"the run begins with timestep {float(timestep):g}, which is {len(places)} times in "
            "the scheduler's table: no policy can follow it; detach it for this call"
        )
    return places[0]
