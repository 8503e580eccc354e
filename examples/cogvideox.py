"""CogVideoX: calibrate once, then generate with half of the network evaluations.

python examples/cogvideox.py          # zai-org/CogVideoX-5b from the hub, on a GPU
python examples/cogvideox.py --tiny   # the bundled emoji-cogvideox, on any machine
"""

import sys
from pathlib import Path

import torch
from diffusers import CogVideoXPipeline
from diffusers.utils import export_to_video

import ertacache
from ertacache.models import load_pipeline, load_prompts

MODEL = "zai-org/CogVideoX-5b"
CALL = {"num_inference_steps": 50, "guidance_scale": 6.0}
CALL |= {"height": 480, "width": 720, "num_frames": 49}
PROMPTS = Path(__file__).with_name("prompts.txt")  # better: 8 to 32 of the kind you use


def load(tiny):
    """The pipeline, a prompt and others to calibrate with, and the arguments of its call."""
    if tiny:
        pipe = load_pipeline("emoji-cogvideox")
        return pipe, load_prompts("emoji-cogvideox", "calibration")[:5], {}
    pipe = CogVideoXPipeline.from_pretrained(MODEL, dtype=torch.bfloat16)
    pipe.enable_model_cpu_offload()
    pipe.vae.enable_tiling()
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
    export_to_video(full, str(folder / "full.mp4"), fps=8)
    export_to_video(fast, str(folder / "fast.mp4"), fps=8)
    return full, fast


if __name__ == "__main__":
    main(Path("cogvideox-out"), tiny="--tiny" in sys.argv)
