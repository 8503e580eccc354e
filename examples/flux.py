"""Flux: calibrate once, then generate with half of the network evaluations.

python examples/flux.py          # black-forest-labs/FLUX.1-dev from the hub, on a GPU
python examples/flux.py --tiny   # the bundled emoji-flux, on any machine
"""

import sys
from pathlib import Path

import torch
from diffusers import FluxPipeline

import ertacache
from ertacache.models import load_pipeline, load_prompts

MODEL = "black-forest-labs/FLUX.1-dev"
CALL = {"num_inference_steps": 50, "guidance_scale": 3.5, "height": 1024, "width": 1024}
PROMPTS = Path(__file__).with_name("prompts.txt")  # better: 8 to 32 of the kind you use


def load(tiny):
    """The pipeline, a prompt and others to calibrate with, and the arguments of its call."""
    if tiny:
        pipe = load_pipeline("emoji-flux")
        return pipe, load_prompts("emoji-flux", "calibration")[:5], {}
    pipe = FluxPipeline.from_pretrained(MODEL, dtype=torch.bfloat16)
    pipe.enable_model_cpu_offload()  # or pipe.to("cuda")
    return pipe, PROMPTS.read_text().splitlines(), CALL


def main(folder, tiny=False, **more):
    """Write the full and the accelerated image of one prompt and seed into a folder."""
    pipe, (prompt, *prompts), call = load(tiny)
    call = call | more
    folder.mkdir(exist_ok=True)
    policy = folder / "policy.safetensors"
    if not policy.exists():  # once; the policy serves every speed-up, number of steps and size
        ertacache.calibrate(pipe, prompts, speedup=2, **call).save(policy)

    full = pipe(prompt, generator=torch.Generator().manual_seed(7), **call).images[0]
    with ertacache.attach(pipe, policy, speedup=2) as handle:
        fast = pipe(prompt, generator=torch.Generator().manual_seed(7), **call).images[0]
        print(handle.summary())
    full.save(folder / "full.png")
    fast.save(folder / "fast.png")
    return full, fast


if __name__ == "__main__":
    main(Path("flux-out"), tiny="--tiny" in sys.argv)
