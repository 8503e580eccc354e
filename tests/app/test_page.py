"""The app in a real browser: every tab, bad input, other sites, dark mode, a narrow window.

``ERTACACHE_SCREENSHOTS=docs/images pytest tests/app/test_page.py`` also writes the images of
``docs/app.md``, with the settings that the model was trained for.
"""

from __future__ import annotations

import io
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ertacache.app.engine import Engine
from ertacache.app.requests import Limits, Request
from ertacache.formats.policy import Policy
from ertacache.models.zoo import MODELS
from tests.app.browser import WHY_NOT, Visit, open_browser

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)

SCREENSHOTS = os.environ.get("ERTACACHE_SCREENSHOTS")
MODEL, VIDEO, FOLDER_MODEL = "emoji-flux", "emoji-opensora", "mine"
STEPS = 30 if SCREENSHOTS else 6
PROMPTS = "a small pig on a green background at the center\na large crown on a black background"
RESULTS = Path(__file__).parents[2] / "results" / "bench-emoji-flux.json"
LIMITS = Limits(upload=3 << 20)


@dataclass(frozen=True)
class Server:
    """The app under test."""

    address: str
    engine: Engine
    folder: Path
    session: Path


@pytest.fixture(scope="module")
def policy_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy for few steps, made by a quick calibration."""
    asked = Request("calibration", 0, STEPS, *MODELS[MODEL].size)
    path = tmp_path_factory.mktemp("policy") / "quick.safetensors"
    Engine().calibrate(MODEL, PROMPTS, asked, quick=True).policy.save(path)
    return path


@pytest.fixture(scope="module")
def server(policy_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from ertacache.app.server import served

    folder = tmp_path_factory.mktemp("work")
    shutil.copy(policy_file, folder)
    shutil.copytree(MODELS[MODEL].folder, folder / FOLDER_MODEL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    engine = Engine(folder, limits=LIMITS)
    results = {RESULTS.stem: RESULTS}
    with served(engine, results=results, host="127.0.0.1", port=port) as session:
        yield Server(f"http://127.0.0.1:{port}", engine, folder, session)
    assert not session.exists()
    assert "GRADIO_TEMP_DIR" not in os.environ


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as browser:
        yield browser


def arrive(browser: Any, server: Server, **settings: Any) -> Visit:
    """A new visitor, who wants few steps."""
    visit = Visit.to(browser, server.address, **settings)
    visit.enter("Steps", STEPS)
    visit.wait_for("#prediction", f"of {STEPS}")
    return visit


@pytest.fixture(scope="module")
def shared(browser: Any, server: Server) -> Iterator[Visit]:
    """One page for most tests: to load it takes seconds."""
    visit = arrive(browser, server)
    yield visit
    visit.close()


@pytest.fixture
def visit(shared: Visit) -> Iterator[Visit]:
    """The shared page, on its first tab."""
    shared.tab("Generate")
    yield shared
    assert shared.foreign == []
    assert shared.problems == []


def keep(visit: Visit, name: str, height: int = 800) -> None:
    """Write an image of the docs, if they are wanted; in few colours, to be small."""
    if SCREENSHOTS:
        size = visit.page.viewport_size
        visit.page.set_viewport_size(size | {"height": height})
        visit.page.evaluate("scrollTo(0, 0)")
        visit.page.mouse.move(0, 0)
        visit.page.wait_for_timeout(1000)  # for animations to end
        image = Image.open(io.BytesIO(visit.page.screenshot()))
        image.quantize(256).save(Path(SCREENSHOTS) / f"{name}.png", optimize=True)
        visit.page.set_viewport_size(size)


def generate(visit: Visit) -> None:
    """Generate, and wait for a result that is not the one of before."""
    visit.page.evaluate("document.querySelector('#result .erta-cells')?.setAttribute('id', 'old')")
    seed = visit.page.get_by_label("Seed", exact=True)
    visit.enter("Seed", int(seed.input_value() or 0) + 1)
    visit.press("Generate")
    visit.page.wait_for_selector("#result .erta-cells:not(#old)")


def test_generate_and_compare(visit: Visit) -> None:
    """The policy file in the working folder is used without being asked for."""
    assert "a mean over prompts" in visit.text("#prediction")
    generate(visit)
    result = visit.text("#result")
    for name in ("PSNR", "SSIM", "LPIPS", "Full run", "Accelerated", "Faster"):
        assert name in result
    assert f"{STEPS // 2} of {STEPS} steps computed" in result
    assert visit.page.locator("#result .erta-mask rect").count() == STEPS
    sizes = "els => els.map(e => e.naturalWidth)"
    assert visit.page.locator("#result img").evaluate_all(sizes) == [64, 64, 64]
    box = visit.page.locator(".erta-compare").bounding_box()
    cut = "e => getComputedStyle(e).clipPath"
    before = visit.page.locator(".erta-over").evaluate(cut)
    visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 20, steps=4)
    visit.page.mouse.up()
    after = visit.page.locator(".erta-over").evaluate(cut)
    assert before == "inset(0px 0px 0px 50%)"
    assert float(after.split()[-1].rstrip("%)")) == pytest.approx(70, abs=2)
    keep(visit, "app-generate")


def test_the_prediction_follows_the_slider(visit: Visit) -> None:
    slider = visit.page.locator("input[type=range]:visible").first
    seen = []
    for value, computed in ((1.5, STEPS * 2 // 3), (2.0, STEPS // 2), (3.0, STEPS // 3)):
        slider.fill(str(value))
        visit.wait_for("#prediction", f"{computed} of {STEPS}")
        seen.append(float(visit.text("#prediction").split("PSNR ")[1].split()[0]))
    assert seen == sorted(seen, reverse=True)
    slider.fill("1")
    visit.wait_for("#prediction", "identical")


def test_calibrate_and_cancel_then_to_the_end(visit: Visit, server: Server) -> None:
    before = server.engine.policy(MODEL)
    visit.tab("Calibrate")
    visit.press("Calibrate")
    visit.wait_for("#calibrated", "profile - ")
    visit.press("Cancel")
    visit.wait_for(".toast-body", "Cancelled")
    assert server.engine.policy(MODEL) is before
    if not SCREENSHOTS:
        visit.page.locator("#prompts textarea").fill(PROMPTS)
        visit.page.get_by_label("quick: profile only").check()
    visit.press("Calibrate")
    visit.page.wait_for_selector("#calibrated .erta-figure img")
    assert "emoji-flux.safetensors is in the working folder" in visit.text("#calibrated")
    visit.page.locator("#calibrated summary").click()
    assert visit.page.locator("#calibrated tbody tr").count() == STEPS - 1
    with visit.page.expect_download() as download:
        visit.press("Download the policy")
    made = Path(download.value.path()).read_bytes()
    assert made == (server.folder / "emoji-flux.safetensors").read_bytes()
    visit.page.locator("#calibrated summary").click()
    keep(visit, "app-calibrate")


def test_a_model_without_a_policy_is_calibrated_in_one_click(browser: Any, server: Server) -> None:
    """A folder of the working folder; general prompts are filled in."""
    visit = arrive(browser, server)
    choose(visit, FOLDER_MODEL)
    visit.wait_for("#first", "has no policy yet")
    assert not visit.page.get_by_role("button", name="Generate", exact=True).is_visible()
    for name, value in (("Steps", 4), ("Height", 32), ("Width", 32)):
        visit.enter(name, value)
    visit.tab("Calibrate")
    visit.page.locator("#prompts textarea").fill(PROMPTS)
    visit.tab("Generate")
    visit.press("Calibrate quickly and generate")
    visit.page.wait_for_selector("#result .erta-cells")
    visit.page.get_by_role("button", name="Generate", exact=True).wait_for()
    assert not visit.page.locator("#first").is_visible()
    assert (server.folder / f"{FOLDER_MODEL}.safetensors").exists()
    visit.close()


def choose(visit: Visit, model: str) -> None:
    visit.page.get_by_label("Model").click()
    visit.page.get_by_role("option", name=model, exact=True).click()


def test_videos_play_in_step(browser: Any, server: Server) -> None:
    visit = arrive(browser, server)
    choose(visit, VIDEO)
    visit.page.get_by_label("Frames").wait_for()
    visit.enter("Steps", 4)
    visit.tab("Calibrate")
    visit.page.locator("#prompts textarea").fill(PROMPTS)
    visit.tab("Generate")
    visit.press("Calibrate quickly and generate")
    video = visit.page.locator("#result video")
    video.wait_for()
    visit.page.wait_for_function("document.querySelector('#result video').readyState >= 2")
    facts = video.evaluate("v => [v.videoWidth / v.videoHeight, v.duration, v.loop, v.controls]")
    assert facts[0] == pytest.approx(3)  # full run, accelerated run, difference: one clock
    assert facts[1] == pytest.approx(17 / 16, abs=0.01)
    assert facts[2:] == [True, True]
    assert len(list(server.session.glob("*.mp4"))) == 1
    visit.close()


def test_a_policy_file_shows_everything_and_runs_nothing(
    visit: Visit, policy_file: Path, server: Server, tmp_path: Path
) -> None:
    """Also where its strings look like markup or like a template."""
    hostile = "<img src=x onerror=alert(1)> ${6*7} {{value}} {{#each value}}x{{/each}}"
    path = tmp_path / "hostile.safetensors"
    replace(Policy.load(policy_file), provenance={"note": hostile}).save(path)
    visit.tab("Policy")
    visit.drop("#policy-file input[type=file] >> xpath=ancestor::button", path)
    visit.page.wait_for_selector("#policy section")
    shown = visit.text("#policy")
    assert hostile in shown
    for words in ("FluxPipeline", "Frontier", "FlowMatchEulerDiscreteScheduler", "64 x 80"):
        assert words in shown
    assert visit.page.locator("#policy img").count() == 1  # the frontier
    visit.page.locator("#policy summary", has_text="prompts").click()
    assert PROMPTS.split("\n")[0] in visit.text("#policy")
    visit.page.locator("#policy-file").get_by_label("Clear").click()
    if SCREENSHOTS:  # the policy of the calibration before
        path = server.folder / "emoji-flux.safetensors"
        visit.page.locator("#policy-file input[type=file]").set_input_files(path)
        visit.wait_for("#policy", "held-out prompts")
        keep(visit, "app-policy", 1300)
        visit.page.locator("#policy-file").get_by_label("Clear").click()


def test_the_benchmark_has_its_pareto_plot(visit: Visit) -> None:
    visit.tab("Benchmark")
    image = visit.page.locator("#pareto img")
    image.wait_for()
    assert image.evaluate("e => e.decode().then(() => e.naturalWidth)") > 300


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("Prompt", " ", "the prompt is empty: write what to generate"),
        ("Seed", "-1", "seed must be a whole number from 0"),
        ("Steps", "1000", "steps must be a whole number from 2 to 200, got 1000"),
        ("Height", "", "height must be a whole number from 8 to 1024"),
        ("Width", "4096", "width must be a whole number from 8 to 1024, got 4096"),
    ],
)
def test_settings_out_of_range(visit: Visit, field: str, value: str, words: str) -> None:
    before = visit.page.get_by_label(field, exact=True).input_value()
    visit.enter(field, value)
    visit.press("Generate")
    assert words in visit.message()
    visit.enter(field, before)
    generate(visit)


def test_files_that_are_no_policy(visit: Visit, policy_file: Path, tmp_path: Path) -> None:
    """And prompts that are too few; the app works afterwards."""
    whole = policy_file.read_bytes()
    other = replace(Policy.load(policy_file).fingerprint, denoiser="WanTransformer3DModel")
    cases = {
        "text": (b"hello " * 10, "cannot load"),
        "cut": (whole[:-10], "cannot load"),
        "large": (whole + bytes(LIMITS.upload), "maximum allowed size"),
        "other": (b"", "WanTransformer3DModel"),
    }
    visit.tab("Policy")
    drop = visit.page.locator("#policy-file input[type=file]")
    for name, (content, words) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        if name == "other":
            replace(Policy.load(policy_file), fingerprint=other).save(path)
        else:
            path.write_bytes(content)
        drop.set_input_files(path)
        message = visit.message()
        assert words in message, name
        assert str(tmp_path) not in message
        if name != "large":
            visit.page.locator("#policy-file").get_by_label("Clear").click()
    visit.tab("Calibrate")
    visit.page.locator("#prompts textarea").fill("a cat\na cat")
    visit.press("Calibrate")
    assert "at least two different prompts" in visit.message()
    visit.tab("Generate")
    generate(visit)


def test_jobs_wait_in_a_queue_that_can_be_seen(browser: Any, visit: Visit, server: Server) -> None:
    second = arrive(browser, server)
    with server.engine._running():  # a job that takes its time
        visit.press("Generate")
        visit.page.wait_for_selector("#result .progress-text")
        second.press("Generate")
        second.wait_for("#result", "queue: 1/1")
    second.page.wait_for_selector("#result .erta-cells")
    second.close()
    visit.page.wait_for_selector("#result .progress-text", state="detached")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    browser: Any, server: Server, policy_file: Path, scheme: str
) -> None:
    """On every tab, with what it shows when something was done there."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core here")
    visit = arrive(browser, server, color_scheme=scheme)
    fill_tabs(visit, policy_file)
    dark = visit.page.evaluate("document.body.classList.contains('dark')")
    assert dark == (scheme == "dark")
    for width, tab in product((1200, 400), ("Generate", "Calibrate", "Policy", "Benchmark")):
        visit.page.set_viewport_size({"width": width, "height": 900})
        visit.tab(tab)
        if (width, tab, scheme) == (1200, "Generate", "dark"):
            keep(visit, "app-dark")
        if (width, tab, scheme) == (400, "Generate", "light"):
            keep(visit, "app-400px", 1500)
        visit.page.wait_for_timeout(300)  # for the colours of the tab to settle
        found = axe.Axe().run(visit.page).response["violations"]
        serious = [
            (each["id"], [(node["html"][:200], node["failureSummary"]) for node in each["nodes"]])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], (tab, scheme, width)
        wide = visit.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= width, f"{tab} is {wide} pixels wide"
    visit.close()


def fill_tabs(visit: Visit, policy_file: Path) -> None:
    """Generate, calibrate and open a policy, and unfold what is folded."""
    generate(visit)
    visit.tab("Calibrate")
    visit.page.locator("#prompts textarea").fill(PROMPTS)
    visit.page.get_by_label("quick: profile only").check()
    visit.press("Calibrate")
    visit.page.wait_for_selector("#calibrated .erta-figure img")
    visit.page.locator("#calibrated summary").click()
    visit.tab("Policy")
    visit.page.locator("#policy-file input[type=file]").set_input_files(policy_file)
    visit.page.wait_for_selector("#policy section")
    for summary in visit.page.locator("#policy summary").all():
        summary.click()
