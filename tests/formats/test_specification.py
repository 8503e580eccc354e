"""The specification is enough: the golden files read with json, struct and hashlib alone.

The reader follows docs/formats.md paragraph by paragraph and imports nothing of ertacache.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"


def read_document(path: Path) -> tuple[dict[str, Any], dict[str, tuple[list[int], list[float]]]]:
    """Fields and tensors (shape, numbers) of a file."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries, buffer = json.loads(data[8 : 8 + length]), data[8 + length :]
    text = entries.pop("__metadata__")["ertacache"]
    fields = json.loads(text)
    assert text.startswith(f'{{"checksum":"{fields["checksum"]}",')
    covered = "{" + text[79:]
    assert hashlib.sha256(covered.encode("ascii") + buffer).hexdigest() == fields["checksum"]
    tensors, end = {}, 0
    for name in sorted(entries):
        entry = entries[name]
        assert entry["dtype"] == "F64"
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
        piece = buffer[entry["data_offsets"][0] : end]
        tensors[name] = (entry["shape"], list(struct.unpack(f"<{len(piece) // 8}d", piece)))
    assert end == len(buffer)
    return fields, tensors


def numbers(count: int, start: int) -> list[float]:
    return [k / 3 for k in range(start, start + count)]


def hash_of_sigmas(sigmas: list[float]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(sigmas)}f", *sigmas)).hexdigest()


@pytest.mark.parametrize("name", ["profile", "policy", "paper-policy"])
def test_sigma_schedule_and_its_hash(name: str) -> None:
    fields, tensors = read_document(GOLDEN / f"{name}-v1.safetensors")
    assert fields["version"] == 1
    assert tensors["sigmas"] == ([5], [1.0, 0.875, 0.625, 0.3, 0.0])
    assert fields["fingerprint"]["num_steps"] == 4
    assert fields["fingerprint"]["sigmas_hash"] == hash_of_sigmas(tensors["sigmas"][1])


@pytest.mark.parametrize(("name", "prefix"), [("profile", ""), ("policy", "profile.")])
def test_profile(name: str, prefix: str) -> None:
    fields, tensors = read_document(GOLDEN / f"{name}-v1.safetensors")
    assert fields["format"] == f"ertacache-{name}"
    prompts = fields["profile"]["prompts"] if prefix else fields["prompts"]
    assert prompts[0] == {"elements": 12, "prompt": "a red apple", "seed": 0}
    assert prompts[1] == {"elements": 13, "prompt": 'ein grüner "Apfel" 🍏\n', "seed": 1}
    assert tensors[f"{prefix}nominal"] == ([4, 2], numbers(8, -3))
    assert tensors[f"{prefix}means"] == ([2, 9], numbers(18, -5))
    assert tensors[f"{prefix}residual_norm"] == ([2, 4], numbers(8, 1))
    assert tensors[f"{prefix}output_norm"] == ([2, 4], numbers(8, 3))
    for key, size, start in (("inner", 9, 1), ("residual_l1", 4, 4), ("output_l1", 4, 10)):
        shape, packed = tensors[prefix + key]
        full = numbers(2 * size * size, start)
        upper = [
            full[(p * size + i) * size + j]
            for p in range(2)
            for i in range(size)
            for j in range(i, size)
        ]
        assert (shape, packed) == ([2, size * (size + 1) // 2], upper)


def test_a_profile_with_provenance() -> None:
    older, _ = read_document(GOLDEN / "profile-v1.safetensors")
    newer, _ = read_document(GOLDEN / "profile-v2.safetensors")
    assert newer["version"] == 2
    assert newer["provenance"]["command"] == "ertacache profile emoji-flux"
    assert newer.keys() - older.keys() == {"provenance"}


def test_trajectory_policy() -> None:
    fields, tensors = read_document(GOLDEN / "policy-v1.safetensors")
    assert fields["plan"] == {"compute_steps": [0, 1, 3], "history": 3, "method": "trajectory"}
    assert tensors["plan.latent"] == ([4], numbers(4, 1))
    assert tensors["plan.outputs"] == ([4, 3], numbers(12, -6))
    assert fields["predicted_error"] == 0.001
    assert fields["validation"][2]["psnr"] is None
    assert fields["validation"][0] == {
        "computed_steps": 3,
        "method": "policy",
        "prompts": 24,
        "psnr": 46.5,
        "speedup": 1.3,
    }


def test_paper_policy() -> None:
    fields, tensors = read_document(GOLDEN / "paper-policy-v1.safetensors")
    assert fields["plan"]["gain_shape"] == [3, 1, 1]
    assert fields["plan"]["reuse"] == "residual"
    assert tensors["plan.sigmas"] == ([5], [1.0, 0.875, 0.7, 0.35, 0.0])
    assert tensors["plan.gain"] == ([4, 3, 1, 1], numbers(12, -4))
    assert tensors["plan.bias"] == ([4, 3, 1, 1], numbers(12, 2))
    assert fields["profile"] is None
    assert fields["fingerprint"]["guidance"] is None
