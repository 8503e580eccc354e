"""Does a bundled model show what its prompt says, and where does its time go?

    python -m training.evaluate emoji-flux --checkpoints checkpoints

Generates 200 held-out prompts with the model as it is shipped and lets the classifier of
`training.classifier` evaluate them. Then compares each sample with renderings of its own scene, and
times single runs with two threads: the transformer's share is the median over runs of time inside
the transformer over time of the whole call. Writes `results/models.json` and
`docs/images/NAME.png` (of videos strips of frames, and `NAME.webp`); the last line of stdout is the
row as one JSON document. With `--sharpness` it only compares: that needs no classifier and writes
nothing but the last line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ertacache.metrics import lpips
from ertacache.models import MODELS, Model, load_pipeline
from training.autoencoders import psnr
from training.classifier import CLASSIFIERS, accuracy, load_classifier
from training.data import Scene, caption, render, scenes, spread
from training.images import save_film, save_sheet
from training.patches import SPACES, PatchBasis, patch_basis

__all__ = ["decoder_psnr", "generate", "nearest_lpips", "sharpness", "transformer_share"]

ROOT = Path(__file__).parent.parent
_PROMPTS = 200
_SHEET = 32
_RENDERINGS = 64  # of each scene, that a sample is compared with


def generate(pipe: Any, model: Model, prompts: Sequence[str], *, batch: int = 20) -> Tensor:
    """One image or video per prompt, seeded by its number; pixels in [-1, 1].

    Returns:
        Shape (prompts, 3, height, width), for videos (prompts, 3, frames, height, width).
    """
    images = []
    for start in range(0, len(prompts), batch):
        chunk = list(prompts[start : start + batch])
        seeds = range(start, start + len(chunk))
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        out = pipe(chunk, generator=generators, output_type="pt", **model.call_arguments)
        pixels = out.images if model.num_frames is None else out.frames.transpose(1, 2)
        images.append(pixels.float() * 2 - 1)
        print(f"{start + len(chunk)} of {len(prompts)}", flush=True)
    return torch.cat(images)


def transformer_share(
    pipe: Any, model: Model, prompt: str, *, runs: int = 15
) -> tuple[float, float]:
    """The median share of the transformer, and the median seconds of a run."""
    spent, began = [0.0], [0.0]

    def before(*_: object) -> None:
        began[0] = time.perf_counter()

    def after(*_: object) -> None:
        spent[0] += time.perf_counter() - began[0]

    hooks = (
        pipe.transformer.register_forward_pre_hook(before),
        pipe.transformer.register_forward_hook(after),
    )
    shares, totals = [], []
    for run in range(runs + 1):
        spent[0], start = 0.0, time.perf_counter()
        pipe(prompt, generator=torch.Generator().manual_seed(run), **model.call_arguments)
        totals.append(time.perf_counter() - start)
        shares.append(spent[0] / totals[-1])
    for hook in hooks:
        hook.remove()
    return statistics.median(shares[1:]), statistics.median(totals[1:])  # the first run warms up


def nearest_lpips(images: Tensor, shown: Sequence[Scene], *, renderings: int) -> Tensor:
    """LPIPS (AlexNet) of each sample to the nearest of several renderings of its own scene.

    Renderings have the full jitter of place and size, whatever jitter a model was trained with, so
    that models can be compared.

    Args:
        images: What `generate` returns.
        shown: The scene of each sample.
        renderings: How many of each scene.
    """
    frames = images.shape[2] if images.ndim == 5 else 1

    def prepared(pixels: Tensor) -> Tensor:
        pixels = (pixels.clamp(-1, 1) + 1) / 2
        return pixels.transpose(1, 2) if frames > 1 else pixels

    best = torch.full((len(shown),), torch.inf, dtype=torch.float64)
    for number in range(renderings):
        drawn = render(shown, images.shape[-1], seed=-100 - number, frames=frames)
        best = torch.minimum(best, lpips(prepared(images), prepared(drawn)))
    return best


@torch.no_grad()
def decoder_psnr(pipe: Any, drawn: Tensor, basis: PatchBasis | None = None) -> float:
    """Decibels of decoded renderings.

    Args:
        pipe: The pipeline, with its autoencoder.
        drawn: The renderings.
        basis: The latents are its own, which evaluates the decoder alone; without it they are those
            of the encoder.
    """
    decoded = []
    for chunk in drawn.split(20):
        latents = basis.encode(chunk) if basis else pipe.vae.encode(chunk).latent_dist.mode()
        decoded.append(pipe.vae.decode(latents).sample.clamp(-1, 1))
    return psnr(drawn, torch.cat(decoded))


def sharpness(
    pipe: Any, model: Model, images: Tensor, shown: Sequence[Scene], basis: PatchBasis
) -> dict[str, float]:
    """How near samples come to renderings, how near fresh renderings do, and the autoencoder."""
    drawn = render(shown, model.size[0], seed=-8, frames=model.num_frames or 1)
    near = nearest_lpips(images, shown, renderings=_RENDERINGS).mean()
    floor = nearest_lpips(drawn, shown, renderings=_RENDERINGS).mean()
    return {
        "nearest_lpips": round(float(near), 4),
        "rendering_lpips": round(float(floor), 4),
        "decoder_psnr": round(decoder_psnr(pipe, drawn, basis), 2),
        "autoencoder_psnr": round(decoder_psnr(pipe, drawn), 2),
    }


def test_set(pool: Sequence[Scene], number: int) -> list[Scene]:
    """One of several sets of test scenes that have none in common.

    Guidance and the length of a training were chosen while looking at set 0. A model that was
    evaluated on a set and then trained on is evaluated on the next one.
    """
    seen: set[Scene] = set()
    for seed in range(number + 1):
        chosen = spread([scene for scene in pool if scene not in seen], _PROMPTS, seed=seed)
        seen.update(chosen)
    return chosen


def _evaluate(model: Model, checkpoints: Path, shown: Sequence[Scene]) -> dict[str, Any]:
    kind = "image" if model.num_frames is None else "video"
    pipe = load_pipeline(model.name)
    spec, classifier = CLASSIFIERS[kind], load_classifier(kind, checkpoints)
    prompts = [caption(scene) for scene in shown]
    share, seconds = transformer_share(pipe, model, prompts[0])
    images = generate(pipe, model, prompts)
    sheet = ROOT / "docs" / "images" / f"{model.name}.png"
    sheet.parent.mkdir(parents=True, exist_ok=True)
    save_sheet(images[:_SHEET], prompts[:_SHEET], sheet, columns=8 if kind == "image" else 4)
    if kind == "video":
        save_film(images[:_SHEET], sheet.with_suffix(".webp"), columns=8)
    seen = accuracy(spec, classifier, images, shown)
    drawn = render(shown, model.size[0], seed=-8, frames=model.num_frames or 1)
    known = accuracy(spec, classifier, drawn, shown)
    sharp = sharpness(pipe, model, images, shown, patch_basis(checkpoints, SPACES[kind]))
    files = [path for path in model.folder.rglob("*") if path.is_file()]
    return {
        "prompts": len(prompts),
        "subject_accuracy": round(seen["subject"], 4),
        "motion_accuracy": round(seen["motion"], 4) if "motion" in seen else None,
        "transformer_share": round(share, 4),
        "weights_bytes": sum(path.stat().st_size for path in files),
        "background_accuracy": round(seen["background"], 4),
        "position_accuracy": round(seen["position"], 4) if "position" in seen else None,
        "size_accuracy": round(seen["size"], 4),
        "classifier_subject_accuracy": round(known["subject"], 4),
        **sharp,
        "seconds_per_run": round(seconds, 4),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Evaluate one model and write its row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(MODELS))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", type=int, default=1, help="number of the set of test scenes")
    parser.add_argument("--sharpness", action="store_true", help="compare with renderings only")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = MODELS[args.name]
    pool = scenes("test", video=model.num_frames is not None)
    shown = test_set(pool, args.set)
    if args.sharpness:
        pipe = load_pipeline(model.name)
        images = generate(pipe, model, [caption(scene) for scene in shown])
        space = SPACES["image" if model.num_frames is None else "video"]
        basis = patch_basis(args.checkpoints, space)
        print(json.dumps(sharpness(pipe, model, images, shown, basis)))
        return
    row = _evaluate(model, args.checkpoints, shown) | {"test_set": args.set}
    path = ROOT / "results" / "models.json"
    path.parent.mkdir(exist_ok=True)
    rows = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(rows | {args.name: row}, indent=2) + "\n")
    print(json.dumps(row))


if __name__ == "__main__":
    main()
