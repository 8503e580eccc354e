"""20,000 damaged files: only our errors, or the very same object; no crash, bounded memory."""

from __future__ import annotations

import copy
import json
import random
import resource
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from ertacache.formats.policy import Policy, PolicyError
from ertacache.formats.profile import Profile, ProfileError
from ertacache.formats.schema import FormatError
from tests.formats.golden.objects import GOLDEN, expert_policy
from tests.formats.mutations import MUTATORS, dump, join, seal, split

FILES_PER_ORIGINAL = {"raw": 1620, "header": 1200, "sealed": 1180}  # times five: 20,000 files
MEMORY_LIMIT = 64 << 20
ORIGINALS = {name: build()._to_bytes() for name, build in GOLDEN.items()}
ORIGINALS["policy-experts"] = expert_policy()._to_bytes()


def kind_of(name: str) -> tuple[type[Policy] | type[Profile], type[FormatError]]:
    return (Profile, ProfileError) if name.startswith("profile") else (Policy, PolicyError)


def outcome(name: str, data: bytes, *, path: Path | None) -> bytes | None:
    """Bytes of the loaded object, or None for a proper refusal; anything else fails the test."""
    kind, error = kind_of(name)
    try:
        if path is None:
            return kind._from_bytes(data, "mutant")._to_bytes()
        path.write_bytes(data)
        return kind.load(path)._to_bytes()
    except error as refusal:
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
def test_only_our_errors(name: str, how: str, tmp_path: Path) -> None:
    rng = random.Random(f"{name} {how}")
    original, results = ORIGINALS[name], Counter[str]()
    before = peak_bytes()
    for k in range(FILES_PER_ORIGINAL[how]):
        data = MUTATORS[how](original, rng)
        loaded = outcome(name, data, path=tmp_path / "mutant" if k % 40 == 0 else None)
        if loaded is None:
            results["refused"] += 1
        elif how == "sealed":  # a valid file with another content: it must be kept as it is
            results["other"] += loaded != original
            assert outcome(name, loaded, path=None) == loaded
        else:
            assert loaded == original, f"file {k} was accepted with another content"
    assert peak_bytes() - before < MEMORY_LIMIT
    assert results["refused"] > 0.5 * FILES_PER_ORIGINAL[how]
    assert how != "sealed" or results["other"] > 0


def test_count_is_kept() -> None:
    assert len(ORIGINALS) * sum(FILES_PER_ORIGINAL.values()) >= 20_000


@pytest.mark.parametrize("name", ORIGINALS)
def test_huge_claims_allocate_nothing(name: str) -> None:
    """Counts, shapes and offsets far beyond the file, with a checksum that is right."""
    header, buffer = split(ORIGINALS[name])
    tracemalloc.start()
    try:
        for steps in (5, 9_999, 10_000, 10_001, 2**40):
            text = json.loads(header["__metadata__"]["ertacache"])
            del text["checksum"]
            text["fingerprint"]["num_steps"] = steps
            claim = copy.deepcopy(header)
            claim["__metadata__"]["ertacache"] = seal(dump(text), buffer)
            for entry in (claim[key] for key in claim if key != "__metadata__"):
                entry["shape"] = [
                    steps if size == 4 else steps + 1 if size == 5 else size
                    for size in entry["shape"]
                ]
                entry["data_offsets"][1] = 8 * steps * steps
            assert outcome(name, join(dump(claim), buffer), path=None) is None
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


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
        assert outcome("policy-v1.safetensors", join(text, b""), path=None) is None


def test_nesting_around_the_parser_limit() -> None:
    """Some depth is short enough for the parser and too deep for whoever looks at the value."""
    name = "policy-v1.safetensors"
    header, buffer = split(ORIGINALS[name])
    inner = json.loads(header["__metadata__"]["ertacache"])
    del inner["checksum"]
    for depth in range(100, 1100, 7):
        nested = "[" * depth + "]" * depth
        text = dump(inner | {"plan": "?"}).replace('"?"', nested)
        claim = header | {"__metadata__": {"ertacache": seal(text, buffer)}}
        assert outcome(name, join(dump(claim), buffer), path=None) is None
        claim = dump(header | {"sigmas": "?"}).replace('"?"', nested)
        assert outcome(name, join(claim, buffer), path=None) is None
