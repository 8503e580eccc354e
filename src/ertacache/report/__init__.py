"""Results as tables, plots, grids of images, and one HTML page. Runs no model."""

from ertacache.report.page import make_page

__all__ = ["make_page"]
