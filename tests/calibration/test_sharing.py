"""Work on batches: in order, once, counted, and taken up only if nothing else has changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.calibration.session import Session, number_runs
from ertacache.calibration.sharing import (
    Evaluations,
    Record,
    Sharing,
    describe_pipeline,
    find_parts,
)
from ertacache.distributed import ALONE, Processes
from ertacache.formats.parts import Parts
from ertacache.formats.profile import ProfiledPrompt
from tests.calibration.conftest import TINY_RUNS, TINY_STEPS, counting_rows, tiny_call
from tests.integration.tiny import CASES

BATCHES = [[run] for run in number_runs(["a", "b", "c"], seed=4)]


class Work:
    """Finds the seed of a batch, at the cost of two evaluations."""

    def __init__(self, sharing: Sharing, evaluations: Evaluations) -> None:
        self.sharing, self.evaluations = sharing, evaluations
        self.done: list[int] = []

    def find(self, batch: Sequence[ProfiledPrompt]) -> Record:
        self.done.append(batch[0].seed)
        self.evaluations.add("trial", 2)
        return {"seed": torch.tensor([batch[0].seed])}

    def all(self, **more: Any) -> list[int]:
        return [
            int(found["seed"]) for found in self.sharing.share("work", BATCHES, self.find, **more)
        ]


def work(parts: Parts | None = None, identity: str = "") -> Work:
    evaluations = Evaluations()
    return Work(Sharing(evaluations, parts=parts, identity=lambda: identity), evaluations)


def test_results_are_in_order_and_counted() -> None:
    one = work()
    assert one.all() == one.done == [4, 5, 6]
    assert one.evaluations == Evaluations(trial=6)
    assert one.all() == [4, 5, 6]  # nothing is kept without parts
    assert one.done == [4, 5, 6] * 2


def test_finished_work_is_not_done_again_but_counted(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "parts")
    first = work(parts)
    found = first.sharing.share("work", BATCHES, first.find)
    assert int(next(iter(found))["seed"]) == 4  # then it is interrupted
    again = work(parts)
    assert again.all() == [4, 5, 6]
    assert again.done == [5, 6]
    assert again.evaluations == Evaluations(trial=6)


def test_work_that_depends_on_something_else_is_done_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "parts")
    work(parts).all()
    plan, weights = work(parts), work(parts, identity="other weights")
    assert plan.all(facts="another plan") == plan.done == [4, 5, 6]
    assert weights.all() == weights.done == [4, 5, 6]


def test_work_in_one_piece_is_kept_too(tmp_path: Path) -> None:
    done = []

    def find() -> Record:
        done.append(True)
        return {"sum": torch.ones(1)}

    for _ in range(2):
        found = work(Parts(tmp_path / "parts")).sharing.once("piece", BATCHES[0], find)
        assert found["sum"].tolist() == [1.0]
    assert done == [True]


def test_of_work_in_its_file_only_the_count_is_kept(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "parts")
    one = work(parts)
    one.all()
    for batch in BATCHES:
        one.sharing.note_done("work", batch)
    again = work(parts)
    again.sharing.count_done("work", BATCHES)
    assert again.evaluations == Evaluations(trial=6)
    assert again.all() == again.done == [4, 5, 6]  # if the file is gone, all is done again


def test_an_error_does_not_lose_what_was_counted() -> None:
    one = work()
    one.all()
    with pytest.raises(ZeroDivisionError):
        list(one.sharing.share("work", BATCHES, lambda _: {"seed": torch.ones(1 // 0)}))
    assert one.evaluations == Evaluations(trial=6)


def test_sums_are_in_the_order_of_numbers() -> None:
    large, small = torch.tensor([1e16]).double(), torch.tensor([1.0]).double()
    sharing = work().sharing
    assert sharing.add_up({0: small, 2: -large, 1: large}).tolist() == [0.0]
    assert sharing.add_up({2: small, 1: -large, 0: large}).tolist() == [1.0]


def test_batches_take_turns_unless_they_have_owners() -> None:
    two = Sharing(Evaluations(), processes=Processes(1, 2))
    assert two._divide({}, 5, None) == [[0, 2, 4], [1, 3]]
    assert two._divide({0: 1, 3: 1}, 5, None) == [[1, 4], [0, 2, 3]]
    assert two._divide({0: 1}, 3, [0, 0, 1]) == [[1], [0, 2]]


def test_where_finished_work_is_kept(tmp_path: Path) -> None:
    file, two = tmp_path / "profile", Processes(0, 2)
    assert find_parts(None, beside=None, processes=two) is None
    assert find_parts(None, beside=file, processes=ALONE) is None
    beside = find_parts(None, beside=file, processes=two)
    assert beside is not None
    assert beside.folder == tmp_path / "profile.parts"
    beside.folder.mkdir()  # several processes left something
    assert find_parts(None, beside=file, processes=ALONE) is not None
    given = find_parts(tmp_path / "mine", beside=file, processes=ALONE)
    assert given is not None
    assert given.folder == tmp_path / "mine"


def test_another_pipeline_or_call_is_another_identity() -> None:
    pipe, call = CASES["flux"].build(), tiny_call()
    known = describe_pipeline(pipe, call, 1)
    assert describe_pipeline(CASES["flux"].build(), call, 1) == known
    assert describe_pipeline(pipe, call | {"guidance_scale": 2.0}, 1) != known
    assert describe_pipeline(pipe, call | {"image": torch.zeros(2)}, 1) != known
    assert describe_pipeline(pipe, call, 2) != known
    with torch.no_grad():
        pipe.transformer.proj_out.weight[0, 0] += 1e-3
    assert describe_pipeline(pipe, call, 1) != known


def test_reference_latents_are_read_from_finished_work(tiny: Any, tmp_path: Path) -> None:
    parts, runs = Parts(tmp_path / "parts"), TINY_RUNS[:2]
    whole = Session(tiny, tiny_call(), parts=parts).reference(runs)
    session = Session(tiny, tiny_call(), parts=parts)
    with counting_rows(tiny.transformer) as rows:
        again = session.reference(runs)
    assert rows == []
    assert session.evaluations == Evaluations(refit=2 * TINY_STEPS)  # as if they were run
    assert len(again.latents) == TINY_STEPS + 1
    for ours, theirs in zip(again.latents, whole.latents, strict=True):
        assert torch.equal(ours, theirs)
    assert again.facts.layout == whole.facts.layout
    assert again.schedule.same_run(whole.schedule)
    assert again.finest == whole.finest
