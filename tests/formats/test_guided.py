"""Coefficients by guidance: interpolation, and what does not belong together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ertacache.formats.guided import GuidedCoefficients
from ertacache.formats.schema import FormatError, PolicyError
from tests.formats.golden.objects import grouped_plan, guided_coefficients, measured_plan

PLAN = measured_plan()


@pytest.mark.parametrize(
    ("value", "factor"),
    [(0.0, 1.0), (2.5, 1.0), (2.75, 1.25), (3.25, 1.75), (3.5, 2.0), (9.0, 2.0)],
)
def test_a_run_takes_what_is_interpolated_for_its_guidance(value: float, factor: float) -> None:
    found = PLAN.at({"guidance_scale": (value,), "guidance_rescale": (0.0,)})
    assert found.guided is None
    assert torch.allclose(found.plan.coefficients, factor * PLAN.plan.coefficients)
    assert found.compute_steps == PLAN.compute_steps
    assert found.measured_error == PLAN.measured_error


@pytest.mark.parametrize(
    "guidance", [{}, {"true_cfg_scale": (2.5,)}, {"guidance_scale": (2.5, 3.5)}]
)
def test_unknown_guidance_takes_what_serves_all(guidance: dict[str, tuple[float, ...]]) -> None:
    assert PLAN.at(guidance) is PLAN


def test_a_plan_without_them_stays_as_it_is() -> None:
    plain = replace(PLAN, guided=None)
    assert plain.at({"guidance_scale": (2.5,)}) is plain


def test_a_plan_says_what_it_was_fitted_for() -> None:
    assert "fitted for guidance_scale 2.5, 3.5, interpolated between" in str(PLAN)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"argument": ""}, "guided.argument must not be empty"),
        ({"values": (2.5,)}, "must be 2 to 100 numbers that ascend"),
        ({"values": (2.5, 2.5)}, "must be 2 to 100 numbers that ascend"),
        ({"values": (2.5, float("nan"))}, "guided.values must be finite"),
        ({"values": (1, 2, 3)}, "guided must have shape"),
    ],
)
def test_bad_parts_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(FormatError, match=sentence):
        replace(guided_coefficients(grouped_plan()), **changes)


def test_they_must_be_coefficients_of_the_plan() -> None:
    other = torch.zeros(2, 3, 1, 2, dtype=torch.float64)
    with pytest.raises(PolicyError, match="guided must have shape"):
        replace(PLAN, guided=GuidedCoefficients("guidance_scale", (2.5, 3.5), other))
    uneven = guided_coefficients(grouped_plan()).coefficients.clone()
    uneven[1, 0, 0, 0] += 1
    with pytest.raises(PolicyError, match="groups must have the same coefficient of the latent"):
        replace(PLAN, guided=GuidedCoefficients("guidance_scale", (2.5, 3.5), uneven))
    with pytest.raises(PolicyError, match="guided must be GuidedCoefficients"):
        replace(PLAN, guided="no")
