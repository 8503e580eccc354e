from __future__ import annotations

import pytest

from ertacache.models.opensora.sizes import ASPECT_RATIOS, RESOLUTIONS, describe_video, frame_size


def test_table_is_complete_and_each_size_has_its_ratio() -> None:
    assert len(RESOLUTIONS) == 8
    for row in RESOLUTIONS.values():
        assert tuple(row) == ASPECT_RATIOS
        for ratio, (height, width) in row.items():
            a, b = map(int, ratio.split(":"))
            # The public table lists the sizes of 25:12 under this name.
            near = 50 / 24 if ratio == "50:27" else a / b
            assert height / width == pytest.approx(near, rel=0.03), (ratio, height, width)


def test_every_resolution_has_about_the_same_area_throughout() -> None:
    for row in RESOLUTIONS.values():
        base = row["9:16"][0] * row["9:16"][1]
        assert all(h * w == pytest.approx(base, rel=0.02) for h, w in row.values())


def test_errors_list_the_known_names() -> None:
    with pytest.raises(ValueError, match="unknown resolution '100p'; use one of 144p, 240p"):
        frame_size("100p", "9:16")
    with pytest.raises(ValueError, match=r"unknown aspect_ratio '7:5' .* use one of 3:8"):
        frame_size("240p", "7:5")


def test_pixels_override_names() -> None:
    video = describe_video("240p", "9:16", height=64, width=48, num_frames=17, fps=8)
    assert (video.height, video.width, video.fps) == (64, 48, 8)
    with pytest.raises(ValueError, match="both height and width"):
        describe_video("240p", "9:16", height=64, width=None, num_frames=17, fps=8)
    with pytest.raises(ValueError, match="num_frames must be at least 1"):
        describe_video("240p", "9:16", height=64, width=48, num_frames=0, fps=8)
