"""The rows of pipelines that make videos."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLCogVideoX, AutoencoderKLWan

from tests.compatibility.image import GUIDED, MASKED
from tests.compatibility.rows import Guard, Row, ddim, flow, mask, noise, part, unipc
from tests.integration.tiny import awaken
from tests.models.opensora.small import pipeline as opensora

SMALL = {"height": 32, "width": 32, "num_frames": 9}
FRAME = {"image": noise(1, 3, 32, 32).tanh()}

_WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 16,
    "freq_dim": 16,
    "ffn_dim": 16,
    "num_layers": 1,
    "rope_max_seq_len": 32,
}
WAN = part("WanTransformer3DModel", **_WAN)
WAN_I2V = part("WanTransformer3DModel", **_WAN | {"in_channels": 36, "image_dim": 4})
WAN_I2V_22 = part("WanTransformer3DModel", **_WAN | {"in_channels": 36})
_COG = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 8,
    "text_embed_dim": 16,
    "num_layers": 1,
    "sample_width": 4,
    "sample_height": 4,
    "sample_frames": 9,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 4,
}
COG = part("CogVideoXTransformer3DModel", **_COG)
COG_I2V = part(
    "CogVideoXTransformer3DModel",
    **_COG | {"in_channels": 8, "attention_head_dim": 16},
    use_rotary_positional_embeddings=True,
    use_learned_positional_embeddings=True,
)
_COG_NOISE = {
    "prediction_type": "v_prediction",
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
}
COG_DDIM = part("CogVideoXDDIMScheduler", **_COG_NOISE)
COG_DPM = part("CogVideoXDPMScheduler", **_COG_NOISE)
LTX = part(
    "LTXVideoTransformer3DModel",
    in_channels=8,
    out_channels=8,
    patch_size=1,
    patch_size_t=1,
    num_attention_heads=2,
    attention_head_dim=8,
    cross_attention_dim=16,
    num_layers=1,
    caption_channels=16,
)
COSMOS = part(
    "CosmosTransformer3DModel",
    in_channels=4,
    out_channels=4,
    num_attention_heads=2,
    attention_head_dim=16,
    num_layers=1,
    mlp_ratio=2,
    text_embed_dim=16,
    adaln_lora_dim=4,
    max_size=(4, 32, 32),
    patch_size=(1, 2, 2),
    concat_padding_mask=False,
)


def wan_vae() -> AutoencoderKLWan:
    return awaken(AutoencoderKLWan(base_dim=4, z_dim=16, dim_mult=[1] * 4, num_res_blocks=1))


def cog_vae() -> AutoencoderKLCogVideoX:
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(4, 4, 4, 4),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    return vae.eval()


ROWS = (
    Row("Wan 2.1 T2V", "WanPipeline", {"transformer": WAN, "scheduler": unipc()}, SMALL | GUIDED),
    Row(
        "Wan 2.2 T2V, two experts",
        "WanPipeline",
        {
            "transformer": WAN,
            "transformer_2": WAN,
            "scheduler": unipc(),
            "boundary_ratio": 0.8,
        },
        SMALL | GUIDED | {"guidance_scale_2": 3.0},
    ),
    Row(
        "Wan 2.1 I2V",
        "WanImageToVideoPipeline",
        {"transformer": WAN_I2V, "scheduler": unipc(), "vae": wan_vae},
        SMALL | GUIDED | FRAME,
        settings={"encode_image": lambda image, device: noise(1, 5, 4)},
    ),
    Row(
        "Wan 2.2 I2V, two experts",
        "WanImageToVideoPipeline",
        {
            "transformer": WAN_I2V_22,
            "transformer_2": WAN_I2V_22,
            "scheduler": unipc(),
            "vae": wan_vae,
            "boundary_ratio": 0.8,
        },
        SMALL | GUIDED | FRAME,
    ),
    Row(
        "Wan 2.2 TI2V",
        "WanPipeline",
        {"transformer": WAN, "scheduler": unipc(), "expand_timesteps": True},
        SMALL | GUIDED,
    ),
    Row(
        "Wan VACE",
        "WanVACEPipeline",
        {
            "transformer": part(
                "WanVACETransformer3DModel",
                **_WAN | {"num_layers": 2},
                vace_layers=[0, 1],
                vace_in_channels=96,
            ),
            "scheduler": unipc(),
            "vae": wan_vae,
        },
        SMALL | GUIDED,
    ),
    Row(
        "SkyReels V2 T2V",
        "SkyReelsV2Pipeline",
        {"transformer": part("SkyReelsV2Transformer3DModel", **_WAN), "scheduler": unipc()},
        SMALL | GUIDED,
    ),
    Row(
        "CogVideoX T2V",
        "CogVideoXPipeline",
        {"transformer": COG, "scheduler": COG_DDIM},
        SMALL | GUIDED,
    ),
    Row(
        "CogVideoX I2V",
        "CogVideoXImageToVideoPipeline",
        {"transformer": COG_I2V, "scheduler": COG_DDIM, "vae": cog_vae},
        SMALL | GUIDED | FRAME,
    ),
    Row(
        "CogVideoX T2V, DPM",
        "CogVideoXPipeline",
        {"transformer": COG, "scheduler": COG_DPM},
        SMALL | GUIDED,
        refused="CogVideoXDPMScheduler adds noise",
    ),
    Row(
        "CogVideoX I2V, DPM",
        "CogVideoXImageToVideoPipeline",
        {"transformer": COG_I2V, "scheduler": COG_DPM, "vae": cog_vae},
        SMALL | GUIDED | FRAME,
        refused="CogVideoXDPMScheduler adds noise",
    ),
    Row(
        "HunyuanVideo",
        "HunyuanVideoPipeline",
        {
            "transformer": part(
                "HunyuanVideoTransformer3DModel",
                in_channels=4,
                out_channels=4,
                num_attention_heads=2,
                attention_head_dim=10,
                num_layers=1,
                num_single_layers=1,
                num_refiner_layers=1,
                patch_size=1,
                patch_size_t=1,
                guidance_embeds=True,
                text_embed_dim=16,
                pooled_projection_dim=8,
                rope_axes_dim=(2, 4, 4),
            ),
            "scheduler": flow(),
        },
        SMALL
        | {
            "prompt_embeds": noise(1, 4, 16),
            "pooled_prompt_embeds": noise(1, 8),
            "prompt_attention_mask": mask(1, 4),
        },
    ),
    Row(
        "LTX-Video",
        "LTXPipeline",
        {"transformer": LTX, "scheduler": flow()},
        SMALL | MASKED | {"height": 64, "width": 64},
    ),
    Row(
        "Mochi",
        "MochiPipeline",
        {
            "transformer": part(
                "MochiTransformer3DModel",
                patch_size=2,
                num_attention_heads=2,
                attention_head_dim=8,
                num_layers=2,
                pooled_projection_dim=16,
                in_channels=12,
                text_embed_dim=16,
                time_embed_dim=4,
                max_sequence_length=4,
            ),
            "scheduler": flow(invert_sigmas=True, shift=1.0),
        },
        SMALL | MASKED | {"num_frames": 7},
    ),
    Row(
        "Allegro",
        "AllegroPipeline",
        {
            "transformer": part(
                "AllegroTransformer3DModel",
                num_attention_heads=2,
                attention_head_dim=12,
                in_channels=4,
                out_channels=4,
                num_layers=1,
                cross_attention_dim=24,
                sample_width=4,
                sample_height=4,
                sample_frames=3,
                caption_channels=16,
            ),
            "scheduler": part("EulerDiscreteScheduler"),
        },
        SMALL | MASKED | {"negative_prompt": None, "num_frames": 8},
    ),
    Row(
        "Latte",
        "LattePipeline",
        {
            "transformer": part(
                "LatteTransformer3DModel",
                sample_size=8,
                num_layers=1,
                patch_size=2,
                attention_head_dim=8,
                num_attention_heads=2,
                caption_channels=16,
                in_channels=4,
                cross_attention_dim=16,
                out_channels=8,
                norm_type="ada_norm_single",
                norm_elementwise_affine=False,
                video_length=3,
            ),
            "scheduler": ddim(),
        },
        GUIDED | {"height": 32, "width": 32, "video_length": 3, "negative_prompt": None},
    ),
    Row(
        "Kandinsky 5 T2V",
        "Kandinsky5T2VPipeline",
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
    ),
    Row(
        "EasyAnimate",
        "EasyAnimatePipeline",
        {
            "transformer": part(
                "EasyAnimateTransformer3DModel",
                num_attention_heads=2,
                attention_head_dim=16,
                in_channels=4,
                out_channels=4,
                time_embed_dim=2,
                text_embed_dim=16,
                num_layers=1,
                sample_width=4,
                sample_height=4,
                patch_size=2,
            ),
            "scheduler": flow(),
            "vae": part(
                "AutoencoderKLMagvit",
                down_block_types=("SpatialDownBlock3D", *["SpatialTemporalDownBlock3D"] * 3),
                up_block_types=("SpatialUpBlock3D", *["SpatialTemporalUpBlock3D"] * 3),
                block_out_channels=(4, 4, 4, 4),
                latent_channels=4,
                layers_per_block=1,
                norm_num_groups=2,
                spatial_group_norm=False,
            ),
        },
        SMALL | MASKED | {"num_frames": 5},
    ),
    Row(
        "Sana-Video",
        "SanaVideoPipeline",
        {
            "transformer": part(
                "SanaVideoTransformer3DModel",
                in_channels=16,
                out_channels=16,
                num_attention_heads=2,
                attention_head_dim=12,
                num_layers=1,
                num_cross_attention_heads=2,
                cross_attention_head_dim=12,
                cross_attention_dim=24,
                caption_channels=16,
                sample_size=8,
                patch_size=(1, 2, 2),
                qk_norm="rms_norm_across_heads",
                rope_max_seq_len=32,
            ),
            "scheduler": part(
                "DPMSolverMultistepScheduler",
                prediction_type="flow_prediction",
                use_flow_sigmas=True,
                flow_shift=3.0,
            ),
            "vae": wan_vae,
        },
        MASKED
        | {
            "height": 32,
            "width": 32,
            "frames": 9,
            "negative_prompt": None,
            "use_resolution_binning": False,
        },
    ),
    Row(
        "Cosmos T2W",
        "CosmosTextToWorldPipeline",
        {
            "transformer": COSMOS,
            "scheduler": part("EDMEulerScheduler", sigma_max=80.0, sigma_data=0.5),
            "safety_checker": Guard,
        },
        SMALL | GUIDED,
        refused="passes pred_original_sample",
    ),
    Row(
        "Open-Sora 1.2",
        "OpenSoraPipeline",
        {},
        {"height": 32, "width": 24, "num_frames": 5, "prompt": "a red circle moving left"},
        whole=opensora,
    ),
)
