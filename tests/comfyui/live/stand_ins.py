"""Empty torchvision and torchaudio, on the server's path.

ComfyUI imports both when it starts, for nodes that no test uses. Every name in them is an empty
class. This file is copied into the server's environment, which imports it on start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PACKAGES = ("torchvision", "torchaudio")


class Empty(type):
    """A class whose attributes are such classes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})


class EmptyModule(ModuleType):
    __version__ = "0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Empty(name, (), {})


class Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.split(".")[0] not in PACKAGES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Find the packages here, if nowhere else."""
    sys.meta_path.append(Finder())
