"""CLIP similarity of two images, or of a text and an image, as cosines from -1 to 1.

The model is any CLIP that transformers can load from a folder or from its download cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ertacache.metrics.image import as_frames, check_pair, in_batches, to_image
from ertacache.metrics.weights import NotAvailableError

__all__ = ["DEFAULT_CLIP", "Clip"]

DEFAULT_CLIP = "openai/clip-vit-base-patch32"
BATCH = 16


class Clip:
    """A CLIP model with its image processor and its tokenizer."""

    def __init__(self, model: Any, processor: Any, tokenizer: Any) -> None:
        """Keep the parts; ``Clip.load`` loads them."""
        self._model, self._processor, self._tokenizer = model.eval(), processor, tokenizer

    @classmethod
    def load(cls, name: str = DEFAULT_CLIP, *, device: str | torch.device = "cpu") -> Clip:
        """Load a model from a folder, or by its hub id if it was downloaded before.

        Nothing is downloaded: a metric must not fetch hundreds of megabytes unannounced.

        Raises:
            NotAvailableError: there is no such model on this machine.
        """
        from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

        local: dict[str, Any] = {"local_files_only": True}
        try:
            model: Any = CLIPModel.from_pretrained(name, **local)
            processor: Any = AutoImageProcessor.from_pretrained(name, **local)  # type: ignore[no-untyped-call]
            tokenizer = AutoTokenizer.from_pretrained(name, **local)
        except (OSError, ValueError) as cause:
            raise NotAvailableError(
                f"CLIP similarity needs a CLIP model, but {name!r} is not one on this machine: "
                f"pass a folder with one, or download it: hf download {DEFAULT_CLIP}"
            ) from cause
        return cls(model.to(device), processor, tokenizer)

    def image_similarity(self, result: Tensor, reference: Tensor) -> Tensor:
        """Cosine of each image and its reference, the mean over the frames of a video.

        Args:
            result: values from 0 to 1, shape (B, 3, height, width) or
                (B, frames, 3, height, width).
            reference: what it is compared with, of the same shape.
        """
        check_pair(result, reference)
        cosines = (self.embed_images(result) * self.embed_images(reference)).sum(1)
        return cosines.reshape(len(result), -1).mean(1)

    def text_similarity(self, texts: Sequence[str], result: Tensor) -> Tensor:
        """Cosine of each text and its image, the mean over the frames of a video.

        Args:
            texts: one for each entry of the batch; longer ones than the model takes are cut off.
            result: values from 0 to 1, shape (B, 3, height, width) or
                (B, frames, 3, height, width).
        """
        if isinstance(texts, str) or len(texts) != len(result):
            raise ValueError(f"{len(result)} images need as many texts")
        images = self.embed_images(result).reshape(len(result), -1, self._model.projection_dim)
        return (images * self.embed_texts(texts)[:, None]).sum(2).mean(1)

    def embed_images(self, images: Tensor) -> Tensor:
        """Embeddings of length 1 of each image or frame, shape (N, D)."""
        rows = []
        for batch in in_batches(as_frames(images), BATCH):
            inputs = self._processor([to_image(x) for x in batch], return_tensors="pt")
            pixels = inputs["pixel_values"].to(self._model.device)
            with torch.no_grad():
                rows.append(_unit(self._model.get_image_features(pixel_values=pixels)))
        return torch.cat(rows)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Embeddings of length 1 of each text, shape (N, D)."""
        length = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        ).to(self._model.device)
        with torch.no_grad():
            features = self._model.get_text_features(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]
            )
        return _unit(features)


def _unit(output: Any) -> Tensor:
    """Normalized features; transformers 5 wraps the tensor that transformers 4 returned."""
    features: Tensor = getattr(output, "pooler_output", output)
    return torch.nn.functional.normalize(features.double().cpu(), dim=-1)
