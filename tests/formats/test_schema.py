"""Strict JSON and single values: one text on the way out, nothing but exact JSON on the way in."""

from __future__ import annotations

import math

import pytest
import torch

from ertacache.formats.schema import (
    FormatError,
    PolicyError,
    canonical,
    check_number,
    check_string,
    check_strings,
    check_tensor,
    parse_object,
    raising,
    take_record,
)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"a":1', "not valid JSON"),
        ('{"a":1}x', "not valid JSON"),
        ('{"a":1,"b":2,"a":3}', "the key 'a' is repeated"),
        ('{"a":NaN}', "NaN is not JSON"),
        ('{"a":[-Infinity]}', "-Infinity is not JSON"),
        ('{"a":1e999}', "the number 1e999 is too large"),
        ('{"a":-10000000000000000000000}', "an integer of 24 digits"),
        pytest.param('{"a":' * 100_000, "nested too deeply", id="deep"),
        ("[1]", "must be a JSON object, got a list"),
        ("null", "must be a JSON object, got null"),
    ],
)
def test_json_that_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^the header .*{sentence}"):
        parse_object(text.encode(), "the header")


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(ValueError, match="the header is not valid JSON"):
        parse_object(b'{"a":"\xff"}', "the header")


def test_json_is_written_in_one_way() -> None:
    value = {"ü": [0.1, 1, None], "a": {"c": True, "b": "🍏"}}
    text = r'{"a":{"b":"\ud83c\udf4f","c":true},"\u00fc":[0.1,1,null]}'
    assert canonical(value) == text
    assert parse_object(text.encode(), "it") == value
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical({"a": math.inf})


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ([], "run must be an object, got a list"),
        ({"seed": 1}, "run lacks the key 'psnr'"),
        ({"psnr": None, "seed": 1, "x": 0}, "run has an unknown key 'x'"),
        ({"psnr": "1", "seed": 1}, "run.psnr must be a number or null, got a string"),
        ({"psnr": 1.0, "seed": 1.0}, "run.seed must be an integer, got a number"),
        ({"psnr": True, "seed": 1}, "run.psnr must be a number or null, got a boolean"),
    ],
)
def test_records_have_exactly_their_keys_and_types(value: object, sentence: str) -> None:
    types = {"psnr": (float, type(None)), "seed": (int,)}
    with pytest.raises(ValueError, match=f"^{sentence}"):
        take_record(value, types, "run")


def test_single_values() -> None:
    with pytest.raises(FormatError, match="a holds a lone surrogate"):
        check_string("a", "\ud800")
    with pytest.raises(FormatError, match="versions must be a mapping, got list"):
        check_strings("versions", [])
    with pytest.raises(FormatError, match="a key of versions must not be empty"):
        check_strings("versions", {"": "1"})
    with pytest.raises(FormatError, match="a must be a number, got bool"):
        check_number("a", True)
    with pytest.raises(FormatError, match="a holds a number that is not finite"):
        check_tensor("a", torch.tensor([math.nan], dtype=torch.float64), shape=(1,))


def test_whatever_a_bad_file_raises_becomes_one_error() -> None:
    for cause, sentence in (
        (OSError(13, "Permission denied"), "Permission denied"),
        (RecursionError(), "its header is nested too deeply"),
        (OverflowError("int too large"), "int too large"),
        (ValueError("x" * 500), "x" * 400 + " ..."),
    ):
        with pytest.raises(PolicyError) as caught, raising(PolicyError, "cannot load 'a': "):
            raise cause
        assert str(caught.value) == f"cannot load 'a': {sentence}"
    own = PolicyError("of a part")
    with pytest.raises(PolicyError) as caught, raising(PolicyError):
        raise own
    assert caught.value is own
