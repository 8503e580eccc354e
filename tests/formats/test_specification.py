"""The specification is enough: the golden files read with json, struct and hashlib alone.

The reader follows docs/formats*.md paragraph by paragraph and imports nothing of ertacache.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
PAGES = sorted((Path(__file__).parents[2] / "docs").glob("formats*.md"))
TEXT = "".join(page.read_text() for page in PAGES)
NAMES = sorted(path.name for path in GOLDEN.glob("*-v2.safetensors"))
Tensors = dict[str, tuple[list[int], list[float]]]


def read_document(name: str) -> tuple[dict[str, Any], Tensors]:
    """Fields and tensors (shape, numbers) of a file."""
    data = (GOLDEN / name).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    entries, buffer = json.loads(data[8 : 8 + length]), data[8 + length :]
    metadata = entries.pop("__metadata__")
    assert list(metadata) == ["ertacache"]
    text = metadata["ertacache"]
    fields = json.loads(text)
    assert text == json.dumps(fields, sort_keys=True, separators=(",", ":"))
    assert text.startswith(f'{{"checksum":"{fields["checksum"]}",')
    covered = "{" + text[79:]
    assert hashlib.sha256(covered.encode("ascii") + buffer).hexdigest() == fields["checksum"]
    tensors, end = {}, 0
    for key in sorted(entries):
        entry = entries[key]
        assert entry["dtype"] == "F64"
        assert entry["data_offsets"][0] == end
        end = entry["data_offsets"][1]
        piece = buffer[entry["data_offsets"][0] : end]
        tensors[key] = (entry["shape"], list(struct.unpack(f"<{len(piece) // 8}d", piece)))
    assert end == len(buffer)
    return fields, tensors


def layout(fields: dict[str, Any]) -> dict[str, list[int]]:
    """The tensors that follow from the document, with their shapes."""
    shapes: dict[str, list[int]] = {}
    if fields["profile"] is not None:
        T, P = fields["profile"]["num_steps"], len(fields["profile"]["runs"])
        R = 2 * T + 1
        of_profile = {
            "inner": [P, R * (R + 1) // 2],
            "latents": [T + 1, T + 1],
            "means": [P, R],
            "nominal": [T, 2],
            "output_l1": [P, T * (T + 1) // 2],
            "output_norm": [P, T],
            "residual_l1": [P, T * (T + 1) // 2],
            "residual_norm": [P, T],
            "scale": [T + 1],
            "sigmas": [T + 1],
        }
        groups = fields["profile"]["groups"]
        if groups is not None:
            count = groups["channels"] * groups["bands"]
            of_profile["groups"] = [8, count, (T + 1) * (T + 2) // 2]
        shapes |= {f"profile.{name}": shape for name, shape in of_profile.items()}
    for i, plan in enumerate(fields["plans"]):
        T = plan["num_steps"]
        of_plan = {"sigmas": [T + 1]} | ({"target": [T + 1]} if plan["target"] else {})
        if plan["method"] == "trajectory":
            groups, histories = plan["groups"], 2 if plan["branch"] else 1
            count = groups["channels"] * groups["bands"]
            of_plan["coefficients"] = [T, count, 1 + histories * plan["history"]]
            if plan["guided"] is not None:
                of_plan["guided"] = [len(plan["guided"]["values"]), *of_plan["coefficients"]]
        else:
            of_plan["adjusted"] = [T + 1]
            if plan["gain_shape"] is not None:
                of_plan |= {name: [T, *plan["gain_shape"]] for name in ("gain", "bias")}
        shapes |= {f"plan.{i}.{name}": shape for name, shape in of_plan.items()}
    return shapes


def keys_of(*sections: str) -> set[str]:
    """First column of the tables of some sections of the page, without the tensors."""
    found: set[str] = set()
    for title in sections:
        _, section = re.split(rf"^#+ {title}\n", TEXT, maxsplit=1, flags=re.M)
        section = re.split(r"^#+ ", section, maxsplit=1, flags=re.M)[0]
        found |= set(re.findall(r"^\| `([a-z_]+)` \|", section, re.M))
    return found


def numbers(count: int, start: int) -> list[float]:
    return [k / 3 for k in range(start, start + count)]


@pytest.mark.parametrize("name", NAMES)
def test_the_document_determines_the_layout(name: str) -> None:
    fields, tensors = read_document(name)
    assert {key: shape for key, (shape, _) in tensors.items()} == layout(fields)
    for shape, values in tensors.values():
        assert len(values) == math.prod(shape)
        assert all(map(math.isfinite, values))


@pytest.mark.parametrize("name", NAMES)
def test_objects_have_the_keys_of_the_tables(name: str) -> None:
    fields, _ = read_document(name)
    assert (fields["format"], fields["version"]) == ("ertacache-policy", 2)
    assert fields.keys() == keys_of("Document")
    assert fields["fingerprint"].keys() == keys_of("Fingerprint")
    for fit in fields["fits"]:
        assert fit.keys() == keys_of("Fits")
    for known in fields["frontier"]:
        assert known.keys() == keys_of("Frontier")
    if fields["profile"] is not None:
        run = {"arguments", "elements", "fold", "prompt", "seed"}
        assert fields["profile"].keys() | run == keys_of("Record")
        assert all(found.keys() == run for found in fields["profile"]["runs"])
        assert fields["profile"]["groups"].keys() == {"bands", "channels", "counts"}
    divided = [*fields["fits"], *(plan for plan in fields["plans"] if "groups" in plan)]
    assert all(found["groups"].keys() == {"bands", "channels"} for found in divided)
    row = {
        "computed_steps",
        "heldout",
        "prompts",
        "psnr",
        "speedup",
    }  # and "method", which both have
    own = {
        "trajectory": {"branch", "groups", "guided", "history"},
        "paper": {"gain_shape", "reuse"},
    }
    for plan in fields["plans"]:
        assert plan.keys() == keys_of("File format: plans") - row | own[plan["method"]]
        assert all(found.keys() == row | {"method"} for found in plan["validation"])


@pytest.mark.parametrize("name", ["profile", "policy"])
def test_profile(name: str) -> None:
    fields, tensors = read_document(f"{name}-v2.safetensors")
    found = {key.removeprefix("profile."): value for key, value in tensors.items()}
    assert fields["profile"]["begun"] == (name == "policy")
    assert fields["profile"]["expert_steps"] == ([3] if name == "policy" else [])
    assert fields["profile"]["runs"] == [
        {
            "arguments": {"guidance_scale": 2.5, "height": 64},
            "elements": 12,
            "fold": 0,
            "prompt": "a red apple",
            "seed": 0,
        },
        {
            "arguments": {"guidance_scale": 3.5, "style": None, "tiled": True},
            "elements": 13,
            "fold": 1,
            "prompt": 'ein grüner "Apfel" 🍏\n',
            "seed": 1,
        },
    ]
    assert found["sigmas"] == ([5], [1.0, 0.875, 0.625, 0.3, 0.0])
    assert found["scale"] == ([5], numbers(5, 1))
    assert found["nominal"] == ([4, 2], numbers(8, -3))
    square = numbers(25, -7)
    lower = [square[5 * k + j] if j <= k else 0.0 for k in range(5) for j in range(5)]
    assert found["latents"] == ([5, 5], lower)
    assert found["means"] == ([2, 9], numbers(18, -5))
    assert found["residual_norm"] == ([2, 4], numbers(8, 1))
    assert found["output_norm"] == ([2, 4], numbers(8, 3))
    for key, size, start in (("inner", 9, 1), ("residual_l1", 4, 4), ("output_l1", 4, 10)):
        full = numbers(2 * size * size, start)
        upper = [
            full[(p * size + i) * size + j]
            for p in range(2)
            for i in range(size)
            for j in range(i, size)
        ]
        assert found[key] == ([2, size * (size + 1) // 2], upper)


@pytest.mark.parametrize("name", ["profile", "policy"])
def test_statistics_by_group(name: str) -> None:
    fields, tensors = read_document(f"{name}-v2.safetensors")
    counts = [1, 1, 0, 0, 0, 0, 0, 0]
    assert fields["profile"]["groups"] == {"bands": 2, "channels": 3, "counts": counts}
    full = numbers(8 * 6 * 5 * 5, 4)
    upper = [
        full[((fold * 6 + group) * 5 + i) * 5 + j] if counts[fold] else 0.0
        for fold in range(8)
        for group in range(6)
        for i in range(5)
        for j in range(i, 5)
    ]
    assert tensors["profile.groups"] == ([8, 6, 15], upper)


def test_a_policy_without_plans_is_a_profile() -> None:
    fields, tensors = read_document("profile-v2.safetensors")
    assert (fields["plans"], fields["fits"], fields["frontier"]) == ([], [], [])
    assert fields["unit_psnr"] is None
    assert fields["provenance"]["command"] == "ertacache profile emoji-flux"
    assert all(key.startswith("profile.") for key in tensors)


def test_trajectory_plans() -> None:
    fields, tensors = read_document("policy-v2.safetensors")
    first, second = fields["plans"]
    rows = first.pop("validation")
    assert first == {
        "branch": True,
        "compute_steps": [0, 1, 3],
        "groups": {"bands": 2, "channels": 3},
        "guided": {"argument": "guidance_scale", "values": [2.5, 3.5]},
        "history": 2,
        "measured_error": 0.0025,
        "method": "trajectory",
        "num_steps": 4,
        "predicted_error": 0.001,
        "target": True,
        "target_psnr": 42.5,
    }
    z = numbers(4 * 6 * 5, -6)  # that of the latent is the same in all groups
    z = [z[30 * (i // 30)] if i % 5 == 0 else value for i, value in enumerate(z)]
    assert tensors["plan.0.coefficients"] == ([4, 6, 5], z)
    assert tensors["plan.0.guided"] == ([2, 4, 6, 5], [*z, *(2 * value for value in z)])
    assert tensors["plan.0.sigmas"] == tensors["profile.sigmas"]
    assert tensors["plan.0.target"] == ([5], tensors["profile.latents"][1][-5:])
    assert rows[0] == {
        "computed_steps": 3,
        "heldout": True,
        "method": "policy",
        "prompts": 24,
        "psnr": 46.5,
        "speedup": 1.3,
    }
    assert rows[2]["psnr"] is None
    assert (second["compute_steps"], second["num_steps"], second["target"]) == ([0, 2], 3, False)
    assert [(row["heldout"], row["prompts"]) for row in second["validation"]] == [(False, 1)]
    assert second["measured_error"] is second["predicted_error"] is second["target_psnr"] is None
    assert (second["groups"], second["branch"]) == ({"bands": 1, "channels": 1}, False)
    assert second["guided"] is None
    assert tensors["plan.1.coefficients"] == ([3, 1, 2], numbers(6, 1))


def test_fits_and_frontier() -> None:
    fields, _ = read_document("policy-v2.safetensors")
    assert [fit["computed_steps"] for fit in fields["fits"]] == [2, 3]
    assert fields["fits"][0] == {
        "computed_steps": 2,
        "error_ratio": 1.5,
        "groups": {"bands": 2, "channels": 1},
        "history": 3,
        "order": 2,
        "response": True,
        "ridge": 0.1,
        "sensitivity": 1.0,
        "uniform": True,
    }
    assert fields["fits"][1]["groups"] == {"bands": 1, "channels": 1}
    assert [fit["order"] for fit in fields["fits"]] == [2, 0]
    assert [known["mask"] for known in fields["frontier"]] == ["1001", "1101", "1111"]
    assert fields["frontier"][0]["predicted_error"] == 0.02
    assert fields["unit_psnr"] == 20.25
    assert fields["response"] == [0.5, 0.75, -0.25, 0.0]
    assert [fit["response"] for fit in fields["fits"]] == [True, False]


@pytest.mark.parametrize(("name", "gain_shape"), [("", [3, 1, 1]), ("-plain", None)])
def test_paper_plans(name: str, gain_shape: list[int] | None) -> None:
    fields, tensors = read_document(f"paper-policy{name}-v2.safetensors")
    (plan,) = fields["plans"]
    assert plan["method"] == "paper"
    assert plan["gain_shape"] == gain_shape
    assert plan["reuse"] == "residual"
    assert tensors["plan.0.adjusted"] == ([5], [1.0, 0.875, 0.7, 0.35, 0.0])
    assert tensors["plan.0.sigmas"] == ([5], [1.0, 0.875, 0.625, 0.3, 0.0])
    if gain_shape is not None:
        assert tensors["plan.0.gain"] == ([4, 3, 1, 1], numbers(12, -4))
        assert tensors["plan.0.bias"] == ([4, 3, 1, 1], numbers(12, 2))
    assert fields["profile"] is None
    assert fields["fingerprint"]["guidance"] == {}


def test_the_hash_of_a_configuration() -> None:
    fields, _ = read_document("policy-v2.safetensors")
    config = '{"axes_dims_rope":[4,6,6],"num_layers":2}'
    assert fields["fingerprint"]["denoiser_hash"] == hashlib.sha256(config.encode()).hexdigest()


def test_the_page_lists_the_tensors_of_the_files() -> None:
    listed = re.findall(r"^\| `((?:plan\.i|profile)\.[a-z_0-9]+)` \|", TEXT, re.M)
    stored = {re.sub(r"\.\d+\.", ".i.", key) for name in NAMES for key in read_document(name)[1]}
    assert set(listed) == stored
