"""What the guard lets through, without a server behind it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from ertacache.app.guard import MAX_BODY, Guard

HERE = {"host": "127.0.0.1:7860"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A session's folder with a file, beside a secret and links to it."""
    session = tmp_path / "session"
    session.mkdir()
    (session / "shown.mp4").write_text("shown")
    (tmp_path / "secret").write_text("secret")
    (session / "link").symlink_to(tmp_path / "secret")
    (session / "up").symlink_to(tmp_path)
    return session


def ask(
    folder: Path,
    path: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    *,
    host: str = "127.0.0.1",
) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers of the answer; the application behind says what it was given."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        content = (await receive()).get("body", b"")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"app:" + content})

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    given = HERE if headers is None else headers
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    asyncio.run(Guard(app, folder=folder, host=host)(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], sent[1]["body"], found


def test_the_page_and_its_files(folder: Path) -> None:
    for path in ("/", "/config", "/assets/a.js", f"/gradio_api/file={folder}/shown.mp4"):
        assert ask(folder, path)[0] == 200, path


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "etc/passwd",
        "{session}/../secret",
        "{session}/link",
        "{session}/up/secret",
        "{session}",
        "{session}/absent",
        "{session}/shown.mp4\x00",
        "shown.mp4",
        "http://127.0.0.1:1/",
        "file:///etc/passwd",
    ],
)
def test_files_elsewhere_are_not_served(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    status, body, _ = ask(folder, "/gradio_api/file=" + name.format(session=folder))
    assert (status, body) == (403, b"not served\n")


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/proxy=http://localhost/",
        "/gradio_api/runs",
        "/gradio_api/run-history/buckets",
        "/gradio_api/vibe-code",
        "/gradio_api/file/etc/passwd",
        "/gradio_api/openapi.json",
        "/monitoring",
        "/docs",
        "/assets/../../etc/passwd",
    ],
)
def test_routes_that_the_page_does_not_need(folder: Path, path: str) -> None:
    assert ask(folder, path)[0] == 404
    assert ask(folder, path, "POST")[0] == 404
    assert ask(folder, path, "DELETE")[0] == 405


def test_other_sites_and_other_names_are_refused(folder: Path) -> None:
    assert ask(folder, "/", headers={"host": "evil.example:7860"})[0] == 403
    assert ask(folder, "/", headers={})[0] == 403
    assert ask(folder, "/", headers={"host": "[::1]:7860"})[0] == 200
    foreign = HERE | {"origin": "http://evil.example"}
    own = HERE | {"origin": "http://127.0.0.1:7860"}
    for headers, status in ((foreign, 403), (own, 200)):
        assert ask(folder, "/gradio_api/queue/join", "POST", headers, b"{}")[0] == status
    # Another address was asked for: then every name of the machine is answered.
    assert ask(folder, "/", headers={"host": "box.local:7860"}, host="0.0.0.0")[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (json.dumps({"data": ["a cat", {"path": "/tmp/x"}]}).encode(), 200),
        (json.dumps({"data": [{"path": "http://10.0.0.1/"}]}).encode(), 403),
        (json.dumps({"data": [[{"a": {"path": "file:///etc/passwd"}}]]}).encode(), 403),
        (b"not json", 400),
        (b"[" + b"1," * MAX_BODY, 413),
    ],
)
def test_jobs_are_read_before_they_are_passed_on(folder: Path, body: bytes, status: int) -> None:
    found, answer, _ = ask(folder, "/gradio_api/queue/join", "POST", body=body)
    assert found == status
    assert (answer == b"app:" + body) == (status == 200)


def test_the_browser_loads_nothing_from_elsewhere(folder: Path) -> None:
    for path in ("/", "/absent"):
        policy = ask(folder, path)[2]["content-security-policy"]
        assert "http" not in policy
        assert "default-src 'self'" in policy
