from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoImageProcessor, CLIPConfig, CLIPModel, CLIPTokenizer

from ertacache.metrics import NotAvailableError
from ertacache.metrics.clip import Clip
from ertacache.metrics.image import to_image
from tests.metrics.patterns import distorted, pattern

LAYER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random CLIP that looks at 32 x 32 pixels and reads letters."""
    path = tmp_path_factory.mktemp("clip")
    tokens = [
        "<|startoftext|>",
        "<|endoftext|>",
        *LETTERS,
        *(f"{letter}</w>" for letter in LETTERS),
    ]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    CLIPTokenizer(vocab=vocabulary, merges=[]).save_pretrained(path)
    (path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32},'
        ' "crop_size": {"height": 32, "width": 32}}'
    )
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    text = LAYER | ends | {"vocab_size": len(tokens), "max_position_embeddings": 12}
    vision = LAYER | {"image_size": 32, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    CLIPModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def clip(folder: Path) -> Clip:
    return Clip.load(str(folder))


def test_it_is_the_cosine_that_transformers_computes(clip: Clip, folder: Path) -> None:
    images = torch.cat([pattern(40, 48), distorted(40, 48)])
    texts = ["a cat", "dog"]
    model = CLIPModel.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    tokens = CLIPTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    pixels = processor([to_image(x) for x in images], return_tensors="pt")["pixel_values"]
    assert pixels.shape == (2, 3, 32, 32)
    with torch.no_grad():
        output = model(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            pixel_values=pixels,
        )
    expected = output.logits_per_image / model.logit_scale.exp()
    assert clip.text_similarity(texts, images).tolist() == pytest.approx(
        expected.diagonal().tolist(), abs=1e-5
    )
    cosine = (output.image_embeds[0] @ output.image_embeds[1]).item()
    found = clip.image_similarity(images[:1], images[1:])
    assert found.item() == pytest.approx(cosine, abs=1e-5)
    assert found.item() < 1


def test_identical_is_one_and_a_video_is_the_mean_of_its_frames(clip: Clip) -> None:
    a, b = pattern(32, 32), distorted(32, 32)
    assert clip.image_similarity(a, a).item() == pytest.approx(1)
    pair = clip.image_similarity(b, a).item()
    video, still = torch.stack([a, b], dim=1), torch.stack([a, a], dim=1)
    assert clip.image_similarity(video, still).item() == pytest.approx((1 + pair) / 2)
    by_frame = [clip.text_similarity(["cat"], x).item() for x in (a, b)]
    assert clip.text_similarity(["cat"], video).item() == pytest.approx(sum(by_frame) / 2)


def test_a_long_text_is_cut_off(clip: Clip) -> None:
    assert clip.text_similarity(["cat " * 40], pattern(32, 32)).shape == (1,)


def test_each_image_needs_its_text(clip: Clip) -> None:
    with pytest.raises(ValueError, match="1 images need as many texts"):
        clip.text_similarity(["a", "b"], pattern(32, 32))


def test_without_a_model_there_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(
        NotAvailableError, match=r"absent' is not one on this machine: pass a folder.*hf download"
    ):
        Clip.load(str(tmp_path / "absent"))
    with pytest.raises(NotAvailableError, match="is not one on this machine"):
        Clip.load(str(tmp_path))
