"""Rows of the other image pipelines."""

from __future__ import annotations

from tests.compatibility.components import DPM, DPM_FLOW, SD3, ddim, flow, image_vae, part
from tests.compatibility.inputs import (
    IMAGE,
    LARGE,
    MASKED,
    POOLED,
    SMALL,
    TEXT,
    TINY,
    mask,
    noise,
)
from tests.compatibility.rows import Row

_PIXART = {
    "sample_size": 8,
    "num_layers": 1,
    "patch_size": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "in_channels": 4,
    "out_channels": 8,
}
PIXART = part("PixArtTransformer2DModel", **_PIXART, caption_channels=16, cross_attention_dim=16)
_SANA = {
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 8,
    "caption_channels": 16,
    "sample_size": 8,
}
_LUMINA = {
    "sample_size": 4,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 8,
    "num_layers": 1,
    "num_attention_heads": 1,
    "num_kv_heads": 1,
    "multiple_of": 16,
}
UNBINNED = {"use_resolution_binning": False, "negative_prompt": None}

ROWS = (
    Row(
        "Stable Diffusion 3",
        "StableDiffusion3Pipeline",
        {"transformer": SD3, "scheduler": flow()},
        SMALL | POOLED,
    ),
    Row(
        "Stable Diffusion 3 img2img",
        "StableDiffusion3Img2ImgPipeline",
        {"transformer": SD3, "scheduler": flow(), "vae": image_vae},
        TINY | POOLED | IMAGE | {"strength": 1.0},
    ),
    Row(
        "PixArt-Alpha",
        "PixArtAlphaPipeline",
        {"transformer": PIXART, "scheduler": DPM},
        SMALL | MASKED | UNBINNED,
    ),
    Row(
        "PixArt-Sigma",
        "PixArtSigmaPipeline",
        {"transformer": PIXART, "scheduler": DPM},
        SMALL | MASKED | UNBINNED,
    ),
    Row(
        "PixArt-Sigma, PAG",
        "PixArtSigmaPAGPipeline",
        {"transformer": PIXART, "scheduler": DPM, "pag_applied_layers": "blocks.0"},
        SMALL | MASKED | UNBINNED | {"pag_scale": 2.0},
    ),
    Row(
        "DiT",
        "DiTPipeline",
        {
            "transformer": part("DiTTransformer2DModel", **_PIXART, norm_type="ada_norm_zero"),
            "scheduler": ddim(),
            "vae": image_vae,
        },
        {"class_labels": [1], "output_type": "np"},
    ),
    Row(
        "Sana",
        "SanaPipeline",
        {"transformer": part("SanaTransformer2DModel", **_SANA), "scheduler": DPM_FLOW},
        LARGE | MASKED | UNBINNED,
    ),
    Row(
        "Lumina",
        "LuminaPipeline",
        {
            "transformer": part(
                "LuminaNextDiT2DModel", **_LUMINA, learn_sigma=True, cross_attention_dim=16
            ),
            "scheduler": flow(),
        },
        SMALL | MASKED,
    ),
    Row(
        "Lumina 2",
        "Lumina2Pipeline",
        {
            "transformer": part(
                "Lumina2Transformer2DModel", **_LUMINA, axes_dim_rope=(4, 2, 2), cap_feat_dim=16
            ),
            "scheduler": flow(),
        },
        SMALL | MASKED | {"cfg_trunc_ratio": 0.5},
    ),
    Row(
        "HiDream",
        "HiDreamImagePipeline",
        {
            "transformer": part(
                "HiDreamImageTransformer2DModel",
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_layers=1,
                num_single_layers=1,
                attention_head_dim=8,
                num_attention_heads=2,
                caption_channels=[16, 16],
                text_emb_dim=16,
                num_routed_experts=4,
                num_activated_experts=2,
                axes_dims_rope=(4, 2, 2),
                max_resolution=(32, 32),
                llama_layers=(0, 1),
            ),
            "scheduler": flow(),
        },
        SMALL
        | {
            "prompt_embeds_t5": noise(1, 4, 16),
            "negative_prompt_embeds_t5": noise(1, 4, 16, seed=1),
            "prompt_embeds_llama3": noise(2, 1, 4, 16),
            "negative_prompt_embeds_llama3": noise(2, 1, 4, 16, seed=1),
            "pooled_prompt_embeds": noise(1, 16),
            "negative_pooled_prompt_embeds": noise(1, 16, seed=1),
        },
        settings={"default_sample_size": 4},
    ),
    Row(
        "AuraFlow",
        "AuraFlowPipeline",
        {
            "transformer": part(
                "AuraFlowTransformer2DModel",
                sample_size=8,
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_mmdit_layers=1,
                num_single_dit_layers=1,
                attention_head_dim=8,
                num_attention_heads=2,
                caption_projection_dim=16,
                joint_attention_dim=16,
                pos_embed_max_size=64,
            ),
            "scheduler": flow(),
        },
        SMALL | MASKED,
    ),
    Row(
        "PRX",
        "PRXPipeline",
        {
            "transformer": part(
                "PRXTransformer2DModel",
                patch_size=1,
                in_channels=4,
                context_in_dim=16,
                hidden_size=8,
                mlp_ratio=2.0,
                num_heads=2,
                depth=1,
                axes_dim=[2, 2],
            ),
            "scheduler": flow(),
        },
        SMALL | MASKED | UNBINNED,
    ),
    Row(
        "HunyuanDiT",
        "HunyuanDiTPipeline",
        {
            "transformer": part(
                "HunyuanDiT2DModel",
                sample_size=4,
                num_layers=2,
                patch_size=2,
                attention_head_dim=8,
                num_attention_heads=2,
                in_channels=4,
                cross_attention_dim=16,
                cross_attention_dim_t5=16,
                pooled_projection_dim=16,
                hidden_size=16,
                text_len=4,
                text_len_t5=4,
            ),
            "scheduler": ddim(prediction_type="v_prediction"),
            "requires_safety_checker": False,
        },
        SMALL
        | MASKED
        | UNBINNED
        | {
            "prompt_embeds_2": noise(1, 4, 16),
            "negative_prompt_embeds_2": noise(1, 4, 16, seed=1),
            "prompt_attention_mask_2": mask(1, 4),
            "negative_prompt_attention_mask_2": mask(1, 4),
        },
    ),
    Row(
        "HunyuanImage 2.1",
        "HunyuanImagePipeline",
        {
            "transformer": part(
                "HunyuanImageTransformer2DModel",
                in_channels=4,
                out_channels=4,
                num_attention_heads=2,
                attention_head_dim=8,
                num_layers=1,
                num_single_layers=1,
                num_refiner_layers=1,
                patch_size=(1, 1),
                guidance_embeds=False,
                text_embed_dim=16,
                text_embed_2_dim=16,
                rope_axes_dim=(4, 4),
            ),
            "scheduler": flow(),
        },
        LARGE
        | {
            "prompt_embeds": noise(1, 4, 16),
            "prompt_embeds_mask": mask(1, 4),
            "prompt_embeds_2": noise(1, 4, 16),
            "prompt_embeds_mask_2": mask(1, 4),
        },
    ),
    Row(
        "Sana Sprint",
        "SanaSprintPipeline",
        {
            "transformer": part(
                "SanaTransformer2DModel",
                **_SANA,
                qk_norm="rms_norm_across_heads",
                guidance_embeds=True,
            ),
            "scheduler": part("SCMScheduler"),
        },
        LARGE
        | TEXT
        | {
            "prompt_attention_mask": mask(1, 4),
            "intermediate_timesteps": None,
            "use_resolution_binning": False,
        },
        refused="has no noise schedule",
    ),
)
