"""All uses of private diffusers APIs by the baselines: block metadata, caches and their hooks.

Finds a network's blocks, and which of their arguments and results are streams of hidden states.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS, _ATTENTION_CLASSES
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.cache_utils import CacheMixin
from torch import Tensor, nn

from ertacache.integration.identity import find_denoisers
from ertacache.integration.private_api import Pipeline, unwrap

__all__ = [
    "Block",
    "Streams",
    "cached_tensors",
    "enabled_cache",
    "find_attention",
    "find_blocks",
    "find_hooks",
    "has_cache",
    "hook_states",
    "one_network",
    "remember_hooks",
    "reset_caches",
    "tensors_within",
    "why_no_blocks",
    "why_not_listed",
    "why_not_one_network",
]

Streams = tuple[Tensor, Tensor | None]
"""Hidden states that run through the stack, and the text's where a block returns them too."""


@dataclass(frozen=True, eq=False)
class Block:
    """A transformer block, its arguments by name, and the positions of its streams."""

    module: nn.Module
    signature: inspect.Signature
    hidden_name: str
    encoder_name: str
    hidden_index: int
    encoder_index: int | None

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the block was called with, by name."""
        return dict(self.signature.bind(self.module, *args, **kwargs).arguments)

    def inputs(self, arguments: Mapping[str, Any]) -> Streams:
        """Return the streams that enter."""
        encoder = None if self.encoder_index is None else arguments.get(self.encoder_name)
        return arguments[self.hidden_name], encoder

    def outputs(self, output: Any) -> Streams:
        """Return the streams that leave."""
        if isinstance(output, Tensor):
            return output, None
        encoder = None if self.encoder_index is None else output[self.encoder_index]
        return output[self.hidden_index], encoder

    def result(self, streams: Streams) -> Any:
        """Return the streams in the form in which the block itself returns them."""
        if self.encoder_index is None:
            return streams[0]
        places = {self.hidden_index: streams[0], self.encoder_index: streams[1]}
        return tuple(places[k] for k in sorted(places))


def find_blocks(network: nn.Module) -> list[Block]:
    """Return the blocks of a network in the order in which it calls them; none if unknown.

    A network that is not in diffusers lists them itself, as ``ordered_blocks``; they take
    ``hidden_states`` and return nothing else.
    """
    ordered: list[nn.Module] | None = getattr(unwrap(network), "ordered_blocks", None)
    if ordered is None:
        return _listed_blocks(network)
    return [Block(b, _signature(b), "hidden_states", "", 0, None) for b in ordered]


def _listed_blocks(network: nn.Module) -> list[Block]:
    blocks: list[Block] = []
    for name, children in unwrap(network).named_children():
        if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS and isinstance(children, nn.ModuleList):
            for module in children:
                try:
                    data: Any = TransformerBlockRegistry.get(type(unwrap(module)))
                except ValueError:
                    return []
                blocks.append(_block(module, data))
    return blocks


def _block(module: nn.Module, data: Any) -> Block:
    return Block(
        module,
        _signature(module),
        data.hidden_states_argument_name,
        data.encoder_hidden_states_argument_name,
        data.return_hidden_states_index or 0,
        data.return_encoder_hidden_states_index,
    )


def _signature(module: nn.Module) -> inspect.Signature:
    return inspect.signature(type(unwrap(module)).forward)


def find_attention(network: nn.Module) -> list[nn.Module]:
    """Return the attention layers of a network."""
    return [module for module in network.modules() if isinstance(module, _ATTENTION_CLASSES)]


def one_network(pipe: Pipeline) -> nn.Module:
    """Return the network of a pipeline that has one."""
    return next(iter(find_denoisers(pipe).values()))


def why_not_one_network(pipe: Pipeline) -> str | None:
    """Return the reason if a pipeline changes networks in the middle of a run."""
    names = list(find_denoisers(pipe))
    if len(names) == 1:
        return None
    return f"the pipeline has several networks ({', '.join(names)}): one run, two caches"


def why_no_blocks(pipe: Pipeline) -> str | None:
    """Return the reason if the blocks of a pipeline's network cannot be cached."""
    several = why_not_one_network(pipe)
    if several is not None:
        return several
    network = one_network(pipe)
    if len(find_blocks(network)) < 2:
        return f"diffusers has no metadata for two or more blocks of {type(network).__name__}"
    return None


def why_not_listed(network: nn.Module) -> str | None:
    """Return the reason if diffusers, which knows lists of blocks by name, finds none."""
    if _listed_blocks(network):
        return None
    return f"diffusers does not know where {type(network).__name__} keeps its blocks"


def has_cache(network: nn.Module) -> bool:
    """Return whether diffusers' own caches can be enabled on a network."""
    return isinstance(network, CacheMixin)


@contextmanager
def enabled_cache(network: Any, config: Any) -> Iterator[None]:
    """Enable a cache of diffusers on a network for a while, and leave no attribute behind."""
    fresh = "_cache_config" not in vars(network)
    network.enable_cache(config)
    try:
        yield
    finally:
        network.disable_cache()
        if fresh:
            vars(network).pop("_cache_config", None)


def find_hooks(network: nn.Module, name: str) -> list[Any]:
    """Return the hooks of a name within a network."""
    registries = [vars(module).get("_diffusers_hook") for module in network.modules()]
    return [
        registry.hooks[name]
        for registry in registries
        if registry is not None and name in registry.hooks
    ]


def hook_states(hook: Any) -> list[Any]:
    """Return the states of a hook, one per context that a pipeline entered, as guidance does."""
    return list(hook.state_manager._state_cache.values())


def reset_caches(network: Any) -> None:
    """Give diffusers' caches within a network fresh states."""
    network._reset_stateful_cache()


def cached_tensors(network: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that the hooks of diffusers' caches keep within a network."""
    for module in network.modules():
        registry: Any = vars(module).get("_diffusers_hook")
        for hook in [] if registry is None else registry.hooks.values():
            if type(hook).__module__.startswith("diffusers.hooks"):
                states = [vars(hook).get(name) for name in ("state", "state_manager")]
                yield from tensors_within(states)


def tensors_within(kept: Any, *, depth: int = 6) -> Iterator[Tensor]:
    """Yield the tensors of nested containers and plain objects, but not those of networks.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> list(tensors_within({"a": [SimpleNamespace(x=torch.ones(1))]}))
        [tensor([1.])]
    """
    if isinstance(kept, Tensor):
        yield kept
    elif depth > 0 and not isinstance(kept, nn.Module | str | type):
        parts: Any = ()
        if isinstance(kept, Mapping):
            parts = kept.values()
        elif isinstance(kept, list | tuple | set):
            parts = kept
        elif hasattr(kept, "__dict__") and not callable(kept):
            parts = vars(kept).values()
        for part in parts:
            yield from tensors_within(part, depth=depth - 1)


def remember_hooks(network: nn.Module) -> Callable[[], None]:
    """Note which modules have registries and forwards of their own; return a call to restore it."""
    names = ("_diffusers_hook", "forward")
    before = {id(module): {n for n in names if n in vars(module)} for module in network.modules()}
    order = list(network._modules.items())

    def restore() -> None:
        # cache-dit removes blocks and adds them again at the end, which changes their order.
        network._modules.clear()
        network._modules.update(order)
        for module in network.modules():
            for name in names:
                if name not in before.get(id(module), ()):
                    vars(module).pop(name, None)
        registry: Any = vars(network).get("_diffusers_hook")
        if registry is not None:
            registry.invalidate_child_registries_cache()

    return restore
