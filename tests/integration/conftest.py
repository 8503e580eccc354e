from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.setting import Setting, make_setting

_BUILT: dict[str, Setting] = {}


def _setting(name: str) -> Setting:
    if name not in _BUILT:
        _BUILT[name] = make_setting(name)
    return _BUILT[name]


@pytest.fixture(params=["flux", "wan", "cogvideox", "sd3"])
def setting(request: pytest.FixtureRequest) -> Setting:
    """A pipeline of every kind, with its full run."""
    return _setting(request.param)


@pytest.fixture(scope="session")
def flux() -> Setting:
    return _setting("flux")


@pytest.fixture(scope="session")
def wan() -> Setting:
    return _setting("wan")


@pytest.fixture(scope="session")
def experts() -> Setting:
    return _setting("wan-experts")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No test may leave a policy attached to a shared pipeline."""
    yield
    for setting in _BUILT.values():
        assert "step" not in vars(setting.pipe.scheduler)
        assert "forward" not in vars(setting.pipe.transformer)
