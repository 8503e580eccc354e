"""Distances between images or videos: PSNR, SSIM, LPIPS, CLIP, FID, motion."""

from ertacache.metrics.comparison import (
    METRICS,
    Comparison,
    Score,
    bootstrap_interval,
    open_metric,
)
from ertacache.metrics.image import IDENTICAL, psnr, ssim
from ertacache.metrics.perceptual import lpips
from ertacache.metrics.video import motion_error, temporal_flickering
from ertacache.metrics.weights import NotAvailableError

__all__ = [
    "IDENTICAL",
    "METRICS",
    "Comparison",
    "NotAvailableError",
    "Score",
    "bootstrap_interval",
    "lpips",
    "motion_error",
    "open_metric",
    "psnr",
    "ssim",
    "temporal_flickering",
]
