"""What a call of the pipeline must not be given. Knows nothing of what becomes of the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["check_call"]

_OUTPUT_TYPES = ("pil", "np", "pt", "latent")


def check_call(
    prompt: str | Sequence[str] | None,
    prompt_embeds: Tensor | None,
    output_type: str,
    callback_inputs: Sequence[str],
) -> None:
    """Raise a ``ValueError`` that names the argument, before anything is computed."""
    if (prompt is None) == (prompt_embeds is None):
        raise ValueError("pass either prompt or prompt_embeds")
    if output_type not in _OUTPUT_TYPES:
        raise ValueError(f"output_type must be one of {_OUTPUT_TYPES}, got {output_type!r}")
    if set(callback_inputs) - {"latents"}:
        raise ValueError(f"callbacks are given the latents only, not {list(callback_inputs)}")
