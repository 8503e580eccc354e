"""Attach a policy to a diffusers pipeline, or record the pipeline's full run.

The only layer that knows diffusers' hooks and schedulers.
"""
