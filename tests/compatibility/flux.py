"""Rows of Flux and of pipelines with its packed latents."""

from __future__ import annotations

from tests.compatibility.components import FLUX_CONFIG, flow, flux, image_vae, part
from tests.compatibility.inputs import GUIDED, HALF, IMAGE, MASKS, SMALL, TEXT, TINY, noise
from tests.compatibility.rows import Row

FLUX = flux()
FLUX_TEXT = TEXT | {"pooled_prompt_embeds": noise(1, 16)}
FLUX_AWAY = {
    "true_cfg_scale": 2.0,
    "negative_prompt_embeds": noise(1, 4, 16, seed=1),
    "negative_pooled_prompt_embeds": noise(1, 16, seed=1),
}
FLUX2 = part(
    "Flux2Transformer2DModel",
    **FLUX_CONFIG | {"axes_dims_rope": (2, 2, 2, 2), "timestep_guidance_channels": 16},
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
    **FLUX_CONFIG,
    approximator_hidden_dim=16,
    approximator_layers=1,
    approximator_num_channels=16,
)
BOOLEAN = {name: values.bool() for name, values in MASKS.items()}

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
        TINY | FLUX_TEXT | IMAGE | {"strength": 1.0},
    ),
    Row(
        "Flux inpaint",
        "FluxInpaintPipeline",
        {"transformer": FLUX, "scheduler": flow(), "vae": image_vae},
        TINY | FLUX_TEXT | IMAGE | {"strength": 1.0, "mask_image": HALF},
        blends=True,
    ),
    Row(
        "Flux Kontext",
        "FluxKontextPipeline",
        {"transformer": FLUX, "scheduler": flow(), "vae": image_vae},
        TINY | FLUX_TEXT | IMAGE | {"max_area": 256, "_auto_resize": False},
    ),
    Row(
        "Flux Fill",
        "FluxFillPipeline",
        {
            "transformer": flux(in_channels=48, out_channels=16),
            "scheduler": flow(),
            "vae": image_vae,
        },
        TINY | FLUX_TEXT | IMAGE | {"mask_image": HALF},
    ),
    Row(
        "Flux Control",
        "FluxControlPipeline",
        {
            "transformer": flux(in_channels=32, out_channels=16),
            "scheduler": flow(),
            "vae": image_vae,
        },
        TINY | FLUX_TEXT | {"control_image": IMAGE["image"]},
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
        SMALL | GUIDED | BOOLEAN,
    ),
    Row(
        "Chroma img2img",
        "ChromaImg2ImgPipeline",
        {"transformer": CHROMA, "scheduler": flow(), "vae": image_vae},
        TINY | GUIDED | BOOLEAN | IMAGE | {"strength": 1.0},
    ),
    Row(
        "Bria 3.2",
        "BriaPipeline",
        {
            "transformer": part(
                "BriaTransformer2DModel",
                **FLUX_CONFIG | {"axes_dims_rope": [0, 4, 4]},
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
            "transformer": part("OvisImageTransformer2DModel", **FLUX_CONFIG, out_channels=16),
            "scheduler": flow(),
        },
        SMALL | GUIDED | {"negative_prompt": None},
    ),
    Row(
        "LongCat-Image",
        "LongCatImagePipeline",
        {
            "transformer": part(
                "LongCatImageTransformer2DModel", **FLUX_CONFIG | {"in_channels": 64}
            ),
            "scheduler": flow(),
        },
        SMALL | {"prompt": "a", "negative_prompt": "b", "enable_prompt_rewrite": False},
        settings={"_encode_prompt": lambda prompt: noise(1, 4, 16, seed=ord(prompt[0]))},
    ),
)
