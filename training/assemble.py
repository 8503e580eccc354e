"""Put a trained model together as a diffusers folder inside the package, with its prompt files.

    python -m training.assemble emoji-flux --checkpoints checkpoints
    python -m training.assemble emoji-flux --autoencoder src/ertacache/models/weights/emoji-flux

The second keeps an autoencoder that is there, for a transformer trained further. Weights are
stored in half precision; the configurations name float32, so that loading without a dtype gives
float32 throughout. Trains nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from diffusers import DiffusionPipeline

from training.autoencoders import load_autoencoder
from training.data import caption, scenes, spread
from training.denoisers import DENOISERS
from training.loop import load_ema
from training.patches import SPACES

__all__ = ["assemble", "build", "write_prompts"]

PACKAGE = Path(__file__).parent.parent / "src" / "ertacache" / "models"


def build(name: str, checkpoints: Path, autoencoder: Path | None = None) -> DiffusionPipeline:
    """The complete pipeline of a model, with averaged weights.

    Args:
        name: The model.
        checkpoints: Where it was trained.
        autoencoder: A diffusers folder whose autoencoder is kept; by default a trained one.
    """
    parts = DENOISERS[name].build()
    load_ema(parts.modules, checkpoints / name)
    parts.modules.eval()
    if autoencoder is None:
        return parts.pipeline(load_autoencoder(name.removeprefix("emoji-"), checkpoints))
    return parts.pipeline(DiffusionPipeline.from_pretrained(autoencoder).vae)


def assemble(name: str, checkpoints: Path, autoencoder: Path | None = None) -> int:
    """Write the folder of a model; return its size in bytes."""
    folder = PACKAGE / "weights" / name
    pipe = build(name, checkpoints, autoencoder)
    shutil.rmtree(folder, ignore_errors=True)
    pipe.to(torch.float16).save_pretrained(folder, safe_serialization=True)
    for path in folder.glob("*/config.json"):
        config = json.loads(path.read_text())
        config.pop("_name_or_path", None)  # where it was loaded from is nobody's business
        if "dtype" in config:
            config["dtype"] = "float32"
        path.write_text(json.dumps(config, indent=2) + "\n")
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_prompts(name: str, *, video: bool) -> None:
    """One calibration prompt per subject, two held-out ones."""
    folder = PACKAGE / "prompts"
    folder.mkdir(parents=True, exist_ok=True)
    for split, pool, count in (("calibration", "train", 64), ("heldout", "test", 128)):
        chosen = spread(scenes(pool, video=video), count, seed=0)
        text = "".join(caption(scene) + "\n" for scene in chosen)
        (folder / f"{name}-{split}.txt").write_text(text)


def main() -> None:
    """Assemble one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(DENOISERS))
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--autoencoder", type=Path, help="folder whose autoencoder is kept")
    args = parser.parse_args()
    write_prompts(args.name, video=SPACES[DENOISERS[args.name].build.space].video)
    size = assemble(args.name, args.checkpoints, args.autoencoder)
    print(f"{args.name}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
