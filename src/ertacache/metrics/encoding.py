"""Write videos with ffmpeg: values from 0 to 1, (frames, 3, height, width)."""

from __future__ import annotations

import subprocess
from errno import EIO
from importlib import import_module
from pathlib import Path

from torch import Tensor

from ertacache.metrics.image import to_levels

__all__ = ["LOSSLESS", "LOSSY", "check_video_writer", "encode_video"]

LOSSY = "-c:v libx264 -crf 5 -pix_fmt yuv420p -vf scale=ceil(iw/2)*2:ceil(ih/2)*2"
LOSSLESS = "-c:v libx264rgb -crf 0 -pix_fmt rgb24"


def check_video_writer() -> str:
    """Return the program that writes videos, or raise with what has to be installed."""
    try:
        return str(import_module("imageio_ffmpeg").get_ffmpeg_exe())
    except (ImportError, RuntimeError) as cause:
        raise ValueError(
            "to write videos, install two packages: pip install imageio imageio-ffmpeg"
        ) from cause


def encode_video(video: Tensor, path: Path, *, fps: int, codec: str = LOSSY) -> None:
    """Write a video with ffmpeg, whose exit code is the only sign of a full disk.

    Args:
        video: the frames.
        path: the file; its suffix is the container.
        fps: frames per second.
        codec: options of ffmpeg for the output.
    """
    height, width = video.shape[-2:]
    source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {fps} -i -"
    command = [check_video_writer(), "-y", "-v", "error", *source.split(), "-an", *codec.split()]
    frames = to_levels(video).movedim(-3, -1).contiguous().numpy().tobytes()
    done = subprocess.run([*command, str(path)], input=frames, capture_output=True, check=False)
    if done.returncode != 0:
        # The first line is the cause, the others are what follows from it.
        first = done.stderr.decode(errors="replace").strip().split("\n")[0]
        reason = first.split("] ", 1)[-1]
        raise OSError(EIO, reason or f"ffmpeg ended with {done.returncode}")
