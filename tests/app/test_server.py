"""The server as a whole, without a browser: files, stack traces, many visitors, what is left."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from ertacache.app import engine as module
from ertacache.app.engine import Engine
from ertacache.app.requests import Limits, Request
from tests.integration.tiny import CASES, STEPS

pytest.importorskip("gradio")
httpx = pytest.importorskip("httpx")

MODEL, SIDE, VISITORS = "emoji-flux", CASES["flux"].arguments["height"], 50
SETTINGS = [MODEL, "a red circle", 0, 2, SIDE, SIDE, None, 1.0]  # as little work as there is


@pytest.fixture(scope="module")
def load() -> Any:
    """The benchmark whose visitors these are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield import_module("app_load")
    sys.modules.pop("app_load")


@pytest.fixture(scope="module")
def served(load: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address and session of an app with a tiny pipeline in the place of the bundled model."""
    from ertacache.app.server import served

    pipe = CASES["flux"].build()
    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_pipeline", lambda source: pipe)
        patch.setattr(module, "_scores", lambda result, reference: {"PSNR": 40.0})
        engine = Engine(tmp_path_factory.mktemp("work"), limits=Limits(upload=1 << 16))
        asked = Request("a red circle", 0, STEPS, SIDE, SIDE)
        engine.calibrate(MODEL, "a red circle\na blue square", asked, quick=True)
        port = load.free_port()
        with served(engine, results={}, host="127.0.0.1", port=port) as session:
            yield f"http://127.0.0.1:{port}", session
        assert not session.exists()
    # Workers of the event loop may take a moment to see that it has ended.
    for thread in threading.enumerate():
        if "AnyIO" in thread.name:
            thread.join(10)
    assert threading.active_count() <= before + 1


def test_fifty_visitors_at_once(
    load: Any, served: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everyone is answered, one at a time; the others have a place in the queue."""
    address, session = served
    running: list[int] = []
    generate = Engine.generate

    def counted(self: Engine, model: str, request: Request, *args: Any, **kwargs: Any) -> Any:
        running.append(1)
        assert len(running) == 1
        try:
            return generate(self, model, request, *args, **kwargs)
        finally:
            running.pop()

    monkeypatch.setattr(Engine, "generate", counted)
    handler = load.find_handler(address, len(SETTINGS), 1)
    files = sorted(session.rglob("*"))
    answers = load.flood(address, handler, SETTINGS, VISITORS)
    assert [each["success"] for each in answers] == [True] * VISITORS
    assert all("erta-compare" in each["output"]["data"][0] for each in answers)
    assert max(max(each["waited"], default=0) for each in answers) > 0
    assert sorted(session.rglob("*")) == files


def test_files_outside_of_the_session(served: tuple[str, Path], tmp_path: Path) -> None:
    """Asked of the whole server, in every spelling; the working folder is not served either."""
    address, session = served
    (tmp_path / "secret").write_text("secret")
    (session / "shown.txt").write_text("shown")
    (session / "link").symlink_to(tmp_path / "secret")
    names = [
        "/etc/passwd",
        f"{session}/../../etc/passwd",
        f"{session}/link",
        str(tmp_path / "secret"),
        "pyproject.toml",
        str(Path.cwd() / "pyproject.toml"),
    ]
    for name in names:
        for spelled in (name, quote(name, safe=""), name.replace("/", "//")):
            answer = httpx.get(f"{address}/gradio_api/file={spelled}")
            assert answer.status_code == 403, spelled
            assert "secret" not in answer.text
            assert "root:" not in answer.text
    assert httpx.get(f"{address}/gradio_api/file={session}/shown.txt").text == "shown"


def test_a_job_cannot_name_a_file_that_was_not_uploaded(
    load: Any, served: tuple[str, Path], tmp_path: Path
) -> None:
    address, _ = served
    config = httpx.get(f"{address}/config").json()
    (handler,) = [
        each["id"]
        for each in config["dependencies"]
        if len(each["inputs"]) == 3 and len(each["outputs"]) == 1
    ]
    path = tmp_path / "mine.safetensors"
    path.write_bytes(b"secret")
    file = {"path": str(path), "meta": {"_type": "gradio.FileData"}}
    answer = load.ask(address, handler, [file, MODEL, False], "visitor")
    assert not answer["success"]
    assert "secret" not in str(answer)


@pytest.mark.parametrize(
    "data", [[], ["absent", *SETTINGS[1:]], [MODEL, "a", "no number", *SETTINGS[3:]]]
)
def test_no_stack_traces(load: Any, served: tuple[str, Path], data: list[Any]) -> None:
    """Whatever a visitor sends; the next one is answered."""
    address, _ = served
    handler = load.find_handler(address, len(SETTINGS), 1)
    answer = load.ask(address, handler, data, "visitor")
    assert not answer["success"]
    for words in ("Traceback", 'File "', "site-packages", str(Path.cwd())):
        assert words not in str(answer)
    assert load.ask(address, handler, SETTINGS, "visitor")["success"]


def test_uploads_are_limited(served: tuple[str, Path]) -> None:
    address, session = served
    for size, status in ((1 << 10, 200), (1 << 18, 413)):
        files = {"files": ("a.safetensors", bytes(size))}
        answer = httpx.post(f"{address}/gradio_api/upload", files=files)
        assert answer.status_code == status
    kept = [path for path in session.rglob("*.safetensors")]
    assert [path.stat().st_size for path in kept] == [1 << 10]
    answer = httpx.post(f"{address}/gradio_api/upload", files={"files": ("../../x", b"1")})
    assert not (session.parent / "x").exists()
    assert all(Path(name).is_relative_to(session) for name in answer.json())


def test_what_the_docs_say_of_many_visitors_is_the_results_file() -> None:
    root = Path(__file__).parents[2]
    found = json.loads((root / "results" / "app.json").read_text())
    page = (root / "docs" / "app.md").read_text()
    assert f"{found['visitors']} visitors at once are all answered, ten times over" in page
    assert [row["answered"] for row in found["rounds"]] == [found["visitors"]] * 10
    memory = [row["memory_mb"] for row in found["rounds"]]
    assert memory[-1] <= 1.01 * memory[-3]
    assert found["left"] == []
