"""Results as tables, plots, grids of images, and one HTML page. Runs no model."""
