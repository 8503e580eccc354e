"""The site: it builds without a warning, its links resolve, it needs no server and no network.

The browser is Chromium, opened on the files. Screenshots of the main pages:

    ERTACACHE_SCREENSHOTS=folder pytest tests/docs_site
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
LOCAL = ("file:", "data:", "blob:", "about:")
PAGES = ["index", "start", "serving", "derivation", "faq", "examples"]  # one of every kind
SERIOUS = ("serious", "critical")
SCHEME = "wanted => document.body.getAttribute('data-md-color-scheme') === wanted"
WANTED = {"resolution": "settings", "LoRA": "check", "threshold": "paper"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    known = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=known, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Document(HTMLParser):
    """The links, loaded files and anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        self.loaded += [given["src"]] if "src" in given else []
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(given["href"])


def test_links_resolve_and_nothing_comes_from_elsewhere(site: Path) -> None:
    pages = {path: Document(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 30
    for path, page in pages.items():
        assert not [url for url in page.loaded if urlsplit(url).scheme not in ("", "data")], path
        for url in page.links + page.loaded:
            parts = urlsplit(url)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.is_file(), f"{path.name} links to {url}"
            if parts.fragment and target in pages:
                assert unquote(parts.fragment) in pages[target].anchors, f"{path.name}: {url}"


def test_formulas_need_no_script(site: Path) -> None:
    text = (site / "derivation.html").read_text()
    assert text.count("<math") > 50
    assert "arithmatex" not in text


def test_every_command_is_on_its_page(site: Path) -> None:
    anchors = Document(site / "commands.html").anchors
    assert {"calibrate", "generate", "inspect", "check", "bench", "app"} <= anchors


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Visit:
    """A page of the site in a window of its own, without a network."""

    def __init__(self, browser: Any, page: Path, *, width: int = 1280) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, offline=True)
        self.page = self.context.new_page()
        self.problems: list[str] = []
        self.page.on("request", lambda request: self._requested(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(page.as_uri())
        self.page.wait_for_load_state("load")

    def _requested(self, url: str) -> None:
        if not url.startswith(LOCAL):
            self.problems.append(url)

    def close(self) -> None:
        self.context.close()


def test_search_from_the_file_system(site: Path, browser: Any) -> None:
    visit = Visit(browser, site / "index.html")
    for word, page in WANTED.items():
        visit.page.locator("input[name=query]").fill("")
        visit.page.locator("input[name=query]").press_sequentially(word)
        found = visit.page.locator(f'.md-search-result__link[href*="/{page}.html"]').first
        found.wait_for(state="attached", timeout=30_000)
    visit.page.locator(".md-search-result__link").first.click()
    visit.page.wait_for_url("**/*.html?h=*")
    assert visit.problems == []
    visit.close()


@pytest.mark.parametrize("name", PAGES)
def test_accessible(site: Path, browser: Any, name: str) -> None:
    """No finding of axe that is serious, in light mode and, as to colours, in dark mode."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    visit = Visit(browser, site / f"{name}.html")
    colours = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
    for scheme, rules in (("light", {}), ("dark", colours)):
        visit.page.emulate_media(color_scheme=scheme)
        visit.page.wait_for_function(SCHEME, arg={"light": "default", "dark": "slate"}[scheme])
        visit.page.wait_for_timeout(500)  # colours fade
        _screenshot(visit, f"{name}-{scheme}")
        found = axe.run(visit.page, options={"resultTypes": ["violations"], **rules})
        serious = [x for x in found.response["violations"] if x["impact"] in SERIOUS]
        assert [f"{x['id']}: {x['nodes'][0]['html'][:200]}" for x in serious] == [], scheme
    assert visit.problems == []
    visit.close()


def test_usable_on_a_telephone(site: Path, browser: Any) -> None:
    """Nothing is wider than the screen, and the navigation opens."""
    for name in PAGES:
        visit = Visit(browser, site / f"{name}.html", width=400)
        _screenshot(visit, f"{name}-400px")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= 400, name
        visit.close()
    visit = Visit(browser, site / "start.html", width=400)
    visit.page.locator("label[for=__drawer].md-header__button").click()
    visit.page.get_by_role("link", name="Examples").first.wait_for(state="visible")
    visit.close()


def _screenshot(visit: Visit, name: str) -> None:
    folder = os.environ.get("ERTACACHE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        visit.page.screenshot(path=Path(folder) / f"{name}.png")
