"""The verdict on a policy: what is printed, and the exit code."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ertacache.calibration import validate
from ertacache.cli.policies import NOT_RECOMMENDED, print_verdict
from ertacache.formats.policy import Policy, ValidationRow

FAST = ValidationRow("policy", 3, psnr=64.11, speedup=1.921, prompts=4)


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (FAST, "recommended: 1.92x faster, 64.1 dB PSNR to the full run"),
        (replace(FAST, psnr=math.inf), "recommended: 1.92x faster, identical to the full run"),
    ],
)
def test_a_recommended_policy(
    row: ValidationRow, line: str, policy_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = replace(Policy.load(policy_file), validation=(row,))
    assert print_verdict(policy, Path("q.safetensors")) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [line, "q.safetensors: the policy"]


def test_an_objection_is_printed_and_is_an_exit_code(
    policy_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "recommend", lambda rows: validate.Verdict(False, "it is slow"))
    policy = replace(Policy.load(policy_file), validation=(FAST,))
    assert print_verdict(policy, Path("q.safetensors")) == NOT_RECOMMENDED == 3
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "not recommended: it is slow",
        "q.safetensors: the policy, not recommended",
    ]
