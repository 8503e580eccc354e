"""How far two pictures or videos are apart. Knows neither models nor policies."""

from ertacache.metrics.comparison import METRICS, Comparison, Score, open_metric
from ertacache.metrics.fidelity import psnr, ssim
from ertacache.metrics.intervals import bootstrap_interval
from ertacache.metrics.perceptual import lpips
from ertacache.metrics.video import motion_error, temporal_flickering
from ertacache.metrics.weights import NotAvailableError

__all__ = [
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
