"""20,000 damaged files: only our error, or the very same policy; no crash, bounded memory."""

from __future__ import annotations

import copy
import json
import math
import random
import resource
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from ertacache.formats.policy import Policy
from ertacache.formats.profile import Profile
from ertacache.formats.schema import PolicyError
from tests.formats.golden.objects import GOLDEN
from tests.formats.mutations import MUTATORS, ODD, dump, edited, join, seal, split

FILES_PER_ORIGINAL = {"raw": 2000, "header": 1400, "sealed": 1600}  # times four: 20,000 files
MEMORY_LIMIT = 64 << 20
ORIGINALS = {name: build()._to_bytes() for name, build in GOLDEN.items()}
FULL = ORIGINALS["policy-v2.safetensors"]


def outcome(data: bytes, *, path: Path | None = None) -> bytes | None:
    """Bytes of the loaded policy, or None for a proper refusal; anything else fails the test."""
    try:
        if path is None:
            return Policy._from_bytes(data, "mutant")._to_bytes()
        path.write_bytes(data)
        return Policy.load(path)._to_bytes()
    except PolicyError as refusal:
        message = str(refusal)
    assert message.startswith("cannot load '")
    assert "\n" not in message
    assert len(message) < 700
    return None


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@pytest.mark.parametrize("name", ORIGINALS)
@pytest.mark.parametrize("how", MUTATORS)
def test_only_our_error(name: str, how: str, tmp_path: Path) -> None:
    rng = random.Random(f"{name} {how}")
    original, results = ORIGINALS[name], Counter[str]()
    before = peak_bytes()
    for k in range(FILES_PER_ORIGINAL[how]):
        data = MUTATORS[how](original, rng)
        loaded = outcome(data, path=tmp_path / "mutant" if k % 40 == 0 else None)
        if loaded is None:
            results["refused"] += 1
        elif how == "sealed":  # a valid file with another content: it must be kept as it is
            results["other"] += loaded != original
            assert outcome(loaded) == loaded
        else:
            assert loaded == original, f"file {k} was accepted with another content"
    assert peak_bytes() - before < MEMORY_LIMIT
    assert results["refused"] > 0.5 * FILES_PER_ORIGINAL[how]
    assert how != "sealed" or results["other"] > 0


def test_count_is_kept() -> None:
    assert len(ORIGINALS) * sum(FILES_PER_ORIGINAL.values()) >= 20_000


@pytest.mark.parametrize(
    ("key", "valid"),
    [
        ("profile.groups", 0),
        ("profile.groups.bands", 1),
        ("profile.groups.channels", 1),
        ("profile.groups.counts", 0),
        ("profile.groups.counts.0", 1),
        ("profile.groups.counts.7", 1),
        ("profile.runs.1.fold", 1),
        ("fits.0.order", 3),
        ("fits.0.groups", 2),
        ("fits.0.groups.bands", 2),
        ("fits.0.groups.channels", 2),
        ("plans.0.groups", 1),
        ("plans.0.groups.bands", 1),
        ("plans.0.groups.channels", 1),
        ("plans.0.branch", 1),
        ("plans.1.branch", 1),
    ],
)
def test_every_odd_value_of_groups_order_and_branch(key: str, valid: int) -> None:
    """Only so many of them are valid; they are kept as they are."""
    found = [outcome(edited(FULL, {key: value})) for value in ODD]
    accepted = [loaded for loaded in found if loaded is not None]
    assert all(outcome(loaded) == loaded for loaded in accepted)
    assert len(set(accepted)) == valid


@pytest.mark.parametrize("name", ORIGINALS)
def test_huge_claims_allocate_nothing(name: str) -> None:
    """Counts, shapes and offsets far beyond the file, with a checksum that is right."""
    fields = json.loads(split(ORIGINALS[name])[0]["__metadata__"]["ertacache"])
    counts = [f"plans.{place}.num_steps" for place in range(len(fields["plans"]))]
    counts += ["profile.num_steps"] if fields["profile"] else []
    tracemalloc.start()
    try:
        for steps in (5, 9_999, 10_000, 10_001, 2**40):
            header, buffer = split(edited(ORIGINALS[name], dict.fromkeys(counts, steps)))
            for entry in (header[key] for key in header if key != "__metadata__"):
                entry["shape"] = [
                    steps if size == 4 else steps + 1 if size == 5 else size
                    for size in entry["shape"]
                ]
                entry["data_offsets"][1] = 8 * steps * steps
            assert outcome(join(dump(header), buffer)) is None
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def refused_without_allocating(header: dict[str, object], claimed: int) -> None:
    """A file with this header alone, which claims so many bytes of tensors."""
    tracemalloc.start()
    try:
        with pytest.raises(
            PolicyError, match=f"the tensors take {claimed} bytes, but the file holds"
        ):
            Policy._from_bytes(join(dump(header), b""), "memory")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_consistent_claims_beyond_the_file_allocate_nothing() -> None:
    """A layout that follows from the document, of tensors that the file does not have."""
    plan = {"plans.0.num_steps": 10_000, "plans.0.gain_shape": [2**20, 2**20]}
    header, _ = split(edited(ORIGINALS["paper-policy-v2.safetensors"], plan))
    sizes = {"adjusted": [10_001], "sigmas": [10_001]}
    sizes |= {name: [10_000, 2**20, 2**20] for name in ("gain", "bias")}
    end = 0
    for name in sorted(sizes):
        begin, end = end, end + 8 * (10_001 if len(sizes[name]) == 1 else 10_000 * 2**40)
        header[f"plan.0.{name}"] |= {"shape": sizes[name], "data_offsets": [begin, end]}
    refused_without_allocating(header, end)


def test_consistent_claims_of_groups_beyond_the_file_allocate_nothing() -> None:
    groups = {"bands": 4, "channels": 16, "counts": [10_000] * 8}
    changes: dict[str, object] = {"profile.num_steps": 10_000, "profile.groups": groups}
    header, _ = split(edited(ORIGINALS["profile-v2.safetensors"], changes))
    record = json.loads(header["__metadata__"]["ertacache"])["profile"]
    end = 0
    for name, shape in sorted(Profile.shapes(record).items()):
        begin, end = end, end + 8 * math.prod(shape)
        header[name] |= {"shape": list(shape), "data_offsets": [begin, end]}
    refused_without_allocating(header, end)


def test_deep_and_wide_headers() -> None:
    """Headers as large as the limit, made to cost a parser as much as possible."""
    limit = 4 << 20
    wide = '{"a":[' + "[]," * (limit // 3 - 4) + "[]]}"
    keys = "{" + ",".join(f'"{k}":0' for k in range(limit // 12)) + ',"0":0}'
    for text in (
        "[" * limit,
        '{"a":' * (limit // 5),
        wide,
        keys,
        '{"a":' + "9" * (limit - 6) + "}",
    ):
        assert len(text) <= limit
        assert outcome(join(text, b"")) is None


def test_nesting_around_the_parser_limit() -> None:
    """Some depth is short enough for the parser and too deep for whoever looks at the value."""
    header, buffer = split(FULL)
    inner = json.loads(header["__metadata__"]["ertacache"])
    del inner["checksum"]
    for depth in range(100, 1100, 7):
        nested = "[" * depth + "]" * depth
        for key in ("plans", "profile"):
            text = dump(inner | {key: "?"}).replace('"?"', nested)
            claim = copy.deepcopy(header) | {"__metadata__": {"ertacache": seal(text, buffer)}}
            assert outcome(join(dump(claim), buffer)) is None
        claim = dump(header | {"profile.sigmas": "?"}).replace('"?"', nested)
        assert outcome(join(claim, buffer)) is None
