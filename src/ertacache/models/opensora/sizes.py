"""Sizes of videos: those that Open-Sora 1.2 was trained on, by resolution and aspect ratio.

A size in pixels need not be a multiple of 8; the latents round it down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

__all__ = ["ASPECT_RATIOS", "RESOLUTIONS", "Video", "describe_video", "frame_size"]

_IMAGE_FPS = 120.0  # the frame rate of single images in the training

# Height to width; each column is a size in pixels, height x width. As in the public table, the
# entries of 50:27 have the aspect ratio 25:12.
_RATIOS = "3:8 9:21 12:25 1:2 9:17 27:50 9:16 5:8 2:3 3:4 1:1 4:3 3:2 16:9 17:9 2:1 50:27"
_SIZES = """
144p  117x312 125x291 133x277 135x270 139x262 141x260 144x256 151x241 156x234 166x221 192x192
      221x165 235x156 256x144 263x139 271x135 277x132
240p  196x522 210x490 222x462 226x452 232x438 236x436 240x426 252x404 262x393 276x368 320x320
      370x278 392x262 426x240 440x232 452x226 462x222
360p  294x784 314x732 332x692 340x680 350x662 352x652 360x640 380x608 392x588 416x554 480x480
      554x416 588x392 640x360 660x350 678x340 692x332
480p  392x1046 420x980 444x925 452x904 466x880 470x870 480x854 506x810 522x784 554x738 640x640
      740x555 784x522 854x480 880x466 906x454 924x444
720p  588x1568 628x1466 666x1388 678x1356 698x1318 706x1306 720x1280 758x1212 784x1176 832x1110
      960x960 1108x832 1176x784 1280x720 1320x698 1358x680 1386x666
1080p 882x2352 942x2198 998x2080 1018x2036 1048x1980 1058x1958 1080x1920 1138x1820 1176x1764
      1248x1664 1440x1440 1662x1246 1764x1176 1920x1080 1980x1048 2036x1018 2078x998
2k    1176x3136 1256x2930 1330x2770 1358x2716 1398x2640 1412x2612 1440x2560 1518x2428 1568x2352
      1662x2216 1920x1920 2218x1664 2352x1568 2560x1440 2638x1396 2716x1358 2772x1330
4k    1764x4704 1886x4400 1996x4158 2036x4072 2096x3960 2118x3918 2160x3840 2276x3642 2352x3528
      2494x3326 2880x2880 3326x2494 3528x2352 3840x2160 3958x2096 4072x2036 4156x1994
"""

ASPECT_RATIOS = tuple(_RATIOS.split())
"""Height to width, from wide to tall."""


def _read() -> dict[str, dict[str, tuple[int, int]]]:
    table: dict[str, dict[str, tuple[int, int]]] = {}
    row: dict[str, tuple[int, int]] = {}
    for word in _SIZES.split():
        if "x" not in word:
            table[word] = row = {}
            continue
        height, width = map(int, word.split("x"))
        row[ASPECT_RATIOS[len(row)]] = (height, width)
    return table


RESOLUTIONS: Mapping[str, Mapping[str, tuple[int, int]]] = MappingProxyType(_read())
"""Height and width in pixels, by resolution, then by aspect ratio."""


def frame_size(resolution: str, aspect_ratio: str) -> tuple[int, int]:
    """Return height and width of a frame in pixels.

    Example:
        >>> frame_size("240p", "9:16")
        (240, 426)
    """
    if resolution not in RESOLUTIONS:
        raise ValueError(f"unknown resolution {resolution!r}; use one of {', '.join(RESOLUTIONS)}")
    if aspect_ratio not in ASPECT_RATIOS:
        raise ValueError(
            f"unknown aspect_ratio {aspect_ratio!r} (height to width); "
            f"use one of {', '.join(ASPECT_RATIOS)}"
        )
    return RESOLUTIONS[resolution][aspect_ratio]


@dataclass(frozen=True)
class Video:
    """Size and frame rate of a video, inputs of the network and the scheduler.

    Attributes:
        height: height in pixels.
        width: width in pixels.
        num_frames: number of frames, 1 for an image.
        fps: frames per second.
    """

    height: int
    width: int
    num_frames: int
    fps: float


def describe_video(
    resolution: str,
    aspect_ratio: str,
    *,
    height: int | None,
    width: int | None,
    num_frames: int,
    fps: float,
) -> Video:
    """Return the requested video; height and width override the resolution.

    Example:
        >>> describe_video("240p", "9:16", height=None, width=None, num_frames=1, fps=24)
        Video(height=240, width=426, num_frames=1, fps=120.0)
    """
    if (height is None) != (width is None):
        raise ValueError("pass both height and width, or resolution and aspect_ratio")
    if height is None or width is None:
        height, width = frame_size(resolution, aspect_ratio)
    if num_frames < 1:
        raise ValueError(f"num_frames must be at least 1, got {num_frames}")
    return Video(height, width, num_frames, _IMAGE_FPS if num_frames == 1 else fps)
