"""The rows of Wan and of those built like it."""

from __future__ import annotations

from tests.compatibility.parts import FRAME, GUIDED, MASKED, VIDEO, flow, noise, unipc
from tests.compatibility.rows import Row, part
from tests.integration.tiny import wan_vae

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

ROWS = (
    Row("Wan 2.1 T2V", "WanPipeline", {"transformer": WAN, "scheduler": unipc()}, VIDEO | GUIDED),
    Row(
        "Wan 2.2 T2V, two experts",
        "WanPipeline",
        {
            "transformer": WAN,
            "transformer_2": WAN,
            "scheduler": unipc(),
            "boundary_ratio": 0.8,
        },
        VIDEO | GUIDED | {"guidance_scale_2": 3.0},
    ),
    Row(
        "Wan 2.1 I2V",
        "WanImageToVideoPipeline",
        {"transformer": WAN_I2V, "scheduler": unipc(), "vae": wan_vae},
        VIDEO | GUIDED | FRAME,
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
        VIDEO | GUIDED | FRAME,
    ),
    Row(
        "Wan 2.2 TI2V",
        "WanPipeline",
        {"transformer": WAN, "scheduler": unipc(), "expand_timesteps": True},
        VIDEO | GUIDED,
    ),
    Row(
        "Wan 2.1 V2V",
        "WanVideoToVideoPipeline",
        {"transformer": WAN, "scheduler": unipc(), "vae": wan_vae},
        {"height": 32, "width": 32, "strength": 1.0, "video": noise(1, 9, 3, 32, 32).sigmoid()}
        | GUIDED,
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
        VIDEO | GUIDED,
    ),
    Row(
        "SkyReels V2 T2V",
        "SkyReelsV2Pipeline",
        {"transformer": part("SkyReelsV2Transformer3DModel", **_WAN), "scheduler": unipc()},
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
        VIDEO | MASKED,
    ),
    Row(
        "AnyFlow",
        "AnyFlowPipeline",
        {
            "transformer": part(
                "AnyFlowTransformer3DModel", **_WAN, gate_value=0.25, deltatime_type="r"
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
        "SkyReels V2, diffusion forcing",
        "SkyReelsV2DiffusionForcingPipeline",
        {"transformer": part("SkyReelsV2Transformer3DModel", **_WAN), "scheduler": unipc()},
        VIDEO | GUIDED | {"prompt": None, "base_num_frames": 97},
        refused="never called the step",
    ),
)
