"""Draw the example workflows in ComfyUI's own front end: JSON files and screenshots.

The workflows are built in a browser, so that the files are what the front end itself saves; each is
run there before its picture is taken. Needs Playwright's Python package and a Chromium.

    python -m tests.comfyui.live.pictures --chromium /usr/bin/chromium
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from ertacache.models import load_prompts
from tests.comfyui.live.environment import ROOT
from tests.comfyui.live.server import Server, start_server

PACK = ROOT / "comfyui"
NAME = "emoji-flux"
POLICY = f"{NAME}.safetensors"
CALIBRATION = 6
MINUTES = 30

Node = tuple[str, tuple[int, int], tuple[int, int] | None, dict[str, Any]]
"""Type, position, size and widgets; the size of None is the front end's."""

LOADER: Node = ("ERTACacheDemoModel", (0, 60), (230, 90), {})
PROMPT = load_prompts(NAME, "heldout")[3]
POSITIVE: Node = ("CLIPTextEncode", (280, 60), (320, 110), {"text": PROMPT})
NEGATIVE: Node = ("CLIPTextEncode", (280, 230), (320, 90), {"text": ""})
SIZE = {"width": 64, "height": 64, "batch_size": 1}
SCHEDULE = {"scheduler": "simple", "steps": 30, "denoise": 1.0}
LARGER = {"upscale_method": "nearest-exact", "scale_by": 5.0}
CHOICE = {"policy": POLICY, "speedup": 2.0}

CALIBRATE: dict[str, Any] = {
    "nodes": {
        "model": LOADER,
        "prompts": (
            "ERTACachePrompts",
            (280, 60),
            (420, 190),
            {"prompts": "\n".join(load_prompts(NAME, "calibration")[:CALIBRATION])},
        ),
        "negative": ("CLIPTextEncode", (280, 310), (420, 90), {"text": ""}),
        "sampler": ("KSamplerSelect", (280, 460), (200, 60), {"sampler_name": "euler"}),
        "sigmas": ("BasicScheduler", (280, 580), (200, 110), SCHEDULE),
        "size": ("EmptyLatentImage", (500, 460), (200, 110), SIZE),
        "calibrate": (
            "ERTACacheCalibrate",
            (760, 60),
            (360, 330),
            {"cfg": 2.0, "seed": 0, "speedups": "2, 3", "name": NAME, "overwrite": False},
        ),
        "info": ("ERTACacheInfo", (1180, 60), (620, 520), {}),
    },
    "links": [
        ("model", 1, "prompts", "clip"),
        ("model", 1, "negative", "clip"),
        ("model", 0, "sigmas", "model"),
        ("model", 0, "calibrate", "model"),
        ("model", 2, "calibrate", "vae"),
        ("prompts", 0, "calibrate", "positive"),
        ("negative", 0, "calibrate", "negative"),
        ("sampler", 0, "calibrate", "sampler"),
        ("sigmas", 0, "calibrate", "sigmas"),
        ("size", 0, "calibrate", "latent_image"),
        ("calibrate", 0, "info", "policy"),
    ],
}

GENERATE: dict[str, Any] = {
    "nodes": {
        "model": LOADER,
        "positive": POSITIVE,
        "negative": NEGATIVE,
        "sigmas": ("BasicScheduler", (0, 390), (230, 110), SCHEDULE),
        "size": ("EmptyLatentImage", (0, 560), (230, 110), SIZE),
        "noise": ("RandomNoise", (280, 390), (320, 90), {"noise_seed": 7}),
        "guider": ("CFGGuider", (650, 60), (300, 130), {"cfg": 2.0}),
        "euler": ("KSamplerSelect", (650, 250), (300, 60), {"sampler_name": "euler"}),
        "ours": ("ERTACacheSampler", (650, 490), (300, 100), CHOICE),
        "full": ("SamplerCustomAdvanced", (1010, 60), (240, 130), {}),
        "fast": ("SamplerCustomAdvanced", (1010, 490), (240, 130), {}),
        "decode full": ("VAEDecode", (1010, 240), (240, 50), {}),
        "decode fast": ("VAEDecode", (1010, 670), (240, 50), {}),
        "scale full": ("ImageScaleBy", (1010, 340), (240, 0), LARGER),
        "scale fast": ("ImageScaleBy", (1010, 770), (240, 0), LARGER),
        "image full": ("PreviewImage", (1310, 60), (330, 330), {}),
        "image fast": ("PreviewImage", (1310, 490), (330, 330), {}),
    },
    "titles": {"image full": "full run: 30 of 30 steps", "image fast": "ERTACache: 15 of 30"},
    "links": [
        ("model", 1, "positive", "clip"),
        ("model", 1, "negative", "clip"),
        ("model", 0, "guider", "model"),
        ("model", 0, "sigmas", "model"),
        ("positive", 0, "guider", "positive"),
        ("negative", 0, "guider", "negative"),
        ("euler", 0, "full", "sampler"),
        ("ours", 0, "fast", "sampler"),
        *(
            (source, 0, target, name)
            for target in ("full", "fast")
            for source, name in (
                ("noise", "noise"),
                ("guider", "guider"),
                ("sigmas", "sigmas"),
                ("size", "latent_image"),
            )
        ),
        *(
            link
            for name in ("full", "fast")
            for link in (
                (name, 0, f"decode {name}", "samples"),
                ("model", 2, f"decode {name}", "vae"),
                (f"decode {name}", 0, f"scale {name}", "image"),
                (f"scale {name}", 0, f"image {name}", "images"),
            )
        ),
    ],
}

KSAMPLER: dict[str, Any] = {
    "nodes": {
        "model": LOADER,
        "positive": POSITIVE,
        "negative": NEGATIVE,
        "ours": ("ERTACacheModel", (280, 390), (320, 120), CHOICE),
        "size": ("EmptyLatentImage", (280, 570), (320, 110), SIZE),
        "sampler": (
            "KSampler",
            (660, 60),
            (300, 280),
            {"seed": 7, "steps": 30, "cfg": 2.0, "sampler_name": "euler", "scheduler": "simple"},
        ),
        "decode": ("VAEDecode", (1010, 60), (200, 60), {}),
        "scale": ("ImageScaleBy", (1010, 170), (200, 0), LARGER),
        "image": ("PreviewImage", (1270, 60), (350, 360), {}),
    },
    "links": [
        ("model", 1, "positive", "clip"),
        ("model", 1, "negative", "clip"),
        ("model", 0, "ours", "model"),
        ("ours", 0, "sampler", "model"),
        ("positive", 0, "sampler", "positive"),
        ("negative", 0, "sampler", "negative"),
        ("size", 0, "sampler", "latent_image"),
        ("sampler", 0, "decode", "samples"),
        ("model", 2, "decode", "vae"),
        ("decode", 0, "scale", "image"),
        ("scale", 0, "image", "images"),
    ],
}

WORKFLOWS = {"1-calibrate": CALIBRATE, "2-generate": GENERATE, "3-ksampler": KSAMPLER}

BUILD = """
(spec) => {
  const graph = window.app.graph;
  graph.clear();
  const nodes = {};
  for (const [key, [type, position, size, widgets]] of Object.entries(spec.nodes)) {
    const node = window.LiteGraph.createNode(type);
    graph.add(node);
    node.pos = position;
    for (const [name, value] of Object.entries(widgets)) {
      const widget = node.widgets.find((each) => each.name === name);
      widget.value = value;
    }
    const control = (node.widgets || []).find((each) => each.name === "control_after_generate");
    if (control) control.value = "fixed";
    if (size) node.setSize(size);
    if (type.startsWith("ERTACache")) [node.color, node.bgcolor] = ["#1f5f3f", "#2a7a52"];
    if (spec.titles && spec.titles[key]) node.title = spec.titles[key];
    nodes[key] = node;
  }
  for (const [from, output, to, name] of spec.links) {
    const place = nodes[to].inputs.findIndex((input) => input.name === name);
    nodes[from].connect(output, nodes[to], place);
  }
  graph.setDirtyCanvas(true, true);
}
"""
SAVE = "() => JSON.stringify(window.app.graph.serialize(), null, 1)"


def draw(page: Any, server: Server, name: str, *, run: bool) -> None:
    """Build a workflow, save it, run it, and take its picture."""
    page.goto(server.url)  # afresh, so that drop-downs list what there is now
    page.wait_for_function("() => window.app?.graph && window.LiteGraph", timeout=120_000)
    page.wait_for_timeout(5000)
    page.evaluate(BUILD, WORKFLOWS[name])
    page.wait_for_timeout(1000)
    text = page.evaluate(SAVE)
    (PACK / "example_workflows" / f"{name}.json").write_text(text + "\n")
    if run:
        page.evaluate("() => window.app.queuePrompt(0, 1)")
        wait(page, server)
    page.mouse.click(900, 860)
    page.keyboard.press(".")  # fit the view
    page.wait_for_timeout(2500)
    page.screenshot(path=PACK / "images" / f"{name}.png", timeout=300_000)


def wait(page: Any, server: Server) -> None:
    """Until the server has nothing left to do."""
    page.wait_for_timeout(2000)
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        queue = server.get("/queue")
        if not queue["queue_running"] and not queue["queue_pending"]:
            return
        page.wait_for_timeout(500)
    raise TimeoutError("the workflow did not end")


def main() -> None:
    """Draw every workflow."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--chromium", default=None, help="the browser; Playwright's own if left out"
    )
    parser.add_argument("--policy", type=Path, help="do not calibrate: use this policy")
    chosen = parser.parse_args()
    place = Path(tempfile.mkdtemp())
    try:
        with (
            start_server(place / "base", options=("--preview-method", "none")) as server,
            sync_playwright() as playwright,
        ):
            server.post(
                "/settings", {"Comfy.TutorialCompleted": True, "Comfy.Minimap.Visible": False}
            )
            if chosen.policy is not None:
                shutil.copy(chosen.policy, server.base / "models" / "ertacache" / POLICY)
            browser = playwright.chromium.launch(
                executable_path=chosen.chromium, args=["--no-sandbox"]
            )
            page = browser.new_page(viewport={"width": 1600, "height": 900})
            for name in WORKFLOWS:
                run = chosen.policy is None or name != "1-calibrate"
                draw(page, server, name, run=run)
            browser.close()
    finally:
        shutil.rmtree(place)


if __name__ == "__main__":
    main()
