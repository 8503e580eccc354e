"""What a browser may ask of the server: the page, its jobs, uploads, and files of the session.

Gradio has many more routes: it fetches addresses for a visitor, serves cached files of the current
folder, records runs and edits code. Everything that the page does not need is answered with 404,
before Gradio sees it. Pages of other sites can neither read nor start anything, and the browser
may load nothing from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

__all__ = ["Guard"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY = 1 << 20  # bytes of a request that starts a job; uploads have a limit of their own
_API = "/gradio_api/"
_FILE = _API + "file="
_UPLOAD = _API + "upload"
_PAGES = {"/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt"}
_READ = {_API + name for name in ("queue/data", "upload_progress", "startup-events", "theme.css")}
_READ |= {_API + "app_id"}
_FOLDERS = ("/assets/", "/static/", "/svelte/", _API + "heartbeat/")
_WRITE = {_API + name for name in ("queue/join", "cancel", "reset", "run/predict")} | {_UPLOAD}
_LOCAL = {"127.0.0.1", "localhost", "::1"}
_SOURCES = "'self' 'unsafe-inline' 'unsafe-eval' data: blob:"
_HEADERS = [
    (b"content-security-policy", f"default-src {_SOURCES}; frame-ancestors 'none'".encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]


class Guard:
    """ASGI middleware that lets through what the page needs.

    Attributes:
        app: the application behind it.
        folder: the folder of the session; files in it are served.
        host: the address that is listened on; a loopback address is only answered by its names.
    """

    def __init__(self, app: Any, *, folder: Path, host: str) -> None:
        """Guard an application."""
        self.app, self.folder, self.host = app, folder.resolve(), host

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return  # no websockets
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        refused = self._refusal(scope["method"], scope["path"], headers)
        body = None
        if refused is None and scope["method"] == "POST" and scope["path"] != _UPLOAD:
            body = await _read(receive)
            refused = _check_body(body)
        if refused is not None:
            await _answer(send, *refused)
            return
        await self.app(scope, receive if body is None else _replay(body, receive), _adding(send))

    def _refusal(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str] | None:
        """Status and reason if a request is not answered; None if it is."""
        host = headers.get("host", "")
        if self.host in _LOCAL and _name(host) not in _LOCAL:
            return 403, "this address is not served"
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, "requests of other sites are not answered"
        if method == "POST":
            return None if path in _WRITE else (404, "not found")
        if method not in ("GET", "HEAD"):
            return 405, "not allowed"
        if path.startswith(_FILE):
            return None if self._serves(path.removeprefix(_FILE)) else (403, "not served")
        known = path in _PAGES or path in _READ or path.startswith(_FOLDERS)
        return None if known and ".." not in path else (404, "not found")

    def _serves(self, name: str) -> bool:
        """Whether a file is one of the session; links are followed first."""
        try:
            path = Path(name).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            return False
        return Path(name).is_absolute() and path.is_file() and path.is_relative_to(self.folder)


def _name(host: str) -> str:
    """The name in a Host header, without the port.

    Example:
        >>> _name("127.0.0.1:7860"), _name("[::1]:7860"), _name("localhost")
        ('127.0.0.1', '::1', 'localhost')
    """
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _check_body(body: bytes) -> tuple[int, str] | None:
    """Refuse a job that is too long, or that names a file by an address to be fetched."""
    if len(body) > MAX_BODY:
        return 413, "the request is too long"
    try:
        content = json.loads(body or b"null")
    except ValueError:
        return 400, "the request is not JSON"
    for path in _paths(content):
        if "://" in path:
            return 403, "nothing is fetched from other addresses"
    return None


def _paths(content: Any) -> Iterator[str]:
    """Every value that names a file, at any depth.

    Example:
        >>> list(_paths({"data": [{"path": "a"}, {"x": [{"path": "b"}]}]}))
        ['a', 'b']
    """
    waiting = [content]
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, dict):
            if isinstance(value.get("path"), str):
                yield value["path"]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


async def _read(receive: Receive) -> bytes:
    """The body of a request; of one that is too long the beginning."""
    body = b""
    while len(body) <= MAX_BODY:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """Give a body that was read once more; then wait for the end of the connection."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _adding(send: Send) -> Send:
    """Add the headers of the guard to an answer."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *_HEADERS]
        await send(message)

    return sending


async def _answer(send: Send, status: int, text: str) -> None:
    """Answer with one line."""
    kind = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [kind, *_HEADERS]})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})
