"""Text to video with Open-Sora 1.2, as a diffusers pipeline.

Combines text encoder, network, scheduler and autoencoder. Guidance is batched: one network
evaluation per step, the prompts in the first half of the batch. Policies attach as to any other
pipeline.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from diffusers.utils.outputs import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from diffusers.video_processor import VideoProcessor
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, T5EncoderModel

from ertacache.models.opensora.conditioning import FrameConditioning, Generators
from ertacache.models.opensora.original import loaded
from ertacache.models.opensora.prompts import EncodedText, Prompts, encode_text
from ertacache.models.opensora.scheduler import RFlowScheduler
from ertacache.models.opensora.sizes import Video, describe_video
from ertacache.models.opensora.transformer import OpenSoraTransformer3DModel
from ertacache.models.opensora.vae import AutoencoderKLOpenSora

__all__ = ["GuidedVelocity", "OpenSoraPipeline", "OpenSoraPipelineOutput"]

StepEnd = Callable[..., dict[str, Any]]
Source = str | os.PathLike[str]

_OUTPUT_TYPES = ("pil", "np", "pt", "latent")


@dataclass
class OpenSoraPipelineOutput(BaseOutput):
    """Output of the pipeline.

    Attributes:
        frames: the videos: lists of PIL images, an array (batch, frames, height, width, 3) or a
            tensor (batch, frames, 3, height, width), both in [0, 1]; or the latents.
    """

    frames: Any


@dataclass(frozen=True, eq=False)
class GuidedVelocity:
    """The velocity with classifier-free guidance; both halves are one batch of the network.

    Attributes:
        transformer: the network.
        text: the prompts, followed by the negative ones if there is guidance.
        video: size and frame rate, inputs of the network.
        scale: guidance scale w of ``v = v_empty + w (v_text - v_empty)``; None without guidance.
    """

    transformer: Any
    text: EncodedText
    video: Video
    scale: float | None

    def __call__(self, latents: Tensor, timestep: Tensor, generated: Tensor | None) -> Tensor:
        """Return the velocity of ``latents``; ``generated`` masks the frames that have noise."""
        copies = 1 if self.scale is None else 2
        output = self.transformer(
            hidden_states=latents.repeat(copies, 1, 1, 1, 1),
            timestep=timestep.expand(copies * len(latents)),
            encoder_hidden_states=self.text.embeds,
            encoder_attention_mask=self.text.mask,
            fps=self.video.fps,
            height=self.video.height,
            width=self.video.width,
            frame_mask=None if generated is None else generated.repeat(copies, 1),
            return_dict=False,
        )[0]
        velocity: Tensor = output[:, : latents.shape[1]]  # the rest is a variance
        if self.scale is None:
            return velocity
        with_text, empty = velocity.chunk(2)
        return empty + self.scale * (with_text - empty)


class OpenSoraPipeline(DiffusionPipeline):
    """Generate videos from text.

    Arguments of a call, keyword-only after the two prompts:
        prompt: one prompt or several.
        negative_prompt: prompt to guide away from; the network's null text if not given.
        resolution: such as ``"240p"``; together with ``aspect_ratio`` (height to width) the size.
        height, width: the size in pixels instead, rounded down to a multiple of 8.
        num_frames: frames of the video; 1 generates an image.
        fps: frame rate of the motion.
        num_inference_steps, guidance_scale, generator, latents: as in any pipeline.
        prompt_embeds, prompt_attention_mask: the encoded prompt instead of ``prompt``.
        conditioning_latents: frames to keep, encoded by ``vae``, in the shape of the latents.
        conditioning_mask: per latent frame, 1 to keep and 0 to generate; all zero by default.
        clean_caption: whether prompts are cleaned like the captions of the training.
        max_sequence_length: tokens after which a prompt is truncated, at most the network's limit.
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
        """Register the components."""
        super().__init__()
        self.register_modules(  # type: ignore[no-untyped-call]
            tokenizer=tokenizer,
            text_encoder=text_encoder,
            vae=vae,
            transformer=transformer,
            scheduler=scheduler,
        )
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
        """Build a pipeline from the published weights.

        Args:
            transformer: a safetensors file, a folder, the hub id ``hpcai-tech/OpenSora-STDiT-v3``,
                or the network itself.
            vae: likewise, ``hpcai-tech/OpenSora-VAE-v1.2``.
            text_encoder: folder or hub id of a T5, such as ``DeepFloyd/t5-v1_1-xxl``.
            tokenizer: folder or hub id of its tokenizer; ``text_encoder`` if not given.
            dtype: precision of the loaded weights.
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
        """Guidance scale of the current or last run."""
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the network is also evaluated on the negative prompt."""
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        """Number of steps of the current or last run."""
        return self._num_timesteps

    @property
    def current_timestep(self) -> Tensor | None:
        """The timestep of the current step, None outside a run."""
        return self._current_timestep

    @property
    def interrupt(self) -> bool:
        """Whether a callback set ``_interrupt`` to end the run early."""
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
        """Encode the prompts and the negative prompts.

        Without a negative prompt it is the network's null text, of the length of each prompt.
        """
        if prompt_embeds is None:
            text = self._encode(prompt or "", clean_caption, max_sequence_length)
        else:
            text = EncodedText.of(prompt_embeds, prompt_attention_mask)
        if negative_prompt is None:
            null = self.transformer.null_text(text.embeds.shape[1]).to(text.embeds)
            return text, EncodedText(null.expand_as(text.embeds), text.mask)
        negative = self._encode(negative_prompt, clean_caption, max_sequence_length)
        if len(negative) not in (1, len(text)):
            raise ValueError(f"{len(text)} prompts, but {len(negative)} negative prompts")
        return text, negative if len(negative) == len(text) else negative.repeat(len(text))

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
        """Generate videos; the class documents the arguments."""
        _check_call(prompt, prompt_embeds, output_type, callback_on_step_end_tensor_inputs)
        video = describe_video(
            resolution, aspect_ratio, height=height, width=width, num_frames=num_frames, fps=fps
        )
        self._guidance_scale, self._interrupt = guidance_scale, False
        text, negative = self.encode_prompt(
            prompt,
            negative_prompt,
            prompt_embeds=prompt_embeds,
            prompt_attention_mask=prompt_attention_mask,
            clean_caption=clean_caption,
            max_sequence_length=max_sequence_length,
        )
        velocity = self._velocity(text, negative, video, copies=num_videos_per_prompt)
        batch = len(text) * num_videos_per_prompt
        noise = self.prepare_latents(batch, video, generator=generator, latents=latents)
        frames = FrameConditioning.of(
            noise,
            latents=conditioning_latents,
            strength=conditioning_mask,
            scheduler=self.scheduler,
            generator=generator,
        )
        result = self._denoise(noise, velocity, frames, num_inference_steps, callback_on_step_end)
        output = self._decode(result, video, output_type)
        self.maybe_free_model_hooks()  # type: ignore[no-untyped-call]
        return OpenSoraPipelineOutput(frames=output) if return_dict else (output,)

    def _velocity(
        self, text: EncodedText, negative: EncodedText, video: Video, *, copies: int
    ) -> GuidedVelocity:
        if not self.do_classifier_free_guidance:
            return GuidedVelocity(self.transformer, text.repeat(copies), video, None)
        both = text.join(negative).repeat(copies)
        return GuidedVelocity(self.transformer, both, video, self._guidance_scale)

    def _denoise(
        self,
        latents: Tensor,
        velocity: GuidedVelocity,
        frames: FrameConditioning | None,
        num_steps: int,
        callback: StepEnd | None,
    ) -> Tensor:
        video = velocity.video
        size = {"height": video.height, "width": video.width, "num_frames": video.num_frames}
        self.scheduler.set_timesteps(num_steps, latents.device, **size)
        timesteps = self.scheduler.timesteps
        self._num_timesteps = len(timesteps)
        latents = latents if frames is None else frames.begin(latents)
        with self.progress_bar(total=self._num_timesteps) as bar:
            for step, t in enumerate(timesteps):
                if self._interrupt:
                    continue
                self._current_timestep = t
                latents = self._step(latents, t, velocity, frames)
                if callback is not None:
                    changes = callback(self, step, t, {"latents": latents}) or {}
                    latents = changes.get("latents", latents)
                bar.update()
        self._current_timestep = None
        return latents

    def _step(
        self, latents: Tensor, t: Tensor, velocity: GuidedVelocity, frames: FrameConditioning | None
    ) -> Tensor:
        """One Euler step; kept frames do not change."""
        if frames is not None:
            latents = frames.enter(latents, t)
        v = velocity(latents, t, None if frames is None else frames.generated(t))
        moved: Tensor = self.scheduler.step(v, t, latents, return_dict=False)[0]
        return moved if frames is None else frames.leave(latents, moved)

    def _decode(self, latents: Tensor, video: Video, output_type: str) -> Any:
        if output_type == "latent":
            return latents
        pixels = self.vae.decode(latents.to(self.vae.dtype), num_frames=video.num_frames).sample
        return self.video_processor.postprocess_video(pixels.float(), output_type)


def _check_call(
    prompt: Prompts | None,
    prompt_embeds: Tensor | None,
    output_type: str,
    callback_inputs: Sequence[str],
) -> None:
    """Raise a ``ValueError`` that names the argument, before anything is computed."""
    if (prompt is None) == (prompt_embeds is None):
        raise ValueError("pass either prompt or prompt_embeds")
    if output_type not in _OUTPUT_TYPES:
        raise ValueError(f"output_type must be one of {_OUTPUT_TYPES}, got {output_type!r}")
    if set(callback_inputs) - {"latents"}:
        raise ValueError(f"callbacks are given the latents only, not {list(callback_inputs)}")
