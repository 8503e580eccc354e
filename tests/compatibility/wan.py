"""Rows of Wan and of pipelines derived from it."""

from __future__ import annotations

from tests.compatibility.components import DPM_FLOW, UNIPC, WAN_CONFIG, flow, part, wan, wan_vae
from tests.compatibility.inputs import CLIP, GUIDED, IMAGE, MASKED, TINY, VIDEO, noise
from tests.compatibility.rows import Row

WAN = wan()
WAN_I2V = wan(in_channels=36, image_dim=4)
WAN_I2V_22 = wan(in_channels=36)

ROWS = (
    Row("Wan 2.1 T2V", "WanPipeline", {"transformer": WAN, "scheduler": UNIPC}, VIDEO | GUIDED),
    Row(
        "Wan 2.2 T2V, two experts",
        "WanPipeline",
        {
            "transformer": WAN,
            "transformer_2": WAN,
            "scheduler": UNIPC,
            "boundary_ratio": 0.8,
        },
        VIDEO | GUIDED | {"guidance_scale_2": 3.0},
    ),
    Row(
        "Wan 2.1 I2V",
        "WanImageToVideoPipeline",
        {"transformer": WAN_I2V, "scheduler": UNIPC, "vae": wan_vae},
        CLIP | GUIDED | IMAGE,
        settings={"encode_image": lambda image, device: noise(1, 5, 4)},
    ),
    Row(
        "Wan 2.2 I2V, two experts",
        "WanImageToVideoPipeline",
        {
            "transformer": WAN_I2V_22,
            "transformer_2": WAN_I2V_22,
            "scheduler": UNIPC,
            "vae": wan_vae,
            "boundary_ratio": 0.8,
        },
        CLIP | GUIDED | IMAGE,
    ),
    Row(
        "Wan 2.2 TI2V",
        "WanPipeline",
        {"transformer": WAN, "scheduler": UNIPC, "expand_timesteps": True},
        VIDEO | GUIDED,
    ),
    Row(
        "Wan 2.1 V2V",
        "WanVideoToVideoPipeline",
        {"transformer": WAN, "scheduler": UNIPC, "vae": wan_vae},
        TINY | GUIDED | {"strength": 1.0, "video": noise(1, 5, 3, 16, 16).sigmoid()},
    ),
    Row(
        "Wan VACE",
        "WanVACEPipeline",
        {
            "transformer": part(
                "WanVACETransformer3DModel",
                **WAN_CONFIG | {"num_layers": 2},
                vace_layers=[0, 1],
                vace_in_channels=96,
            ),
            "scheduler": UNIPC,
            "vae": wan_vae,
        },
        CLIP | GUIDED,
    ),
    Row(
        "SkyReels V2 T2V",
        "SkyReelsV2Pipeline",
        {"transformer": part("SkyReelsV2Transformer3DModel", **WAN_CONFIG), "scheduler": UNIPC},
        VIDEO | GUIDED,
    ),
    Row(
        "Motif-Video",
        "MotifVideoPipeline",
        {
            "transformer": part(
                "MotifVideoTransformer3DModel",
                in_channels=33,
                out_channels=16,
                num_attention_heads=2,
                attention_head_dim=12,
                num_layers=1,
                num_single_layers=1,
                patch_size=1,
                patch_size_t=1,
                text_embed_dim=16,
                rope_axes_dim=(4, 4, 4),
            ),
            "scheduler": flow(),
            "guider": part("ClassifierFreeGuidance", guidance_scale=3.0),
            "vae": wan_vae,
        },
        CLIP | MASKED,
    ),
    Row(
        "AnyFlow",
        "AnyFlowPipeline",
        {
            "transformer": part(
                "AnyFlowTransformer3DModel", **WAN_CONFIG, gate_value=0.25, deltatime_type="r"
            ),
            "scheduler": part("FlowMapEulerDiscreteScheduler", shift=5.0),
        },
        VIDEO | GUIDED | {"guidance_scale": 3.0},
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
            "scheduler": DPM_FLOW,
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
        "SkyReels V2, diffusion forcing",
        "SkyReelsV2DiffusionForcingPipeline",
        {"transformer": part("SkyReelsV2Transformer3DModel", **WAN_CONFIG), "scheduler": UNIPC},
        VIDEO | GUIDED | {"prompt": None, "base_num_frames": 97},
        refused="never called the step",
    ),
)
