"""Bundled pipelines that are called with a prompt and nothing else."""

from __future__ import annotations

import copy
import inspect
import pickle

import diffusers
import pytest
import torch

import ertacache
from ertacache.models import MODELS, load_pipeline, load_prompts
from ertacache.models.defaults import bind_defaults

NAMES = sorted(MODELS)


@pytest.fixture(scope="module", params=NAMES)
def loaded(request):
    return MODELS[request.param], load_pipeline(request.param)


class Pipe:
    """Returns what it was called with."""

    def __call__(self, prompt, height=1024, negative_prompt=None, negative_prompt_embeds=None):
        return prompt, height, negative_prompt, negative_prompt_embeds


@pytest.fixture
def small():
    pipe = Pipe()
    bind_defaults(pipe, "small", {"height": 64, "negative_prompt": ""})
    return pipe


def call(pipe, prompt, **arguments):
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt, generator=generator, output_type="pt", **arguments)[0]


def test_the_call_shows_the_defaults_of_the_row(loaded):
    model, pipe = loaded
    for called in (pipe.__call__, type(pipe).__call__):
        parameters = inspect.signature(called).parameters
        assert {n: parameters[n].default for n in model.call_arguments} == model.call_arguments


def test_a_prompt_alone_gives_the_trained_call(loaded):
    """The steps are those of the row as well: only they are lowered here, for speed."""
    model, pipe = loaded
    prompt = load_prompts(model.name, "heldout")[0]
    few = {"num_inference_steps": 2}
    plain = call(pipe, prompt, **few)
    assert torch.equal(plain, call(pipe, prompt, **(model.call_arguments | few)))
    assert tuple(plain.shape[-2:]) == model.size


def test_the_steps_are_those_of_the_row():
    pipe, seen = load_pipeline("emoji-flux"), []
    pipe("a small lemon on a red background", callback_on_step_end=lambda *a: seen.append(1) or {})
    assert len(seen) == MODELS["emoji-flux"].num_inference_steps


def test_what_is_given_wins_by_name_by_place_and_as_none(small):
    assert small("a cat") == ("a cat", 64, "", None)
    assert small("a cat", height=96) == small("a cat", 96) == ("a cat", 96, "", None)
    assert small("a cat", None, None) == ("a cat", None, None, None)
    assert small("a cat", negative_prompt_embeds=1) == ("a cat", 64, None, 1)
    with pytest.raises(TypeError, match="wide"):
        small("a cat", wide=3)


def test_the_class_is_one_per_model_and_passes_for_the_original(small):
    other = Pipe()
    bind_defaults(other, "small", {"height": 64, "negative_prompt": ""})
    assert type(other) is type(small)
    assert isinstance(small, Pipe)
    assert Pipe()("a cat") == ("a cat", 1024, None, None)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(small), name) == getattr(Pipe, name)


def test_copies_and_pickles_keep_the_defaults(small):
    small.kept = [1]
    for again in (copy.copy(small), copy.deepcopy(small), pickle.loads(pickle.dumps(small))):
        assert type(again) is type(small)
        assert again("a cat") == ("a cat", 64, "", None)
        assert again.kept == [1]


def test_diffusers_saves_and_converts_it_like_the_original(tmp_path):
    pipe = load_pipeline("emoji-flux")
    pipe.save_pretrained(tmp_path)
    again = diffusers.DiffusionPipeline.from_pretrained(tmp_path)
    assert type(again) is diffusers.FluxPipeline
    assert type(load_pipeline(tmp_path)) is diffusers.FluxPipeline  # a folder is nobody's model
    assert diffusers.FluxImg2ImgPipeline.from_pipe(pipe).transformer is pipe.transformer


def test_a_policy_is_for_the_original_pipeline_too():
    pipe = load_pipeline("emoji-flux")
    original = diffusers.FluxPipeline(**pipe.components)
    few = {"num_inference_steps": 6}
    prompts = load_prompts("emoji-flux", "calibration")[:2]
    known = ertacache.profile(pipe, prompts, batch_size=2, **few)
    full = ertacache.profile(
        original, prompts, batch_size=2, **(MODELS["emoji-flux"].call_arguments | few)
    )
    assert known.fingerprint == full.fingerprint
    with ertacache.attach(pipe, known, compute_steps=4) as handle:
        call(pipe, prompts[0], **few)
        assert handle.stats.last.computed_steps == 4
