"""The cost of a run besides time: FLOPs of the networks, and bytes of live tensors.

Both are counted in a run of their own, so that counting does not slow down a timed run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from ertacache.integration.identity import find_denoisers
from ertacache.integration.private_api import Pipeline

__all__ = ["count_flops", "live_bytes", "watch_bytes"]

_REAL = (torch.Tensor, torch.nn.Parameter)


def _attention(query: torch.Size, key: torch.Size, value: torch.Size, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


# The attention kernel of CPUs; torch counts those of GPUs.
_UNCOUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}


def count_flops(pipe: Pipeline, run: Callable[[], Any]) -> int:
    """Floating-point operations of the denoising networks during ``run``."""
    roots = {type(network).__name__ for network in find_denoisers(pipe).values()}
    with FlopCounterMode(display=False, custom_mapping=_UNCOUNTED) as counter:
        run()
    counts = counter.get_flop_counts()
    return sum(sum(counts[root].values()) for root in roots if root in counts)


def live_bytes() -> int:
    """Bytes of all tensors that are alive; several views of one storage count once.

    Example:
        >>> before = live_bytes()
        >>> kept = torch.zeros(1000)
        >>> live_bytes() - before
        4000
    """
    gc.collect()  # what only a reference cycle keeps alive is no cache
    storages = {}
    for thing in gc.get_objects():
        # By exact type: proxies would import their module, fake tensors hold no bytes.
        if type(thing) in _REAL and thing.layout is torch.strided and thing.device.type != "meta":
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def watch_bytes(share: float, report: Callable[[int], Any]) -> Callable[..., dict[str, Any]]:
    """A ``callback_on_step_end`` that reports the live bytes after a share of the run's steps."""

    def watch(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == int(share * len(pipe.scheduler.timesteps)):
            report(live_bytes())
        return tensors

    return watch
