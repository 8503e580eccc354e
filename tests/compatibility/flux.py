"""The rows of Flux and of those built like it: tokens of packed latents."""

from __future__ import annotations

from tests.compatibility.parts import GUIDED, HALF, PICTURE, SMALL, TEXT, TINY, flow, mask, noise
from tests.compatibility.rows import Row, part
from tests.integration.tiny import image_vae

_FLUX = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "axes_dims_rope": (2, 2, 4),
}
_POOLED = {"pooled_projection_dim": 16, "guidance_embeds": True}
FLUX = part("FluxTransformer2DModel", **_FLUX, **_POOLED)
FLUX_TEXT = TEXT | {"pooled_prompt_embeds": noise(1, 16)}
FLUX_AWAY = {
    "true_cfg_scale": 2.0,
    "negative_prompt_embeds": noise(1, 4, 16, seed=1),
    "negative_pooled_prompt_embeds": noise(1, 16, seed=1),
}
FLUX2 = part(
    "Flux2Transformer2DModel",
    **_FLUX | {"axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 16},
)
FLUX2_VAE = part(
    "AutoencoderKLFlux2",
    block_out_channels=(4, 4, 4, 4),
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    layers_per_block=1,
    latent_channels=4,
    norm_num_groups=1,
    use_quant_conv=False,
    use_post_quant_conv=False,
)
CHROMA = part(
    "ChromaTransformer2DModel",
    **_FLUX,
    approximator_hidden_dim=16,
    approximator_layers=1,
    approximator_num_channels=16,
)
BOOLEAN = {
    "prompt_attention_mask": mask(1, 4).bool(),
    "negative_prompt_attention_mask": mask(1, 4).bool(),
}

ROWS = (
    Row("Flux", "FluxPipeline", {"transformer": FLUX, "scheduler": flow()}, SMALL | FLUX_TEXT),
    Row(
        "Flux, true guidance",
        "FluxPipeline",
        {"transformer": FLUX, "scheduler": flow()},
        SMALL | FLUX_TEXT | FLUX_AWAY,
    ),
    Row(
        "Flux img2img",
        "FluxImg2ImgPipeline",
        {"transformer": FLUX, "scheduler": flow(), "vae": image_vae},
        TINY | FLUX_TEXT | PICTURE | {"strength": 1.0},
    ),
    Row(
        "Flux inpaint",
        "FluxInpaintPipeline",
        {"transformer": FLUX, "scheduler": flow(), "vae": image_vae},
        TINY | FLUX_TEXT | PICTURE | {"strength": 1.0, "mask_image": HALF},
        blends=True,
    ),
    Row(
        "Flux Kontext",
        "FluxKontextPipeline",
        {"transformer": FLUX, "scheduler": flow(), "vae": image_vae},
        TINY | FLUX_TEXT | PICTURE | {"max_area": 256, "_auto_resize": False},
    ),
    Row(
        "Flux Fill",
        "FluxFillPipeline",
        {
            "transformer": part(
                "FluxTransformer2DModel",
                **_FLUX | {"in_channels": 48, "out_channels": 16},
                pooled_projection_dim=16,
                guidance_embeds=True,
            ),
            "scheduler": flow(),
            "vae": image_vae,
        },
        TINY | FLUX_TEXT | PICTURE | {"mask_image": HALF},
    ),
    Row(
        "Flux Control",
        "FluxControlPipeline",
        {
            "transformer": part(
                "FluxTransformer2DModel",
                **_FLUX | {"in_channels": 32, "out_channels": 16},
                pooled_projection_dim=16,
                guidance_embeds=True,
            ),
            "scheduler": flow(),
            "vae": image_vae,
        },
        TINY | FLUX_TEXT | {"control_image": PICTURE["image"]},
    ),
    Row(
        "Flux 2",
        "Flux2Pipeline",
        {"transformer": FLUX2, "scheduler": flow()},
        SMALL | TEXT,
    ),
    Row(
        "Flux 2 Klein",
        "Flux2KleinPipeline",
        {"transformer": FLUX2, "scheduler": flow(), "vae": FLUX2_VAE},
        SMALL | GUIDED,
    ),
    Row(
        "Chroma",
        "ChromaPipeline",
        {"transformer": CHROMA, "scheduler": flow()},
        SMALL
        | GUIDED
        | {
            "prompt_attention_mask": mask(1, 4).bool(),
            "negative_prompt_attention_mask": mask(1, 4).bool(),
        },
    ),
    Row(
        "Chroma img2img",
        "ChromaImg2ImgPipeline",
        {"transformer": CHROMA, "scheduler": flow(), "vae": image_vae},
        TINY | GUIDED | BOOLEAN | PICTURE | {"strength": 1.0},
    ),
    Row(
        "Bria 3.2",
        "BriaPipeline",
        {
            "transformer": part(
                "BriaTransformer2DModel",
                **_FLUX | {"axes_dims_rope": [0, 4, 4]},
                pooled_projection_dim=None,
            ),
            "scheduler": flow(),
            "vae": image_vae,
        },
        SMALL | GUIDED,
    ),
    Row(
        "Ovis-Image",
        "OvisImagePipeline",
        {
            "transformer": part("OvisImageTransformer2DModel", **_FLUX, out_channels=16),
            "scheduler": flow(),
        },
        SMALL | GUIDED | {"negative_prompt": None},
    ),
    Row(
        "LongCat-Image",
        "LongCatImagePipeline",
        {
            "transformer": part("LongCatImageTransformer2DModel", **_FLUX | {"in_channels": 64}),
            "scheduler": flow(),
        },
        SMALL | {"prompt": "a", "negative_prompt": "b", "enable_prompt_rewrite": False},
        settings={"_encode_prompt": lambda prompt: noise(1, 4, 16, seed=ord(prompt[0]))},
    ),
)
