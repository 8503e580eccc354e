"""A server that speaks the part of the hub's API that policies need, for tests without a network.

Repositories are kept in memory: accounts by token, commits with their files, branches and tags.
Files are uploaded as the hub wants them: small text with the commit, all else through LFS. Every
request is kept, so that a test can look at what was sent.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

TOKEN = "hf_aSecretThatMustNotAppearAnywhere"
READ_ONLY = "hf_aTokenThatMayOnlyRead"
ACCOUNTS = {TOKEN: "ada", READ_ONLY: "bob"}
MEMBERS = {"ada": ["ada", "lovelace"], "bob": ["bob"]}  # what accounts may write to


@dataclass
class Repo:
    """One repository: its commits from oldest to newest, and what branches and tags point to."""

    owner: str
    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        before = self.commits.get(self.refs.get(branch, ""), {})
        oid = sha1(repr((len(self.commits), sorted(files))).encode()).hexdigest()
        self.commits[oid], self.refs[branch] = before | files, oid
        return oid


class Hub(ThreadingHTTPServer):
    """The server.

    Attributes:
        repos: all repositories by name.
        objects: what was uploaded through LFS, by its SHA-256.
        requests: method and path of every request, in order.
        cuts: so many downloads break off in the middle.
        failing: status of every answer, to be a hub in trouble; 0 if it is not.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.cuts = 0
        self.failing = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def add(self, name: str, files: dict[str, bytes], *, private: bool = False) -> str:
        repo = self.repos.setdefault(name, Repo(name.split("/")[0], private))
        return repo.commit(files)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error."""


class Handler(BaseHTTPRequestHandler):
    """One request; paths are matched by the methods at the end."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Keep tests quiet."""

    def answer(
        self, status: int, body: object = None, *, error: str = "", headers: Any = None
    ) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if error:
            self.send_header("X-Error-Code", error)
            self.send_header("X-Error-Message", error)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    @property
    def account(self) -> str | None:
        return ACCOUNTS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))

    def handle_request(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        if self.server.failing:
            return self.answer(self.server.failing)
        path = self.path.partition("?")[0]
        for method, pattern, name in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method in (self.command, "*"):
                return getattr(self, name)(*found.groups())
        return self.answer(404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request  # noqa: N815

    def find(self, name: str, *, write: bool = False) -> Repo | None:
        """The repository, if there is one and the account may use it so; else the answer is out."""
        repo = self.server.repos.get(name)
        names = MEMBERS.get(self.account or "", [])
        hidden = repo is not None and repo.private and repo.owner not in names
        if repo is None or hidden:
            # As the hub does: without a valid token nobody learns what exists.
            self.answer(404 if self.account else 401, error="RepoNotFound")
            return None
        if write and repo.owner not in names:
            self.answer(403, {"error": "You may not write here"})
            return None
        return repo

    def whoami(self) -> None:
        if self.account is None:
            return self.answer(401, {"error": "Invalid credentials"})
        orgs = [{"name": name} for name in MEMBERS[self.account][1:]]
        return self.answer(200, {"name": self.account, "orgs": orgs, "type": "user"})

    def validate_yaml(self) -> None:
        content = json.loads(self.body)["content"]
        ok = content.startswith("---\n") and "\n---\n" in content
        self.answer(200, {"errors": [] if ok else [{"message": "no front matter"}], "warnings": []})

    def create(self) -> None:
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or self.account
        name = f"{owner}/{wanted['name']}"
        if owner not in MEMBERS.get(self.account or "", []):
            return self.answer(403, {"error": "You may not create a repository here"})
        if name in self.server.repos:
            return self.answer(409, {"url": f"{self.server.url}/{name}"})
        private = wanted.get("visibility") == "private" or wanted.get("private") is True
        self.server.repos[name] = repo = Repo(str(owner), private)
        repo.commit({".gitattributes": b""})
        return self.answer(200, {"url": f"{self.server.url}/{name}", "name": name})

    def preupload(self, name: str, revision: str) -> None:
        repo = self.find(name, write=True)
        if repo is None:
            return None
        if revision not in repo.refs:
            return self.answer(404, error="RevisionNotFound")
        known, files = repo.commits[repo.refs[revision]], []
        for entry in json.loads(self.body)["files"]:
            mode = "regular" if entry["path"].endswith(".md") else "lfs"
            found = {"path": entry["path"], "uploadMode": mode, "shouldIgnore": False}
            if entry["path"] in known:  # so that what has not changed is not sent
                found["oid"] = _oid(known[entry["path"]], mode)
            files.append(found)
        return self.answer(200, {"files": files})

    def lfs_batch(self, name: str) -> None:
        if self.find(name, write=True) is None:
            return None
        objects = []
        for entry in json.loads(self.body)["objects"]:
            upload = {"href": f"{self.server.url}/objects/{entry['oid']}"}
            objects.append(entry | {"actions": {"upload": upload}})
        return self.answer(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str) -> None:
        if sha256(self.body).hexdigest() != oid:
            return self.answer(400)
        self.server.objects[oid] = self.body
        return self.answer(200)

    def commit(self, name: str, revision: str) -> None:
        repo = self.find(name, write=True)
        if repo is None:
            return None
        files: dict[str, bytes] = {}
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.server.objects[value["oid"]]
        oid = repo.commit(files, revision)
        url = f"{self.server.url}/{name}/commit/{oid}"
        return self.answer(200, {"success": True, "commitOid": oid, "commitUrl": url})

    def info(self, name: str, revision: str = "main") -> None:
        repo = self.find(name)
        if repo is not None:
            oid = repo.refs.get(revision, revision)
            self.answer(200, {"id": name, "sha": oid, "private": repo.private})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repo = self.find(name)
        if repo is None:
            return None
        oid = repo.refs.get(revision, revision)
        if oid not in repo.commits:
            return self.answer(404, error="RevisionNotFound")
        headers = {"X-Repo-Commit": oid}
        if path not in repo.commits[oid]:
            return self.answer(404, error="EntryNotFound", headers=headers)
        data = repo.commits[oid][path]
        headers |= {"ETag": f'"{sha256(data).hexdigest()}"', "Accept-Ranges": "bytes"}
        if self.command == "GET":
            return self.send_file(data, headers)
        return self.answer(200, data, headers=headers)

    def send_file(self, data: bytes, headers: dict[str, str]) -> None:
        """A file or the end of it; one of ``cuts`` is closed in the middle."""
        begin = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(begin[1]) if begin else 0
        if begin:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if not self.server.cuts:
            return self.answer(206 if begin else 200, data[start:], headers=headers)
        self.server.cuts -= 1
        self.send_response(206 if begin else 200)
        for name, value in (headers | {"Content-Length": str(len(data) - start)}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data[start : start + (len(data) - start) // 2])
        self.wfile.flush()
        self.close_connection = True
        return None


def _oid(data: bytes, mode: str) -> str:
    """What a file is called: in git by its blob, in LFS by its content."""
    if mode == "lfs":
        return sha256(data).hexdigest()
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


_REPO = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/validate-yaml", "validate_yaml"),
    ("POST", "/api/repos/create", "create"),
    ("POST", rf"/api/models/{_REPO}/preupload/([^/]+)", "preupload"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/objects/(\w+)", "store"),
    ("POST", rf"/api/models/{_REPO}/commit/([^/]+)", "commit"),
    ("GET", rf"/api/models/{_REPO}/revision/([^/]+)", "info"),
    ("GET", rf"/api/models/{_REPO}", "info"),
    ("*", rf"/{_REPO}/resolve/([^/]+)/(.+)", "resolve"),
)


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub that runs in a thread of its own."""
    hub = Hub()
    thread = Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, empty, to which this process speaks with the token of ada; no cache, no waiting."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http as transport

    with serve() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        for module in (file_download, transport):
            monkeypatch.setattr(module, "time", _NoWaiting())
        yield server


class _NoWaiting:
    """The module ``time``, as if waiting took none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def sleep(self, seconds: float) -> None: ...
