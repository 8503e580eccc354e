"""Sizes that a pipeline cannot make: below one of its latents, or beyond the memory.

The memory is bounded from below, from the parts that every run has, so that nothing is refused
which would fit. Also the message that a result has another size than requested.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["available_memory", "check_size", "differing_size", "needed_memory"]

RESULT_BYTES = 4  # a result is float32
TOKEN_COPIES = 6  # residual, input and hidden layer of a block of the network, at least
TEMPORAL = 8  # frames per latent at most, where the pipeline does not say it
_CGROUPS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True)
class _Size:
    """The largest result of a call."""

    height: int
    width: int
    frames: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> _Size | None:
        """What the arguments say; None without height and width. A list counts by its largest."""
        names = ("height", "width", "num_frames")
        height, width, frames = (max(_numbers(arguments.get(name)), default=0) for name in names)
        return cls(height, width, max(frames, 1)) if height and width else None

    def __str__(self) -> str:
        frames = f", {self.frames} frames" if self.frames > 1 else ""
        return f"{self.height} x {self.width} pixels{frames}"


def _numbers(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def check_size(pipe: Any, arguments: Mapping[str, Any], *, decoded: bool = True) -> None:
    """Raise if the pipeline cannot make results of the size that it is called with.

    Args:
        pipe: the pipeline, on its device.
        arguments: of its call.
        decoded: whether results are decoded, not only their latents computed.
    """
    least = _latent_pixels(pipe)
    for name in ("height", "width"):
        for number in _numbers(arguments.get(name)):
            if number < least:
                raise ValueError(
                    f"{name} {number} is too small: {type(pipe).__name__} works on a grid of "
                    f"{least} x {least} pixels"
                )
    size, available = _Size.of(arguments), available_memory(getattr(pipe, "device", None))
    if size is None or available is None:
        return
    needed = needed_memory(pipe, arguments, decoded=decoded)
    if needed > available:
        raise ValueError(
            f"{size} need at least {needed / 1e9:,.1f} GB of memory, and {available / 1e9:,.1f} GB "
            "are available: give a smaller size"
        )


def needed_memory(pipe: Any, arguments: Mapping[str, Any], *, decoded: bool = True) -> int:
    """Bytes that a call on one prompt takes at least, besides the weights.

    Args:
        pipe: the pipeline.
        arguments: of its call; without a height and a width nothing is known of it.
        decoded: whether the result is decoded.
    """
    size = _Size.of(arguments)
    if size is None:
        return 0
    network = _network_bytes(pipe, size)
    return max(network, _decoder_bytes(pipe, size)) if decoded else network


def _network_bytes(pipe: Any, size: _Size) -> int:
    """The tokens of the network, a few times."""
    network: Any = getattr(pipe, "transformer", None) or getattr(pipe, "unet", None)
    config = getattr(network, "config", {})
    heads, channels = config.get("num_attention_heads"), config.get("attention_head_dim")
    if not isinstance(heads, int) or not isinstance(channels, int):
        return 0
    frames, rows, columns = _patch(config)
    side = _latent_pixels(pipe)
    latents = 1 + (size.frames - 1) // _frames_per_latent(pipe)
    tokens = (latents / frames) * (size.height // side / rows) * (size.width // side / columns)
    return int(tokens * heads * channels * TOKEN_COPIES * network.dtype.itemsize)


def _decoder_bytes(pipe: Any, size: _Size) -> int:
    """The result, and input and output of a layer at full resolution, of one frame."""
    pixels = size.height * size.width
    result = 3 * pixels * size.frames * RESULT_BYTES
    vae = getattr(pipe, "vae", None)
    if vae is None or getattr(vae, "use_tiling", False):
        return result
    scale = vae.config.get("patch_size")
    patch = scale if isinstance(scale, int) else 1
    width: int = vae.dtype.itemsize
    return result + 2 * _decoder_channels(vae.config) * pixels // patch**2 * width


def _decoder_channels(config: Mapping[str, Any]) -> int:
    """Channels of the decoder at full resolution; 0 if its configuration does not say it."""
    lists = [value for name, value in config.items() if name.endswith("block_out_channels")]
    base = config.get("decoder_base_dim") or config.get("base_dim")
    return min(_numbers([number for channels in lists for number in channels] or base), default=0)


def _latent_pixels(pipe: Any) -> int:
    """Height and width of one latent in pixels; 1 if the pipeline does not say it."""
    parts = (getattr(pipe, name, None) for name in ("image_processor", "video_processor"))
    found = [getattr(part, "config", {}).get("vae_scale_factor") for part in parts]
    found += [getattr(pipe, f"vae_scale_factor{tail}", None) for tail in ("", "_spatial")]
    return max(_numbers(found), default=1)


def _frames_per_latent(pipe: Any) -> int:
    found = _numbers([getattr(pipe, "vae_scale_factor_temporal", None)])
    return max(found, default=TEMPORAL)


def _patch(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Latents per token: frames, rows and columns."""
    patch = config.get("patch_size") or 1
    if isinstance(patch, int):
        return config.get("patch_size_t") or 1, patch, patch
    return (1, 1, *patch)[-3:]


def available_memory(device: Any) -> int | None:
    """Bytes that are free on a device; None if that cannot be found out.

    Memory of the CPU counts what the system would free, and swap. In a container it is bounded by
    the container's limit.
    """
    kind = getattr(device, "type", None)
    if kind == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    if kind not in ("cpu", "mps"):
        return None
    found = [_free_memory(), *map(_limit, _CGROUPS)]
    return min((number for number in found if number is not None), default=None)


def _free_memory() -> int | None:
    try:
        rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        kilobytes = (int(rows[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
        return sum(kilobytes) * 1024
    except (OSError, ValueError, KeyError):  # not Linux
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _limit(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def differing_size(shape: Sequence[int], arguments: Mapping[str, Any]) -> str | None:
    """How the size of a result differs from the requested one; None if it does not.

    Args:
        shape: of the result, (3, height, width) or (frames, 3, height, width).
        arguments: of the pipeline's call.

    Example:
        >>> differing_size((3, 64, 64), {"height": 65, "width": 64})
        'the pipeline made height 64 instead of 65'
    """
    made = {"height": shape[-2], "width": shape[-1]}
    if len(shape) == 4:
        made["num_frames"] = shape[0]
    wrong = [
        f"{name} {number} instead of {arguments[name]}"
        for name, number in made.items()
        if isinstance(arguments.get(name), int) and arguments[name] != number
    ]
    return f"the pipeline made {', '.join(wrong)}" if wrong else None
