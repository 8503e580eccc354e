"""The page in a real browser: sort, hover, drag, hostile names, no script, dark, narrow, print."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ertacache.bench.results import BenchRow, Interval, write_results
from ertacache.bench.samples import Samples
from ertacache.metrics.image import to_image
from ertacache.report.page import make_page

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is missing")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

EVIL = "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'>"
MODEL = "<b>m</b>"


def row(method: str, budget: float, psnr: float, *, cached: int) -> BenchRow:
    close = Interval(psnr, psnr - 1, psnr + 1)
    return BenchRow(
        MODEL,
        method,
        budget,
        30,
        flops_ratio=1 / budget,
        seconds=1.0,
        speedup=Interval(budget, budget, budget),
        cached_bytes=cached,
        psnr=close,
        psnr_tenth=psnr - 5,
        setting=EVIL,
    )


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a benchmark of videos, and of a folder of images."""
    folder = tmp_path_factory.mktemp("report")
    rows = [
        replace(row("full", 1.0, 100.0, cached=0), speedup=None),
        *(row("trajectory", budget, 70 - 10 * budget, cached=3000) for budget in (2.0, 3.0)),
        *(row("TeaCache", budget, 50 - 5 * budget, cached=9000) for budget in (2.0, 3.0)),
        *(row("fewer steps", budget, 45 - 5 * budget, cached=0) for budget in (2.0, 3.0)),
        BenchRow(MODEL, EVIL, 2.0, 30, why_not=EVIL),
    ]
    write_results(folder / "bench.json", {"model": MODEL, "command": EVIL}, rows)
    samples = Samples(folder / "bench.samples.safetensors")
    for place, (method, budget) in enumerate(
        [("full", 1.0), ("trajectory", 2.0), ("TeaCache", 2.0)]
    ):
        samples.add(method, budget, torch.full((2, 4, 3, 16, 16), place / 2))
    samples.save([EVIL, "a cat"])
    out = folder / "out"
    out.mkdir()
    for name, value in (("cat", 1.0), ("cat-full", 0.0)):
        to_image(torch.full((3, 120, 120), value)).save(out / f"{name}.png")
    path = folder / "page.html"
    path.write_text(make_page([folder / "bench.json", out]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def show(browser: Any, page_file: Path) -> Iterator[Any]:
    """Opens the page with the options of a context; nothing may be loaded, nothing may fail."""
    contexts, wrong = [], []

    def open_page(**options: Any) -> Any:
        context = browser.new_context(viewport={"width": 1100, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("request", lambda sent: sent.url.startswith("http") and wrong.append(sent.url))
        page.goto(page_file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def methods(table: Any) -> list[str]:
    found: list[str] = table.locator("tbody th").all_text_contents()
    return found


def test_sort_a_column(show: Any) -> None:
    table = show().locator(".sortable").nth(1)  # at 2x
    assert methods(table) == ["trajectory", "TeaCache", "fewer steps"]
    head = table.locator("th", has_text="cached")
    head.locator("button").click()
    assert methods(table) == ["TeaCache", "trajectory", "fewer steps"]
    assert head.get_attribute("aria-sort") == "descending"
    head.locator("button").press("Enter")
    assert methods(table) == ["fewer steps", "trajectory", "TeaCache"]
    assert head.get_attribute("aria-sort") == "ascending"
    assert table.locator("[aria-sort]").count() == 1
    table.get_by_role("button", name="method").click()
    assert methods(table) == ["fewer steps", "TeaCache", "trajectory"]


def test_hover_a_point(show: Any) -> None:
    page = show()
    tip, plot = page.locator("#tip"), page.locator("svg.pareto")
    assert not tip.is_visible()
    point = plot.locator("[data-method=TeaCache] .point").first
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    assert "PSNR 40.0 dB (39.0 to 41.0)" in tip.inner_text()
    assert tip.inner_text().startswith(f"TeaCache, {EVIL}")
    lit = plot.locator(".lit").evaluate_all("all => all.map(each => each.dataset.method)")
    assert set(lit) == {"TeaCache"}
    page.mouse.move(2, 2)
    assert not tip.is_visible()
    assert plot.locator(".lit").count() == 0


def shade(film: Any, share: float) -> int:
    """Red of the pixel at a share of the width, in the middle."""
    import io

    from PIL import Image

    image = Image.open(io.BytesIO(film.screenshot())).convert("RGB")
    found = image.getpixel((int(share * image.width), image.height // 2))
    assert isinstance(found, tuple)
    return found[0]


def test_drag_a_divider(show: Any) -> None:
    page = show()
    film = page.locator(".pair .film[data-full]")
    assert (shade(film, 0.25), shade(film, 0.75)) == (0, 255)  # left the full run, which is black
    box = film.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    assert (shade(film, 0.75), shade(film, 0.97)) == (0, 255)
    slider = film.locator("xpath=ancestor::section").get_by_role("slider")
    assert float(slider.input_value()) == pytest.approx(90, abs=1)
    slider.focus()
    slider.press("Home")
    assert shade(film, 0.05) == 255


def test_videos_play_in_step_and_pause(show: Any) -> None:
    page = show()
    section = page.locator(".compare").first
    section.get_by_role("button", name="Pause").wait_for()
    starts = section.evaluate(
        "s => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done("
        "s.getAnimations({subtree: true}).map(a => a.startTime)))))"
    )
    assert len(starts) == 2 + 2 * 2 * 2  # two full runs; two methods of two, each over a full run
    assert set(starts) == {0}
    section.get_by_role("button", name="Pause").click()
    states = section.evaluate("s => s.getAnimations({subtree: true}).map(a => a.playState)")
    assert set(states) == {"paused"}
    section.get_by_role("button", name="Play").click()
    states = section.evaluate("s => s.getAnimations({subtree: true}).map(a => a.playState)")
    assert set(states) == {"running"}


def test_names_and_prompts_are_text(show: Any) -> None:
    page = show()
    assert page.evaluate("window.broken") is None
    assert page.locator("th", has_text=EVIL).count() == 1  # a prompt
    assert page.locator("h2", has_text=MODEL).count() == 1
    assert page.locator("script").count() == 1


def test_without_a_script_it_can_be_read(show: Any) -> None:
    page = show(java_script_enabled=False)
    assert page.get_by_role("row", name="trajectory").first.is_visible()
    assert page.locator(".pair .film").first.is_visible()
    assert page.locator(".point title").first.text_content().startswith("trajectory")


@pytest.mark.parametrize(("scheme", "width"), [("light", 1100), ("dark", 400)])
def test_without_serious_findings_of_axe(
    browser: Any, page_file: Path, scheme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is missing")
    context = browser.new_context(color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(page_file.as_uri())
    found = axe.Axe().run(page).response["violations"]
    context.close()
    serious = [each["id"] for each in found if each["impact"] in ("serious", "critical")]
    assert serious == []


def test_dark_and_print(show: Any) -> None:
    page = show(color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(21, 24, 29)"
    page.emulate_media(media="print")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert not page.locator(".controls").first.is_visible()


def test_a_narrow_screen_scrolls_tables_and_not_the_page(show: Any) -> None:
    page = show()
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 400
    assert page.locator(".scroll").nth(1).evaluate("s => s.scrollWidth > s.clientWidth")
