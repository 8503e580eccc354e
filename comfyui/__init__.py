"""ERTACache for ComfyUI: fewer evaluations of the network, with nearly the same result."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import ComfyExtension

from .nodes import NODES, register_folder

__all__ = ["comfy_entrypoint"]


class Extension(ComfyExtension):
    """What ComfyUI asks for the nodes."""

    async def get_node_list(self) -> list[Any]:
        """All nodes of the pack."""
        return list(NODES)


async def comfy_entrypoint() -> Extension:
    """Found by ComfyUI when it loads the pack."""
    register_folder()
    return Extension()
