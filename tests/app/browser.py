"""A browser for the tests of the page: where it is, and what it records."""

from __future__ import annotations

import os
import shutil
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "WHY_NOT", "Visit", "open_browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
_MISSING = [name for name in ("gradio", "playwright") if find_spec(name) is None]
WHY_NOT = f"not installed: {', '.join(_MISSING)}" if _MISSING else ""
if not WHY_NOT and CHROMIUM is None:
    WHY_NOT = "there is no Chromium on the path"
# A busy machine is slow; what is waited for comes much earlier. Screenshots are of real runs.
SECONDS = 1200.0 if os.environ.get("ERTACACHE_SCREENSHOTS") else 30.0


_FILES = """([name, content]) => {
    const files = new DataTransfer();
    const bytes = Uint8Array.from(atob(content), (letter) => letter.charCodeAt(0));
    files.items.add(new File([bytes], name));
    return files;
}"""  # what a dragged file is in a browser


@contextmanager
def open_browser() -> Iterator[Any]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Visit:
    """One page in the browser.

    Attributes:
        page: of Playwright.
        foreign: addresses elsewhere that the page asked for.
        problems: errors of its scripts, and answers that say so.
    """

    page: Any
    foreign: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @classmethod
    def to(cls, browser: Any, address: str, **settings: Any) -> Visit:
        """Open the app and wait until it has made its first prediction."""
        context = browser.new_context(**({"viewport": {"width": 1200, "height": 900}} | settings))
        context.set_default_timeout(1000 * SECONDS)
        visit = cls(context.new_page())
        visit.page.on("request", lambda request: visit._note(request.url, address))
        visit.page.on("pageerror", lambda error: visit.problems.append(str(error)))
        visit.page.goto(address)
        visit.page.wait_for_selector("#prediction b")
        return visit

    def _note(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.foreign.append(url)

    def tab(self, name: str) -> None:
        """Open a tab."""
        self.page.get_by_role("tab", name=name).click()

    def press(self, name: str) -> None:
        """Press a button."""
        self.page.get_by_role("button", name=name, exact=True).click()

    def enter(self, label: str, value: object) -> None:
        """Write into a field."""
        self.page.get_by_label(label, exact=True).fill(str(value))
        self.page.keyboard.press("Tab")

    def drop(self, selector: str, path: Path) -> None:
        """Let a file fall onto a part of the page."""
        content = b64encode(path.read_bytes()).decode()
        files = self.page.evaluate_handle(_FILES, [path.name, content])
        target = self.page.locator(selector)
        for event in ("dragenter", "dragover", "drop"):
            target.dispatch_event(event, {"dataTransfer": files})

    def text(self, selector: str) -> str:
        """What can be read in a part of the page."""
        return str(self.page.locator(selector).inner_text())

    def wait_for(self, selector: str, words: str) -> None:
        """Wait until a part of the page says something."""
        self.page.locator(selector, has_text=words).first.wait_for()

    def message(self) -> str:
        """The error that is shown; it is closed then."""
        toast = self.page.locator(".toast-body.error").first
        toast.wait_for()
        words = str(toast.inner_text())
        toast.locator("button").last.click()
        toast.wait_for(state="detached")
        return words

    def close(self) -> None:
        """Close it."""
        self.page.context.close()
