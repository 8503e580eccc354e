"""How far two pictures or videos are apart. Knows neither models nor policies."""

from ertacache.metrics.fidelity import psnr, ssim

__all__ = ["psnr", "ssim"]
