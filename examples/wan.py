"""Wan 2.2: calibrate once, then generate with half of the network evaluations.

python examples/wan.py          # Wan-AI/Wan2.2-T2V-A14B-Diffusers from the hub, on a GPU
python examples/wan.py --tiny   # the bundled emoji-wan, on any machine
"""

import sys
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanPipeline
from diffusers.utils import export_to_video

import ertacache
from ertacache.models import load_pipeline, load_prompts

MODEL = "Wan-AI/Wan2.2-T2V-A14B-Diffusers"
CALL = {"num_inference_steps": 40, "guidance_scale": 4.0, "guidance_scale_2": 3.0}
CALL |= {"height": 480, "width": 832, "num_frames": 81}
PROMPTS = Path(__file__).with_name("prompts.txt")  # better: 8 to 32 of the kind you use


def load(tiny):
    """The pipeline, a prompt and others to calibrate with, and the arguments of its call."""
    if tiny:
        pipe = load_pipeline("emoji-wan")
        return pipe, load_prompts("emoji-wan", "calibration")[:5], {}
    vae = AutoencoderKLWan.from_pretrained(MODEL, subfolder="vae", dtype=torch.float32)
    pipe = WanPipeline.from_pretrained(MODEL, vae=vae, dtype=torch.bfloat16)
    pipe.enable_model_cpu_offload()  # two networks of 14 billion parameters
    return pipe, PROMPTS.read_text().splitlines(), CALL


def main(folder, tiny=False, **more):
    """Write the full and the accelerated video of one prompt and seed into a folder."""
    pipe, (prompt, *prompts), call = load(tiny)
    call = call | more
    folder.mkdir(exist_ok=True)
    policy = folder / "policy.safetensors"
    if not policy.exists():  # once; the policy serves every speed-up, number of steps and size
        ertacache.calibrate(pipe, prompts, speedup=2, **call).save(policy)

    full = pipe(prompt, generator=torch.Generator().manual_seed(7), **call).frames[0]
    with ertacache.attach(pipe, policy, speedup=2) as handle:
        fast = pipe(prompt, generator=torch.Generator().manual_seed(7), **call).frames[0]
        print(handle.summary())
    export_to_video(full, str(folder / "full.mp4"), fps=16)
    export_to_video(fast, str(folder / "fast.mp4"), fps=16)
    return full, fast


if __name__ == "__main__":
    main(Path("wan-out"), tiny="--tiny" in sys.argv)
