"""The rows of pipelines that make images."""

from __future__ import annotations

import torch

from tests.compatibility.rows import Guard, Row, ddim, flow, mask, noise, part
from tests.integration.tiny import image_vae

SMALL = {"height": 32, "width": 32}
LARGE = {"height": 128, "width": 128}
TEXT = {"prompt_embeds": noise(1, 4, 16)}
GUIDED = TEXT | {"negative_prompt_embeds": noise(1, 4, 16, seed=1)}
MASKED = GUIDED | {
    "prompt_attention_mask": mask(1, 4),
    "negative_prompt_attention_mask": mask(1, 4),
}
PICTURE = {"image": noise(1, 3, 32, 32).tanh()}
HALF = noise(1, 1, 32, 32).sign().clamp_min(0)

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
FLUX = part("FluxTransformer2DModel", **_FLUX, pooled_projection_dim=16, guidance_embeds=True)
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
SD3 = part(
    "SD3Transformer2DModel",
    sample_size=16,
    patch_size=2,
    in_channels=4,
    out_channels=4,
    num_layers=1,
    attention_head_dim=8,
    num_attention_heads=2,
    caption_projection_dim=16,
    joint_attention_dim=16,
    pooled_projection_dim=16,
    pos_embed_max_size=16,
)
_UNET = {
    "block_out_channels": (4, 8),
    "layers_per_block": 1,
    "sample_size": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
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
SANA = part(
    "SanaTransformer2DModel",
    patch_size=1,
    in_channels=4,
    out_channels=4,
    num_layers=1,
    num_attention_heads=2,
    attention_head_dim=4,
    num_cross_attention_heads=2,
    cross_attention_head_dim=4,
    cross_attention_dim=8,
    caption_channels=16,
    sample_size=8,
)
LUMINA = {
    "sample_size": 4,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 8,
    "num_layers": 1,
    "num_attention_heads": 1,
    "num_kv_heads": 1,
    "multiple_of": 16,
}
EULER = part(
    "EulerDiscreteScheduler",
    beta_schedule="scaled_linear",
    timestep_spacing="leading",
    steps_offset=1,
)
DPM = part("DPMSolverMultistepScheduler")
DPM_FLOW = part(
    "DPMSolverMultistepScheduler",
    prediction_type="flow_prediction",
    use_flow_sigmas=True,
    flow_shift=3.0,
)
SD3_TEXT = GUIDED | {
    "pooled_prompt_embeds": noise(1, 16),
    "negative_pooled_prompt_embeds": noise(1, 16, seed=1),
}
UNBINNED = {"use_resolution_binning": False}

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
        SMALL | FLUX_TEXT | PICTURE | {"strength": 1.0},
    ),
    Row(
        "Flux inpaint",
        "FluxInpaintPipeline",
        {"transformer": FLUX, "scheduler": flow(), "vae": image_vae},
        SMALL | FLUX_TEXT | PICTURE | {"strength": 1.0, "mask_image": HALF},
        blends=True,
    ),
    Row(
        "Flux Kontext",
        "FluxKontextPipeline",
        {"transformer": FLUX, "scheduler": flow(), "vae": image_vae},
        SMALL | FLUX_TEXT | PICTURE | {"max_area": 1024, "_auto_resize": False},
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
        "Stable Diffusion 3",
        "StableDiffusion3Pipeline",
        {"transformer": SD3, "scheduler": flow()},
        SMALL | SD3_TEXT,
    ),
    Row(
        "Stable Diffusion 1.5",
        "StableDiffusionPipeline",
        {"unet": UNET, "scheduler": ddim(), "requires_safety_checker": False},
        SMALL | GUIDED,
    ),
    Row(
        "Stable Diffusion XL",
        "StableDiffusionXLPipeline",
        {"unet": UNET_XL, "scheduler": EULER},
        SMALL | SD3_TEXT,
    ),
    Row(
        "PixArt-Alpha",
        "PixArtAlphaPipeline",
        {"transformer": PIXART, "scheduler": DPM},
        SMALL | MASKED | UNBINNED | {"negative_prompt": None},
    ),
    Row(
        "PixArt-Sigma",
        "PixArtSigmaPipeline",
        {"transformer": PIXART, "scheduler": DPM},
        SMALL | MASKED | UNBINNED | {"negative_prompt": None},
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
        {"transformer": SANA, "scheduler": DPM_FLOW},
        LARGE | MASKED | UNBINNED | {"negative_prompt": None},
    ),
    Row(
        "Lumina",
        "LuminaPipeline",
        {
            "transformer": part(
                "LuminaNextDiT2DModel", **LUMINA, learn_sigma=True, cross_attention_dim=16
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
                "Lumina2Transformer2DModel", **LUMINA, axes_dim_rope=(4, 2, 2), cap_feat_dim=16
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
        "Qwen-Image",
        "QwenImagePipeline",
        {
            "transformer": part(
                "QwenImageTransformer2DModel",
                patch_size=2,
                in_channels=16,
                out_channels=4,
                num_layers=1,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=16,
                axes_dims_rope=(8, 4, 4),
            ),
            "scheduler": flow(),
        },
        SMALL
        | GUIDED
        | {"prompt_embeds_mask": mask(1, 4), "negative_prompt_embeds_mask": mask(1, 4)},
    ),
    Row(
        "Z-Image",
        "ZImagePipeline",
        {
            "transformer": part(
                "ZImageTransformer2DModel",
                all_patch_size=(2,),
                all_f_patch_size=(1,),
                in_channels=4,
                dim=16,
                n_layers=1,
                n_refiner_layers=1,
                n_heads=2,
                n_kv_heads=2,
                cap_feat_dim=16,
                axes_dims=[4, 2, 2],
                axes_lens=[64, 32, 32],
            ),
            "scheduler": flow(),
        },
        SMALL | {"prompt_embeds": [noise(4, 16)], "negative_prompt_embeds": [noise(4, 16, seed=1)]},
    ),
    Row(
        "CogView4",
        "CogView4Pipeline",
        {
            "transformer": part(
                "CogView4Transformer2DModel",
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_layers=1,
                attention_head_dim=4,
                num_attention_heads=2,
                text_embed_dim=16,
                time_embed_dim=8,
                condition_dim=4,
            ),
            "scheduler": flow(
                base_shift=0.25,
                max_shift=0.75,
                base_image_seq_len=256,
                use_dynamic_shifting=True,
                time_shift_type="linear",
            ),
        },
        SMALL | GUIDED,
    ),
    Row(
        "CogView3-Plus",
        "CogView3PlusPipeline",
        {
            "transformer": part(
                "CogView3PlusTransformer2DModel",
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_layers=1,
                attention_head_dim=4,
                num_attention_heads=2,
                text_embed_dim=16,
                time_embed_dim=8,
                condition_dim=2,
                pos_embed_max_size=8,
                sample_size=8,
            ),
            "scheduler": part(
                "CogVideoXDDIMScheduler",
                prediction_type="v_prediction",
                rescale_betas_zero_snr=True,
                timestep_spacing="trailing",
            ),
        },
        SMALL | GUIDED,
    ),
    Row(
        "Kandinsky 5 T2I",
        "Kandinsky5T2IPipeline",
        {
            "transformer": part(
                "Kandinsky5Transformer3DModel",
                in_visual_dim=16,
                in_text_dim=16,
                in_text_dim2=16,
                time_dim=16,
                out_visual_dim=16,
                patch_size=(1, 2, 2),
                model_dim=16,
                ff_dim=16,
                num_text_blocks=1,
                num_visual_blocks=1,
                axes_dims=(1, 1, 2),
                visual_cond=False,
                attention_type="regular",
            ),
            "scheduler": flow(),
        },
        SMALL
        | {
            "prompt_embeds_qwen": noise(1, 4, 16),
            "prompt_embeds_clip": noise(1, 16),
            "prompt_cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
            "negative_prompt_embeds_qwen": noise(1, 4, 16, seed=1),
            "negative_prompt_embeds_clip": noise(1, 16, seed=1),
            "negative_prompt_cu_seqlens": torch.tensor([0, 4], dtype=torch.int32),
        },
        settings={"resolutions": [(32, 32)]},
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
    Row(
        "Cosmos 2 T2I",
        "Cosmos2TextToImagePipeline",
        {
            "transformer": part(
                "CosmosTransformer3DModel",
                in_channels=16,
                out_channels=16,
                num_attention_heads=2,
                attention_head_dim=16,
                num_layers=1,
                mlp_ratio=2,
                text_embed_dim=16,
                adaln_lora_dim=4,
                max_size=(4, 32, 32),
                patch_size=(1, 2, 2),
                concat_padding_mask=False,
            ),
            "scheduler": flow(use_karras_sigmas=True),
            "safety_checker": Guard,
        },
        SMALL | GUIDED,
    ),
    Row(
        "Krea 2",
        "Krea2Pipeline",
        {
            "transformer": part(
                "Krea2Transformer2DModel",
                in_channels=16,
                num_layers=1,
                attention_head_dim=8,
                num_attention_heads=2,
                num_key_value_heads=2,
                intermediate_size=16,
                timestep_embed_dim=8,
                text_hidden_dim=16,
                num_text_layers=3,
                text_num_attention_heads=2,
                text_num_key_value_heads=1,
                text_intermediate_size=16,
                num_layerwise_text_blocks=1,
                num_refiner_text_blocks=1,
                axes_dims_rope=(4, 2, 2),
            ),
            "scheduler": flow(use_dynamic_shifting=True),
        },
        SMALL
        | {
            "prompt_embeds": noise(1, 4, 3, 16),
            "negative_prompt_embeds": noise(1, 4, 3, 16, seed=1),
            "prompt_embeds_mask": mask(1, 4).bool(),
            "negative_prompt_embeds_mask": mask(1, 4).bool(),
        },
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
        "Kolors",
        "KolorsPipeline",
        {"unet": UNET_XL, "scheduler": EULER},
        SMALL | SD3_TEXT,
    ),
)
