from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.baselines.cases import Subject, attributes, make_subject

_BUILT: dict[str, Subject] = {}
_FRESH: dict[str, Any] = {}
_USED: set[str] = set()


def _subject(name: str) -> Subject:
    if name not in _BUILT:
        _BUILT[name] = make_subject(name)
        _FRESH[name] = attributes(_BUILT[name].pipe)
    _USED.add(name)
    return _BUILT[name]


@pytest.fixture(params=["flux", "wan", "cogvideox"])
def subject(request: pytest.FixtureRequest) -> Subject:
    """A pipeline of every kind of diffusers, with four blocks and its full run."""
    return _subject(request.param)


@pytest.fixture(params=["flux", "wan", "cogvideox", "opensora"])
def any_subject(request: pytest.FixtureRequest) -> Subject:
    """The same, and the one that diffusers does not have."""
    return _subject(request.param)


@pytest.fixture
def opensora() -> Subject:
    return _subject("opensora")


@pytest.fixture
def flux() -> Subject:
    return _subject("flux")


@pytest.fixture
def wan() -> Subject:
    return _subject("wan")


@pytest.fixture
def cogvideox() -> Subject:
    return _subject("cogvideox")


@pytest.fixture
def sd3() -> Subject:
    return _subject("sd3")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Whatever a test did, no attribute is left on a scheduler, network, block or layer."""
    _USED.clear()
    yield
    for name in _USED:
        assert attributes(_BUILT[name].pipe) == _FRESH[name]
