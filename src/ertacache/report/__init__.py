"""Results as a page that a person reads. Knows rows and samples, runs no model."""

from ertacache.report.page import make_page

__all__ = ["make_page"]
