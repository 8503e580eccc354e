"""Rows of newer image pipelines, with a language model as text encoder."""

from __future__ import annotations

from typing import Any

from diffusers import Ideogram4Pipeline
from torch import Tensor

from tests.compatibility.components import (
    COG_DDIM,
    KANDINSKY,
    QWEN,
    Guard,
    cosmos,
    flow,
    image_vae,
    part,
)
from tests.compatibility.inputs import (
    BOTH_MASKS,
    GUIDED,
    IMAGE,
    KANDINSKY_TEXT,
    SMALL,
    TINY,
    mask,
    noise,
)
from tests.compatibility.rows import STEPS, Row

QWEN_VAE = part(
    "AutoencoderKLQwenImage",
    base_dim=8,
    z_dim=4,
    dim_mult=[1, 1, 1],
    num_res_blocks=1,
    temperal_downsample=[False, True],
    latents_mean=[0.0] * 4,
    latents_std=[1.0] * 4,
)
ZIMAGE = part(
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
)
LISTED = {"prompt_embeds": [noise(4, 16)], "negative_prompt_embeds": [noise(4, 16, seed=1)]}
IDEOGRAM = part(
    "Ideogram4Transformer2DModel",
    in_channels=16,
    num_layers=1,
    attention_head_dim=16,
    num_attention_heads=2,
    intermediate_size=16,
    adaln_dim=8,
    llm_features_dim=16,
    mrope_section=(4, 2, 2),
)


def ideogram_text(**sizes: Any) -> tuple[Tensor, ...]:
    """Four tokens of text, then those of the image."""
    length = sizes["max_sequence_length"] + sizes["grid_h"] * sizes["grid_w"]
    ids = Ideogram4Pipeline._prepare_ids([4], sizes["grid_h"], sizes["grid_w"], 4, "cpu")
    return (noise(1, length, 16), *ids)


ROWS = (
    Row(
        "Qwen-Image",
        "QwenImagePipeline",
        {
            "transformer": QWEN,
            "scheduler": flow(),
        },
        SMALL | GUIDED | BOTH_MASKS,
    ),
    Row(
        "Qwen-Image img2img",
        "QwenImageImg2ImgPipeline",
        {"transformer": QWEN, "scheduler": flow(), "vae": QWEN_VAE},
        SMALL | GUIDED | BOTH_MASKS | IMAGE | {"strength": 1.0},
    ),
    Row(
        "Z-Image",
        "ZImagePipeline",
        {
            "transformer": ZIMAGE,
            "scheduler": flow(),
        },
        SMALL | LISTED,
    ),
    Row(
        "Z-Image img2img",
        "ZImageImg2ImgPipeline",
        {"transformer": ZIMAGE, "scheduler": flow(), "vae": image_vae},
        TINY | LISTED | IMAGE | {"strength": 1.0},
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
            "scheduler": COG_DDIM,
        },
        SMALL | GUIDED,
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
        "GLM-Image",
        "GlmImagePipeline",
        {
            "transformer": part(
                "GlmImageTransformer2DModel",
                patch_size=2,
                in_channels=4,
                out_channels=4,
                num_layers=1,
                attention_head_dim=8,
                num_attention_heads=2,
                text_embed_dim=16,
                time_embed_dim=16,
                condition_dim=8,
                prior_vq_quantizer_codebook_size=16,
            ),
            "scheduler": flow(),
        },
        SMALL | GUIDED | {"prior_token_ids": mask(1, 1)},
    ),
    Row(
        "Kandinsky 5 T2I",
        "Kandinsky5T2IPipeline",
        {
            "transformer": KANDINSKY,
            "scheduler": flow(),
        },
        SMALL | KANDINSKY_TEXT,
        settings={"resolutions": [(32, 32)]},
    ),
    Row(
        "Cosmos 2 T2I",
        "Cosmos2TextToImagePipeline",
        {
            "transformer": cosmos(16),
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
        "Nucleus-Image",
        "NucleusMoEImagePipeline",
        {
            "transformer": part(
                "NucleusMoEImageTransformer2DModel",
                patch_size=2,
                in_channels=16,
                out_channels=4,
                num_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=16,
                axes_dims_rope=(8, 4, 4),
                moe_enabled=False,
                capacity_factors=[8.0, 8.0],
            ),
            "scheduler": flow(),
        },
        SMALL | GUIDED | BOTH_MASKS,
    ),
    Row(
        "Ideogram 4, two networks",
        "Ideogram4Pipeline",
        {
            "transformer": IDEOGRAM,
            "unconditional_transformer": IDEOGRAM,
            "scheduler": flow(),
        },
        SMALL | {"prompt": "a", "guidance_schedule": [3.0] * STEPS, "max_sequence_length": 4},
        settings={"encode_prompt": ideogram_text},
    ),
)
