"""Fingerprints: what is valid, which differences are fatal, configurations as plain data."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ertacache.formats.fingerprint import Fingerprint, hash_config, hash_sigmas, plain_config
from ertacache.formats.schema import FormatError
from tests.formats.golden.objects import fingerprint, schedule


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"denoiser_hash": "12"}, "denoiser_hash must be 64 hexadecimal digits"),
        ({"guidance": math.nan}, "guidance must be finite"),
        ({"num_steps": 0}, "num_steps must be from 1 to 10000"),
        ({"latent_shape": (0,)}, "latent_shape must be from 1"),
        ({"versions": {"torch": 2}}, "versions.torch must be a string"),
        ({"scheduler_config": {"a": {}}}, "use plain_config"),
        ({"scheduler_config": {"a": (math.inf,)}}, "scheduler_config.a must be finite"),
        ({"pipeline": ""}, "pipeline must not be empty"),
    ],
)
def test_bad_fingerprint(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence):
        fingerprint(**changes)  # type: ignore[arg-type]


def test_compare_marks_what_is_fatal() -> None:
    ours = fingerprint()
    assert ours.compare(ours) == []
    fatal = {
        "pipeline": "WanPipeline",
        "denoiser": "WanTransformer3DModel",
        "denoiser_hash": "0" * 64,
        "scheduler": "UniPCMultistepScheduler",
        "scheduler_config": {},
        "num_steps": 5,
        "sigmas_hash": "0" * 64,
    }
    mild = {"guidance": None, "dtype": "float16", "latent_shape": (3, 4, 4), "versions": {}}
    for name, value in (fatal | mild).items():
        found = ours.compare(replace(ours, **{name: value}))  # type: ignore[arg-type]
        assert found
        assert all(d.field.split(".")[0] == name and d.fatal == (name in fatal) for d in found)
    added = ours.compare(fingerprint(versions={**ours.versions, "numpy": "2.4"}))
    assert [str(d) for d in added] == ["versions.numpy is '2.4', was None"]
    extra = replace(ours, scheduler_config={**ours.scheduler_config, "beta": None})
    assert [d.field for d in ours.compare(extra)] == ["scheduler_config.beta"]
    assert [d.field for d in extra.compare(ours)] == ["scheduler_config.beta"]


def test_configurations() -> None:
    config = {"b": torch.ones(2), "a": (1, "x"), "c": {"d": [1]}, "_diffusers_version": "1"}
    plain = plain_config(config)
    assert plain == {"a": (1, "x"), "b": (1.0, 1.0), "c": '{"d":[1]}'}
    assert isinstance(fingerprint(scheduler_config=plain), Fingerprint)
    assert hash_config(config) == hash_config(dict(reversed(config.items())))
    with pytest.raises(FormatError, match="'a' is a dtype, which is not data"):
        plain_config({"a": torch.float32})
    assert hash_sigmas(schedule().float()) == hash_sigmas(schedule().float().double())
