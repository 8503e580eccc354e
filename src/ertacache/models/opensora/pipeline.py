"""Text to video with Open-Sora 1.2, as a diffusers pipeline.

Brings text encoder, network, scheduler and autoencoder together. Guidance is batched, the half with
the text first. Knows nothing of policies: they attach as to any other pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils.torch_utils import randn_tensor
from diffusers.video_processor import VideoProcessor
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5EncoderModel

from ertacache.models.opensora.conditioning import FrameConditioning, Generators
from ertacache.models.opensora.guidance import GuidedVelocity
from ertacache.models.opensora.inputs import check_call
from ertacache.models.opensora.original import loaded
from ertacache.models.opensora.output import OpenSoraPipelineOutput
from ertacache.models.opensora.scheduler import RFlowScheduler
from ertacache.models.opensora.sizes import Video, describe_video
from ertacache.models.opensora.text import EncodedText, Prompts, encode_text
from ertacache.models.opensora.transformer import OpenSoraTransformer3DModel
from ertacache.models.opensora.vae import AutoencoderKLOpenSora

__all__ = ["OpenSoraPipeline"]

StepEnd = Callable[..., dict[str, Any]]
Source = str | os.PathLike[str]


class OpenSoraPipeline(DiffusionPipeline):
    """Generate videos from text.

    Args of a call, all by name but the prompt:
        prompt: one text or several.
        negative_prompt: what to steer away from; if not given, from the network's own empty text.
        resolution: such as ``"240p"``; with ``aspect_ratio``, height to width, it gives the size.
        height, width: the size in pixels instead; what is over a multiple of 8 is cut off.
        num_frames: frames of the video; 1 makes a picture.
        fps: frames per second that the motion is meant for.
        num_inference_steps, guidance_scale, generator, latents: as in any pipeline.
        prompt_embeds, prompt_attention_mask: the encoded text in place of ``prompt``.
        conditioning_latents: frames to keep, encoded by ``vae``, in the shape of the latents.
        conditioning_mask: of each latent frame, 1 to keep and 0 to generate; all zero by default.
        clean_caption: whether prompts are cleaned as the captions of the training were.
        max_sequence_length: tokens after which a prompt is cut off, at most the network's own.
        output_type: ``"pil"``, ``"np"``, ``"pt"`` or ``"latent"``.
    """

    model_cpu_offload_seq = "text_encoder->transformer->vae"  # type: ignore[assignment]
    _callback_tensor_inputs = ("latents",)
    scheduler: Any
    transformer: Any
    vae: Any

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder: T5EncoderModel,
        vae: AutoencoderKLOpenSora,
        transformer: OpenSoraTransformer3DModel,
        scheduler: RFlowScheduler,
    ) -> None:
        """Take the parts."""
        super().__init__()
        words = {"tokenizer": tokenizer, "text_encoder": text_encoder}
        parts = {"vae": vae, "transformer": transformer, "scheduler": scheduler}
        self.register_modules(**words, **parts)  # type: ignore[no-untyped-call]
        self.video_processor = VideoProcessor(vae_scale_factor=vae.spatial_compression_ratio)
        self._guidance_scale, self._interrupt, self._num_timesteps = 1.0, False, 0
        self._current_timestep: Tensor | None = None

    @classmethod
    def from_original(
        cls,
        *,
        transformer: Source | OpenSoraTransformer3DModel,
        vae: Source | AutoencoderKLOpenSora,
        text_encoder: Source,
        tokenizer: Source | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> OpenSoraPipeline:
        """Make a pipeline of the published weights.

        Args:
            transformer: a safetensors file, a folder, the hub id ``hpcai-tech/OpenSora-STDiT-v3``,
                or the network itself.
            vae: likewise, ``hpcai-tech/OpenSora-VAE-v1.2``.
            text_encoder: folder or hub id of a T5, such as ``DeepFloyd/t5-v1_1-xxl``.
            tokenizer: folder or hub id of its tokenizer; ``text_encoder`` if not given.
            dtype: precision of the weights that are loaded.
        """
        load: Any = AutoTokenizer.from_pretrained
        return cls(
            tokenizer=load(os.fspath(tokenizer or text_encoder)),
            text_encoder=T5EncoderModel.from_pretrained(os.fspath(text_encoder), dtype=dtype),
            vae=loaded(AutoencoderKLOpenSora, vae, dtype=dtype),
            transformer=loaded(OpenSoraTransformer3DModel, transformer, dtype=dtype),
            scheduler=RFlowScheduler(),
        )

    @property
    def guidance_scale(self) -> float:
        """Guidance of the present or last run."""
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the network sees an empty text beside the prompt."""
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        """Steps of the present or last run."""
        return self._num_timesteps

    @property
    def current_timestep(self) -> Tensor | None:
        """The timestep of the present step, None outside a run."""
        return self._current_timestep

    @property
    def interrupt(self) -> bool:
        """Whether a callback set ``_interrupt`` to leave out the rest of the run."""
        return self._interrupt

    def encode_prompt(
        self,
        prompt: Prompts | None,
        negative_prompt: Prompts | None = None,
        *,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        clean_caption: bool = True,
        max_sequence_length: int | None = None,
    ) -> tuple[EncodedText, EncodedText]:
        """Encode the prompts, and what stands against them.

        Without a negative prompt that is the network's empty text, of the length of each prompt.
        """
        if prompt_embeds is None:
            text = self._encode(prompt or "", clean_caption, max_sequence_length)
        else:
            text = EncodedText.of(prompt_embeds, prompt_attention_mask)
        if negative_prompt is None:
            empty = self.transformer.null_text(text.embeds.shape[1]).to(text.embeds)
            return text, EncodedText(empty.expand_as(text.embeds), text.mask)
        against = self._encode(negative_prompt, clean_caption, max_sequence_length)
        if len(against) not in (1, len(text)):
            raise ValueError(f"{len(text)} prompts, but {len(against)} negative prompts")
        return text, against if len(against) == len(text) else against.repeat(len(text))

    def _encode(self, prompt: Prompts, clean: bool, length: int | None) -> EncodedText:
        longest = self.transformer.config["max_sequence_length"]
        return encode_text(
            prompt,
            self.tokenizer,
            self.text_encoder,
            max_length=longest if length is None else min(length, longest),
            clean=clean,
            device=self._execution_device,
        )

    def prepare_latents(
        self, batch: int, video: Video, generator: Generators, latents: Tensor | None
    ) -> Tensor:
        """Return noise, or the given latents if they have the right shape; always float32."""
        ratio = self.vae.spatial_compression_ratio
        frames = self.vae.latent_frames(video.num_frames)
        channels = self.transformer.config["in_channels"]
        shape = (batch, channels, frames, video.height // ratio, video.width // ratio)
        if 0 in shape:
            raise ValueError(f"the video must be at least {ratio} pixels high and wide")
        device, dtype = self._execution_device, torch.float32
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=device, dtype=dtype)
        if latents.shape != shape:
            raise ValueError(f"latents must have shape {shape}, got {tuple(latents.shape)}")
        return latents.to(device, dtype)

    @torch.no_grad()
    def __call__(
        self,
        prompt: Prompts | None = None,
        negative_prompt: Prompts | None = None,
        *,
        resolution: str = "240p",
        aspect_ratio: str = "9:16",
        height: int | None = None,
        width: int | None = None,
        num_frames: int = 51,
        fps: float = 24,
        num_inference_steps: int = 30,
        guidance_scale: float = 7.0,
        num_videos_per_prompt: int = 1,
        generator: Generators = None,
        latents: Tensor | None = None,
        prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        conditioning_latents: Tensor | None = None,
        conditioning_mask: Tensor | None = None,
        clean_caption: bool = True,
        max_sequence_length: int | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepEnd | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> OpenSoraPipelineOutput | tuple[Any]:
        """Generate; the arguments are explained at the class."""
        check_call(prompt, prompt_embeds, output_type, callback_on_step_end_tensor_inputs)
        video = describe_video(
            resolution, aspect_ratio, height=height, width=width, num_frames=num_frames, fps=fps
        )
        self._guidance_scale, self._interrupt = guidance_scale, False
        text, empty = self.encode_prompt(
            prompt,
            negative_prompt,
            prompt_embeds=prompt_embeds,
            prompt_attention_mask=prompt_attention_mask,
            clean_caption=clean_caption,
            max_sequence_length=max_sequence_length,
        )
        noise = self.prepare_latents(
            len(text) * num_videos_per_prompt, video, generator=generator, latents=latents
        )
        latents = self._denoise(
            noise,
            self._velocity(text, empty, video, copies=num_videos_per_prompt),
            frames=FrameConditioning.of(
                noise,
                latents=conditioning_latents,
                strength=conditioning_mask,
                scheduler=self.scheduler,
                generator=generator,
            ),
            num_steps=num_inference_steps,
            callback=callback_on_step_end,
        )
        output = self._decode(latents, video, output_type)
        self.maybe_free_model_hooks()  # type: ignore[no-untyped-call]
        return OpenSoraPipelineOutput(frames=output) if return_dict else (output,)

    def _velocity(
        self, text: EncodedText, empty: EncodedText, video: Video, *, copies: int
    ) -> GuidedVelocity:
        guided = self.do_classifier_free_guidance
        text = text.join(empty) if guided else text
        scale = self._guidance_scale if guided else None
        return GuidedVelocity(self.transformer, text.repeat(copies), video, scale)

    def _denoise(
        self,
        latents: Tensor,
        velocity: GuidedVelocity,
        *,
        frames: FrameConditioning | None,
        num_steps: int,
        callback: StepEnd | None,
    ) -> Tensor:
        video, scheduler = velocity.video, self.scheduler
        size = {"height": video.height, "width": video.width, "num_frames": video.num_frames}
        scheduler.set_timesteps(num_steps, latents.device, **size)
        self._num_timesteps = len(scheduler.timesteps)
        latents = latents if frames is None else frames.begin(latents)
        with self.progress_bar(total=self._num_timesteps) as bar:
            for step, t in enumerate(scheduler.timesteps):
                if self._interrupt:
                    continue
                self._current_timestep = t
                if frames is not None:
                    latents = frames.enter(latents, t)
                v = velocity(latents, t, None if frames is None else frames.generated(t))
                moved = scheduler.step(v, t, latents, return_dict=False)[0]
                latents = moved if frames is None else frames.leave(latents, moved)
                if callback is not None:
                    changes = callback(self, step, t, {"latents": latents}) or {}
                    latents = changes.get("latents", latents)
                bar.update()
        self._current_timestep = None
        return latents

    def _decode(self, latents: Tensor, video: Video, output_type: str) -> Any:
        if output_type == "latent":
            return latents
        pixels = self.vae.decode(latents.to(self.vae.dtype), num_frames=video.num_frames).sample
        return self.video_processor.postprocess_video(pixels.float(), output_type)
