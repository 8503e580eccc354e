"""A network that is not in diffusers, in a loop written by hand: record, then sample twice as fast.

The network is that of Open-Sora 1.2 (`emoji-opensora`), used as a bare module.
"""

import torch

import ertacache
from ertacache.models import load_pipeline

PARTS = load_pipeline("emoji-opensora")  # network, text encoder and decoder; its loop is not used
PROMPTS = ["a small cat on a blue background", "a large lemon on a red background", "a red apple"]
SIGMAS = torch.linspace(1, 0, 21)


def denoise_for(prompt, guidance_scale=3.0):
    """The network with its conditioning, as a function of the latent and its noise level."""
    text, empty = PARTS.encode_prompt(prompt)
    both = text.join(empty)

    @torch.no_grad()
    def denoise(x, sigma):
        out = PARTS.transformer(
            hidden_states=x.repeat(2, 1, 1, 1, 1),
            timestep=(1000 * sigma).float().expand(2),
            encoder_hidden_states=both.embeds,
            encoder_attention_mask=both.mask,
            **{"fps": 24, "height": 32, "width": 32, "return_dict": False},
        )[0]
        with_text, without = out[:, : x.shape[1]].chunk(2)  # the other channels are a variance
        return -(without + guidance_scale * (with_text - without))  # it predicts data - noise

    return denoise


def noise(seed):
    """The start of a run: a video of 17 frames is a latent of 5."""
    return torch.randn(1, 16, 5, 8, 8, generator=torch.Generator().manual_seed(seed))


def full_run(denoise, x, sigmas=SIGMAS):
    """The loop, as anyone writes it."""
    for k in range(len(sigmas) - 1):
        x = x + (sigmas[k + 1] - sigmas[k]) * denoise(x, sigmas[k])
    return x


recorder = ertacache.Recorder(SIGMAS)
for seed, prompt in enumerate(PROMPTS):
    full_run(recorder.wrap(denoise_for(prompt), prompt, seed=seed), noise(seed))
policy = recorder.policy()

denoise = denoise_for("a small red car")
full = full_run(denoise, noise(9))
fast = ertacache.sample(denoise, noise(9), SIGMAS, policy, speedup=2)
few = full_run(denoise, noise(9), SIGMAS[::2])  # half as many steps, as many evaluations
OFF = {
    name: ((x - full).std() / full.std()).item() for name, x in {"ours": fast, "fewer": few}.items()
}
