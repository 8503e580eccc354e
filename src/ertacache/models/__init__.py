"""Bundled models: small, trained, complete diffusers pipelines that load without network."""

from __future__ import annotations

from ertacache.models.zoo import MODELS, Model, UnknownModelError, load_pipeline, load_prompts

__all__ = ["MODELS", "Model", "UnknownModelError", "load_pipeline", "load_prompts"]
