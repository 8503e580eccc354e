"""Layouts of latents: channels and grid where the pipelines themselves have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ertacache.core.groups import Layout
from ertacache.integration.layout import _grid, find_layout
from ertacache.integration.record import record
from tests.compatibility.components import image_vae, wan_vae
from tests.compatibility.matrix import GREEN
from tests.integration.sampling import Sampling, make
from tests.integration.tiny import CASES, call_arguments

ROWS = {row.title: row for row in GREEN}
SHORT = {"num_inference_steps": 2}


def recorded(title: str, *, vae: Any = None, **changes: Any) -> tuple[Any, Layout | None, Tensor]:
    """A pipeline, the layout that was found in a call of it, and the noise of the call."""
    row = ROWS[title]
    pipe = row.build()
    if vae is not None:
        pipe.register_modules(vae=vae)
    full = record(pipe, **row.arguments() | SHORT | changes)
    return pipe, full.layout, full.run.latents[0]


@pytest.mark.parametrize("size", [(32, 32), (48, 32), (32, 64), (36, 28), (50, 34)])
def test_flux_is_unpacked_as_by_its_pipeline(size: tuple[int, int]) -> None:
    """Square, portrait, landscape, and sizes that are rounded to whole tokens."""
    case, (height, width) = CASES["flux"], size
    pipe = case.build()
    full = record(pipe, **call_arguments(case, height=height, width=width, **SHORT))
    assert full.layout is not None
    for x in (*full.run.latents, *full.run.outputs):
        own = pipe._unpack_latents(x, height, width, pipe.vae_scale_factor)
        assert torch.equal(full.layout.unpack(x), own)
        assert torch.equal(full.layout.pack(own), x)


@pytest.mark.parametrize(
    "title",
    [
        "Flux img2img",
        "Flux inpaint",
        "Flux Kontext",
        "Flux Fill",
        "Flux Control",
        "Chroma img2img",
        "Bria 3.2",
    ],
)
def test_pipelines_with_the_packing_of_flux(title: str) -> None:
    pipe, layout, x = recorded(title)
    size = ROWS[title].call["height"], ROWS[title].call["width"]
    assert layout is not None
    assert torch.equal(layout.unpack(x), pipe._unpack_latents(x, *size, pipe.vae_scale_factor))


@pytest.mark.parametrize(
    ("title", "height"),
    [
        ("Qwen-Image", 32),
        ("Qwen-Image", 64),
        ("Qwen-Image img2img", 32),
        ("Nucleus-Image", 32),
        ("Nucleus-Image", 64),
    ],
)
def test_qwen_image_and_its_kind(title: str, height: int) -> None:
    """Their decoders are those of videos, of one frame."""
    pipe, layout, x = recorded(title, height=height)
    own = (2, pipe.vae_scale_factor) if "Nucleus" in title else (pipe.vae_scale_factor,)
    unpacked = pipe._unpack_latents(x, height, 32, *own)
    assert layout is not None
    assert torch.equal(layout.unpack(x), unpacked[:, :, 0])


def test_flux_2_is_unpacked_as_by_its_pipeline() -> None:
    pipe, layout, x = recorded("Flux 2 Klein", height=64)
    assert layout is not None
    squares = x.mT.unflatten(2, (4, 2))  # rows and columns of tokens
    assert torch.equal(layout.unpack(x), pipe._unpatchify_latents(squares))


@pytest.mark.parametrize("size", [(64, 64), (96, 64), (64, 128)])
def test_ltx_is_unpacked_as_by_its_pipeline(size: tuple[int, int]) -> None:
    pipe, layout, x = recorded("LTX-Video", height=size[0], width=size[1], num_frames=17)
    rows, columns = (pixels // pipe.vae_spatial_compression_ratio for pixels in size)
    own = pipe._unpack_latents(x, 3, rows, columns)
    assert layout is not None
    assert torch.equal(layout.unpack(x), own)


CHANNEL = {
    "Stable Diffusion 1.5": 1,
    "Stable Diffusion 3": 1,
    "AnimateDiff": 1,
    "Lumina 2": 1,
    "Wan 2.1 T2V": 1,
    "Wan 2.1 I2V": 1,  # its network has more channels than its latents
    "HunyuanVideo 1.5": 1,
    "Latte": 1,
    "Mochi": 1,
    "LTX-Video I2V": 1,  # its scheduler sees the latents unpacked
    "Cosmos 2 T2I": 1,
    "Open-Sora 1.2": 1,
    "CogVideoX T2V": 2,
    "CogVideoX I2V": 2,
    "AnyFlow": 2,
    "Kandinsky 5 T2I": 4,
    "Kandinsky 5 T2V": 4,
}


@pytest.mark.parametrize("title", list(CHANNEL))
def test_axes_that_are_not_flattened(title: str) -> None:
    _, layout, x = recorded(title)
    assert layout == Layout(channel=CHANNEL[title])
    assert layout.unpack(x).shape[1] == x.shape[CHANNEL[title]]


@pytest.mark.parametrize("frames", [9, 61])
def test_frames_are_not_taken_for_channels(frames: int) -> None:
    """Three frames as an image has channels of pixels, or as many frames as channels."""
    _, layout, x = recorded("AnyFlow", num_frames=frames, vae=wan_vae())
    assert x.shape[1:3] == ((frames - 1) // 4 + 1, 16)
    assert layout == Layout(channel=2)


def test_tokens_whose_square_comes_before_its_channels_are_pixels() -> None:
    """With a decoder of four channels: 2 x 2 x 4 in each token, in another order than Flux's."""
    pipe = ROWS["Ideogram 4, two networks"].build()
    pipe.vae = image_vae()
    layout = found_in_call(pipe, torch.zeros(1, 4, 16), height=32, width=32)
    assert layout == Layout(channel=2, grid=(2, 2), patch=1)


def found_in_call(pipe: Any, latents: Tensor, **arguments: Any) -> Layout | None:
    """What is found within a call with these arguments."""
    found: list[Layout | None] = []

    class Call(type(pipe)):  # type: ignore[misc]
        def __call__(self, **given: Any) -> None:
            found.append(find_layout(self, latents))

    Call.__name__ = type(pipe).__name__
    pipe.__class__ = Call
    pipe(**arguments)
    return found[0]


def test_unknown_layouts() -> None:
    pipe, x = CASES["flux"].build(), torch.zeros(1, 64, 16)
    assert find_layout(pipe, x) is None  # no call is under way that would give the size
    for arguments in (
        {},
        {"height": 32},
        {"height": None, "width": None},
        {"height": 0, "width": 32},
        {"height": 32, "width": 96},  # 64 tokens have no such ratio
        {"height": 32, "width": 32, "layers": 3},  # four images of 16 tokens
    ):
        assert found_in_call(pipe, x, **arguments) is None
    assert found_in_call(pipe, x, height=32, width=32) is not None
    assert found_in_call(pipe, torch.zeros(1, 61, 16), height=32, width=32) is None  # a prime
    assert found_in_call(pipe, torch.zeros(1, 64, 20), height=32, width=32) is None  # channels


def test_latents_that_are_no_grid() -> None:
    """Of sound, of points, or with channels that nothing names."""
    sampling = Sampling(make("FlowMatchEulerDiscreteScheduler"))
    assert record(sampling).layout is None
    pipe = CASES["wan"].build()
    for shape in ((2, 4), (1, 64, 1024), (1, 5, 8, 8), (1, 7, 9, 4, 4), (1, 16, 2, 2, 2, 2)):
        assert find_layout(pipe, torch.zeros(shape)) is None
    assert find_layout(pipe, torch.zeros(1, 16, 3, 4, 4)) == Layout()


def test_grids_have_the_ratio_that_was_asked_for() -> None:
    for rows in range(1, 40):
        for columns in range(1, 40):
            # Sizes of 16 pixels per token, and such as are rounded down to them.
            for extra in (0, 7, 15):
                ratio = (16 * rows + extra) / (16 * columns)
                found = _grid(rows * columns, ratio)
                assert found is not None
                if extra == 0:
                    assert found == (rows, columns)
    assert _grid(5 * 32 * 32, 1.0) is None  # 64 x 80 is no square
