"""Coefficients for several values of one guidance argument, such as ``guidance_scale``.

A plan that was calibrated over a list of values has them beside those that serve all; a run takes
what is interpolated for its own value.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ertacache.formats.schema import (
    FormatError,
    check_number,
    check_string,
    check_tensor,
    raising,
    take_record,
)

__all__ = ["MAX_VALUES", "GuidedCoefficients", "guided_shape", "take_guided"]

MAX_VALUES = 100
_FIELDS: dict[str, tuple[type, ...]] = {"argument": (str,), "values": (list,)}


@dataclass(frozen=True, eq=False)
class GuidedCoefficients:
    """Coefficients of one compute schedule by the value of a guidance argument.

    Attributes:
        argument: name of the argument.
        values: that it was calibrated with, ascending.
        coefficients: for every value those of a plan, shape (V, T, groups, ...), float64.

    Example:
        >>> import torch
        >>> two = torch.stack([torch.zeros(4, 1, 2), torch.ones(4, 1, 2)]).double()
        >>> guided = GuidedCoefficients("guidance_scale", (2.0, 6.0), two)
        >>> [guided.at(value)[0, 0, 0].item() for value in (1.0, 3.0, 9.0)]
        [0.0, 0.25, 1.0]
    """

    argument: str
    values: tuple[float, ...]
    coefficients: Tensor = field(repr=False)

    def __post_init__(self) -> None:
        """Check that they belong together."""
        with raising(FormatError):
            check_string("guided.argument", self.argument)
            values = tuple(check_number("guided.values", value) for value in self.values)
            object.__setattr__(self, "values", values)
            _check_values(values)
            shape = (len(values), *self.coefficients.shape[1:])
            check_tensor("guided", self.coefficients, shape=shape)

    def __str__(self) -> str:
        """Argument and values, as in ``guidance_scale 2, 5, 7``."""
        return f"{self.argument} {', '.join(f'{value:g}' for value in self.values)}"

    def at(self, value: float) -> Tensor:
        """The coefficients for a value: linear between the calibrated ones, constant outside."""
        after = bisect(self.values, value)
        if after in (0, len(self.values)):
            return self.coefficients[min(after, len(self.values) - 1)]
        low, high = self.values[after - 1 : after + 1]
        share = (value - low) / (high - low)
        return self.coefficients[after - 1].lerp(self.coefficients[after], share)

    def value_in(self, guidance: Mapping[str, tuple[float, ...]]) -> float | None:
        """The value of the argument among those of a run; None if it is not there."""
        found = guidance.get(self.argument, ())
        return found[0] if len(found) == 1 else None

    def to_json(self) -> dict[str, object]:
        """The record of a file, without the tensor."""
        return {"argument": self.argument, "values": list(self.values)}


def guided_shape(value: object, where: str, plan: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the tensor of a record, which is checked; None if there is none.

    Args:
        value: the record, or None.
        where: its name in messages.
        plan: shape of the coefficients of the plan.
    """
    if value is None:
        return None
    _, values = take_guided(value, where)
    return (len(values), *plan)


def take_guided(value: object, where: str) -> tuple[str, tuple[float, ...]]:
    """Argument and values of a record."""
    record = take_record(value, _FIELDS, where)
    check_string(f"{where}.argument", record["argument"])
    found = tuple(check_number(f"{where}.values", each) for each in record["values"])
    _check_values(found)
    return record["argument"], found


def _check_values(values: tuple[float, ...]) -> None:
    if not 2 <= len(values) <= MAX_VALUES or list(values) != sorted(set(values)):
        raise FormatError(f"guided.values must be 2 to {MAX_VALUES} numbers that ascend")
