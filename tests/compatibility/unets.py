"""Rows of pipelines with a U-Net, and of schedulers that are refused."""

from __future__ import annotations

from tests.compatibility.components import ddim, image_vae, part
from tests.compatibility.inputs import GUIDED, HALF, IMAGE, POOLED, SMALL, TEXT, TINY
from tests.compatibility.rows import Row

_UNET = {
    "block_out_channels": (4,),
    "layers_per_block": 1,
    "sample_size": 8,
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
    "cross_attention_dim": 16,
    "norm_num_groups": 2,
    "attention_head_dim": 2,
}
UNET = part("UNet2DConditionModel", **_UNET)
UNET_XL = part(
    "UNet2DConditionModel",
    **_UNET,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=64,
)
EULER = part(
    "EulerDiscreteScheduler",
    beta_schedule="scaled_linear",
    timestep_spacing="leading",
    steps_offset=1,
)
SAFE = {"requires_safety_checker": False}

ROWS = (
    Row(
        "Stable Diffusion 1.5",
        "StableDiffusionPipeline",
        {"unet": UNET, "scheduler": ddim(steps_offset=1)} | SAFE,
        SMALL | GUIDED,
    ),
    Row(
        "Stable Diffusion 1.5 img2img",
        "StableDiffusionImg2ImgPipeline",
        {"unet": UNET, "scheduler": ddim(steps_offset=1), "vae": image_vae} | SAFE,
        GUIDED | IMAGE | {"strength": 1.0},
    ),
    Row(
        "Stable Diffusion 1.5 inpaint",
        "StableDiffusionInpaintPipeline",
        {"unet": UNET, "scheduler": ddim(steps_offset=1), "vae": image_vae} | SAFE,
        TINY | GUIDED | IMAGE | {"strength": 1.0, "mask_image": HALF},
        blends=True,
    ),
    Row(
        "Stable Diffusion 1.5, PAG",
        "StableDiffusionPAGPipeline",
        {"unet": UNET, "scheduler": ddim(steps_offset=1)} | SAFE,
        SMALL | GUIDED | {"pag_scale": 2.0},
    ),
    Row(
        "Stable Diffusion XL",
        "StableDiffusionXLPipeline",
        {"unet": UNET_XL, "scheduler": EULER},
        SMALL | POOLED,
    ),
    Row(
        "Stable Diffusion XL img2img",
        "StableDiffusionXLImg2ImgPipeline",
        {"unet": UNET_XL, "scheduler": EULER, "vae": image_vae},
        POOLED | IMAGE | {"strength": 1.0},
    ),
    Row(
        "Kolors",
        "KolorsPipeline",
        {"unet": UNET_XL, "scheduler": EULER},
        SMALL | POOLED,
    ),
    Row(
        "AnimateDiff",
        "AnimateDiffPipeline",
        {
            "unet": UNET,
            "motion_adapter": part(
                "MotionAdapter",
                block_out_channels=(4,),
                motion_layers_per_block=1,
                motion_norm_num_groups=2,
                motion_num_attention_heads=2,
                use_motion_mid_block=False,
            ),
            "scheduler": ddim(beta_schedule="linear"),
        },
        SMALL | GUIDED | {"num_frames": 3},
    ),
    Row(
        "LCM",
        "LatentConsistencyModelPipeline",
        {
            "unet": part("UNet2DConditionModel", **_UNET, time_cond_proj_dim=16),
            "scheduler": part("LCMScheduler", clip_sample=False),
        }
        | SAFE,
        SMALL | TEXT,
        refused="adds noise",
    ),
    Row(
        "Stable Diffusion 1.5, Euler ancestral",
        "StableDiffusionPipeline",
        {"unet": UNET, "scheduler": part("EulerAncestralDiscreteScheduler")} | SAFE,
        SMALL | GUIDED,
        refused="adds noise",
    ),
    Row(
        "Stable Diffusion 1.5, Heun",
        "StableDiffusionPipeline",
        {"unet": UNET, "scheduler": part("HeunDiscreteScheduler")} | SAFE,
        SMALL | GUIDED,
        refused="calls the network 2 times",
    ),
    Row(
        "Stable Diffusion 1.5, PNDM",
        "StableDiffusionPipeline",
        {"unet": UNET, "scheduler": part("PNDMScheduler", skip_prk_steps=True)} | SAFE,
        SMALL | GUIDED,
        refused="do not descend",
    ),
)
