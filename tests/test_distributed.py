"""One process by itself; several are launched in ``tests/distributed``."""

from __future__ import annotations

import pytest

from ertacache.distributed import ALONE, Processes, is_launched, launched_number
from tests.test_layers import run_python


def test_a_process_by_itself() -> None:
    assert Processes.launched() is ALONE
    assert (ALONE.number, ALONE.count, ALONE.is_main, ALONE.device) == (0, 1, True, None)
    assert ALONE.exchange("a label", b"mine") == [b"mine"]
    assert ALONE.from_main("a label", b"mine") == b"mine"
    ALONE.leave()


def test_an_error_of_one_process_by_itself_stays_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), ALONE.together():
        _ = 1 / 0


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, False),
        ({"WORLD_SIZE": "4"}, False),  # of a job, but not of a launcher
        ({"RANK": "3", "WORLD_SIZE": "4"}, True),
    ],
)
def test_what_a_launcher_leaves_in_the_environment(
    environment: dict[str, str], launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_launched() == launched
    assert launched_number() == (3 if launched else 0)


def test_one_process_loads_no_accelerate() -> None:
    code = "import sys, ertacache.distributed as d; d.Processes.launched(); print(*sys.modules)"
    loaded = set(run_python(code).split())
    assert not loaded & {"torch", "accelerate"}
