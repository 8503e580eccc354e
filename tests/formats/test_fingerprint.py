"""Fingerprints: what is valid, how much a difference matters, configurations as plain data."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ertacache.formats.fingerprint import (
    UNKNOWN,
    UNKNOWN_HASH,
    Difference,
    Fingerprint,
    hash_config,
    plain_config,
)
from ertacache.formats.schema import FormatError
from tests.formats.golden.objects import fingerprint


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline": ""}, "pipeline must not be empty"),
        ({"denoiser": 1}, "denoiser must be a string, got int"),
        ({"prediction": None}, "prediction must be a string, got NoneType"),
        ({"scheduler": ""}, "scheduler must not be empty"),
        ({"dtype": torch.float32}, "dtype must be a string, got dtype"),
        ({"denoiser_hash": "12"}, "denoiser_hash must be 64 hexadecimal digits, got '12'"),
        ({"denoiser_hash": "G" * 64}, "denoiser_hash must be 64 hexadecimal digits"),
        ({"guidance": 3.5}, "guidance must be a mapping, got float"),
        ({"guidance": {"": (1.0,)}}, "a key of guidance must not be empty"),
        ({"guidance": {"g": 3.5}}, "guidance.g must be a list of 1 to 1000 numbers"),
        ({"guidance": {"g": ()}}, "guidance.g must be a list of 1 to 1000 numbers"),
        ({"guidance": {"g": range(1001)}}, "guidance.g must be a list of 1 to 1000 numbers"),
        ({"guidance": {"g": (math.nan,)}}, "guidance.g must be finite, got nan"),
        ({"guidance": {"g": (True,)}}, "guidance.g must be a number, got bool"),
        ({"guidance": {"g": (2.0, 1.0)}}, "guidance.g must ascend"),
        ({"guidance": {"g": (1, 1.0)}}, "guidance.g must ascend"),
        ({"latent_shape": (0,)}, "latent_shape must be from 1"),
        ({"latent_shape": (1,) * 9}, "latent_shape must be at most 8 integers"),
        ({"latent_shape": 16}, "latent_shape must be at most 8 integers"),
        ({"versions": {"torch": 2}}, "versions.torch must be a string, got int"),
        ({"scheduler_config": None}, "scheduler_config must be a mapping, got NoneType"),
        ({"scheduler_config": {"a": {}}}, "a must be a JSON scalar, got dict: use plain_config"),
        ({"scheduler_config": {"a": ((),)}}, "a must be a JSON scalar, got tuple"),
        ({"scheduler_config": {"a": (math.inf,)}}, "scheduler_config.a must be finite"),
        (
            {"scheduler_config": {"a": 2**63}},
            "scheduler_config.a must be from -9223372036854775807",
        ),
        ({"scheduler_config": {"a": "\ud800"}}, "scheduler_config.a holds a lone surrogate"),
    ],
)
def test_bad_fingerprint(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence):
        fingerprint(**changes)


def test_the_caller_cannot_change_it() -> None:
    guidance = {"guidance_scale": [2]}
    found = fingerprint(guidance=guidance)
    guidance["guidance_scale"].append(3)
    assert found.guidance == {"guidance_scale": (2.0,)}
    assert found == fingerprint(guidance={"guidance_scale": (2.0,)})


LEVELS = {
    "denoiser": ("WanTransformer3DModel", "fatal"),
    "denoiser_hash": ("1" * 64, "fatal"),
    "prediction": ("epsilon", "fatal"),
    "guidance": ({"guidance_scale": (7.0,)}, "warning"),
    "dtype": ("float16", "warning"),
    "versions": ({}, "warning"),
    "pipeline": ("FluxImg2ImgPipeline", "note"),
    "scheduler": ("UniPCMultistepScheduler", "note"),
    "scheduler_config": ({"shift": 5.0}, "note"),
    "latent_shape": ((3, 4, 4), "note"),
}


@pytest.mark.parametrize("name", LEVELS)
def test_how_much_a_difference_matters(name: str) -> None:
    (value, level), ours = LEVELS[name], fingerprint()
    found = ours.compare(replace(ours, **{name: value}))  # type: ignore[arg-type]
    assert found
    assert {difference.level for difference in found} == {level}
    assert all(d.field.split(".")[0] in (name, "guidance_scale") for d in found)


def test_every_field_has_a_level_and_the_worst_come_first() -> None:
    assert set(LEVELS) == set(Fingerprint.__dataclass_fields__)
    ours = fingerprint()
    assert ours.compare(ours) == []
    other = Fingerprint(**{name: value for name, (value, _) in LEVELS.items()})  # type: ignore[arg-type]
    levels = [difference.level for difference in ours.compare(other)]
    assert levels == ["fatal"] * 3 + ["warning"] * 4 + ["note"] * 4


def test_differences_name_the_entry_of_a_mapping() -> None:
    ours = fingerprint()
    added = ours.compare(fingerprint(versions={**ours.versions, "numpy": "2.4"}))
    assert added == [Difference("versions.numpy", None, "2.4", "warning")]
    assert str(added[0]) == "versions.numpy is '2.4', was None"
    extra = replace(ours, scheduler_config={**ours.scheduler_config, "beta": None})
    assert [d.field for d in ours.compare(extra)] == ["scheduler_config.beta"]
    assert [d.field for d in extra.compare(ours)] == ["scheduler_config.beta"]
    (long,) = ours.compare(replace(ours, pipeline="x" * 200))
    assert str(long) == f"pipeline is '{'x' * 75} ..., was 'FluxPipeline'"


def test_another_scheduler_lists_only_what_differs() -> None:
    """Settings that one of two classes does not have are none of the other."""
    ours = fingerprint(scheduler_config={"shift": 3.0, "num_train_timesteps": 1000, "a": None})
    other = fingerprint(
        scheduler="UniPCMultistepScheduler",
        scheduler_config={"num_train_timesteps": 1000, "solver_order": 2, "a": 1},
    )
    assert [str(difference) for difference in ours.compare(other)] == [
        "scheduler is 'UniPCMultistepScheduler', was 'FlowMatchEulerDiscreteScheduler'",
        "scheduler_config.a is 1, was None",
    ]
    shifted = fingerprint(scheduler_config=dict(ours.scheduler_config) | {"shift": 5.0})
    assert [str(d) for d in ours.compare(shifted)] == ["scheduler_config.shift is 5.0, was 3.0"]


@pytest.mark.parametrize(
    ("guidance", "sentences"),
    [
        ({"guidance_scale": (2.5,)}, []),
        ({"guidance_scale": (3.0,)}, []),
        ({"guidance_scale": (2.5, 3.0, 3.5)}, []),
        ({"guidance_scale": (2.0,)}, ["guidance_scale is 2.0, was 2.5 to 3.5"]),
        ({"guidance_scale": (3.0, 4.0)}, ["guidance_scale is 3.0 to 4.0, was 2.5 to 3.5"]),
        ({}, ["guidance_scale is None, was 2.5 to 3.5"]),
        (
            {"guidance_scale": (3.0,), "true_cfg_scale": (4.0,)},
            ["true_cfg_scale is 4.0, was None"],
        ),
    ],
)
def test_guidance_within_the_calibrated_range_is_no_difference(
    guidance: dict[str, tuple[float, ...]], sentences: list[str]
) -> None:
    found = fingerprint().compare(fingerprint(guidance=guidance))
    assert [str(difference) for difference in found] == sentences
    assert all(difference.level == "warning" for difference in found)


def test_configurations() -> None:
    config = {"b": torch.ones(2), "a": (1, "x"), "c": {"d": [1]}, "_diffusers_version": "1"}
    plain = plain_config(config)
    assert plain == {"a": (1, "x"), "b": (1.0, 1.0), "c": '{"d":[1]}'}
    assert plain_config(plain) == plain
    assert plain_config({"low": -math.inf, "grid": [[1], [2]]}) == {
        "low": "-inf",
        "grid": "[[1],[2]]",
    }
    assert fingerprint(scheduler_config=plain).scheduler_config == plain
    assert hash_config(config) == hash_config(dict(reversed(config.items())))
    assert hash_config(config) != hash_config(config | {"a": (1, "y")})
    with pytest.raises(FormatError, match="'a' is a dtype, which is not data"):
        plain_config({"a": torch.float32})


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ((16, 64, 64), (16, 32, 32), True),
        ((1024, 64), (16, 64, 64), True),  # tokens of 2 x 2 pixels
        ((21, 16, 60, 104), (16, 21, 60, 104), True),
        ((8,), (16, 64, 64), True),  # not known
        ((4, 64, 64), (16, 64, 64), False),
        ((1024, 64), (4, 64, 64), False),
    ],
)
def test_where_the_network_is_not_known_the_channels_are_compared(
    ours: tuple[int, ...], theirs: tuple[int, ...], same: bool
) -> None:
    was = replace(fingerprint(), latent_shape=ours)
    now = replace(was, denoiser=UNKNOWN, denoiser_hash=UNKNOWN_HASH, latent_shape=theirs)
    for found in (was.compare(now), now.compare(was)):
        assert {d.level for d in found} == ({"note"} if same else {"fatal"})
    named = replace(now, denoiser="Another")
    assert [d.field for d in was.compare(named) if d.level == "fatal"][:1] == ["denoiser"]
