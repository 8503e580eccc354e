"""Loading without the messages of the libraries that load."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = ["quiet_libraries"]

_LIBRARIES = ("accelerate", "diffusers", "huggingface_hub", "tokenizers", "torch", "transformers")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep progress bars, warnings and log messages below errors of other libraries back.

    Afterwards everything is as it was. Warnings that come from elsewhere are shown all the time.
    """
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusion: Any = diffusers_logging
    encoders: Any = transformers_logging
    with ExitStack() as undo:
        undo.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=rf"({'|'.join(_LIBRARIES)})(\.|\Z)")
        for library in (diffusion, encoders):
            undo.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity_error()
        if diffusion.is_progress_bar_enabled():
            undo.callback(diffusion.enable_progress_bar)
            diffusion.disable_progress_bar()
        # Not transformers' own switch, which also changes that of the hub. Before version 5 there
        # is no hook, and no bar for weights in one file.
        if hasattr(encoders, "set_tqdm_hook"):
            undo.callback(encoders.set_tqdm_hook, encoders.set_tqdm_hook(_without_bar))
        yield


def _without_bar(
    factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    return factory(*args, **options | {"disable": True})
