"""The web app: an engine that runs the jobs, the views that draw them, and the Gradio page."""
