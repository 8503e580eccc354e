"""The page of the app, with Gradio: what is entered goes to the engine, what it returns is shown.

Jobs share one queue and run one at a time. A failure is one line in the browser; what was not
expected is logged in the terminal with its traceback, and never sent.
"""

from __future__ import annotations

import functools
import tempfile
import traceback
import uuid
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from ertacache.app.contents import frontier_html, policy_html
from ertacache.app.engine import Engine
from ertacache.app.outcomes import Cancelled
from ertacache.app.requests import Request, describe_failure
from ertacache.app.views import (
    prediction_html,
    result_html,
    show_figure,
    show_notes,
    write_video,
)
from ertacache.bench.results import read_results
from ertacache.report.plots import pareto

__all__ = ["STYLE", "THEME", "build_page"]

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
THEME = gr.themes.Default(
    primary_hue=gr.themes.colors.blue,
    neutral_hue=gr.themes.colors.slate,
    font=["system-ui", "sans-serif"],
    font_mono=["ui-monospace", "monospace"],
).set(
    button_primary_background_fill="*primary_700",
    button_primary_background_fill_hover="*primary_800",
    button_primary_background_fill_dark="*primary_700",
    block_label_text_color="*neutral_700",
    block_title_text_color="*neutral_700",
    block_info_text_color="*neutral_600",
    body_text_color_subdued="*neutral_600",
)
MAX_QUEUE = 64  # jobs that wait
SPEEDUPS = (1.0, 10.0)  # ends of the slider
PROMPTS = 8  # of a bundled model that are filled in
KEPT_VIDEOS = 16
DEPTHS = ("quick: profile only", "full: with trials, refit and held-out prompts")
HEAD = (
    "<h1>ertacache</h1><p>Compute some steps, predict the others: the same image or video with "
    "fewer network evaluations.</p>"
)
EMPTY = '<div class="erta-empty">{}</div>'
NOTHING = EMPTY.format("The full and the accelerated result appear here.")
FIRST = (
    "<p><b>This model has no policy yet.</b> A policy is made once: a quick calibration profiles a "
    "few full runs and solves every speed-up from them. The tab <i>Calibrate</i> makes a better "
    "one, the tab <i>Policy</i> opens a file.</p>"
)
_JOB: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "job"}
_HIDDEN: dict[str, Any] = {"api_visibility": "private"}


def _readable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The handler with its failures as one line."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Cancelled:
            return gr.skip()
        except (ValueError, OSError, MemoryError) as cause:
            raise _shown(cause) from None
        except Exception as cause:
            traceback.print_exc()  # in the terminal
            raise _shown(cause) from None

    return run


def _shown(cause: BaseException) -> gr.Error:
    text = describe_failure(cause, tempfile.gettempdir(), Path.cwd(), Path.home())
    return gr.Error(text, duration=None, print_exception=False)


class _Page:
    """The handlers of the page; each takes the values of its inputs."""

    def __init__(self, engine: Engine, results: dict[str, Path], folder: Path) -> None:
        self.engine, self.results, self.folder = engine, results, folder

    def choose(self, model: str) -> list[Any]:
        """The settings of a model, and prompts to calibrate it with."""
        asked = self.engine.default_request(model)
        values = [asked.prompt, asked.seed, asked.steps, asked.height, asked.width]
        frames = gr.update(value=asked.frames, visible=asked.frames is not None)
        return [*values, frames, self.engine.calibration_prompts(model, PROMPTS)]

    def predict(self, model: str, _prompt: str, *values: Any) -> list[Any]:
        """What the slider says; the first calibration is offered, or the button to generate.

        A number that is still being written is no error to interrupt for.
        """
        try:
            found = self.engine.predict(model, Request("any prompt", *values))
        except ValueError as cause:
            return [f"<p>{escape(describe_failure(cause))}</p>", gr.skip(), gr.skip()]
        shown = (gr.update(visible=visible) for visible in (not found.ready, found.ready))
        return [prediction_html(found), *shown]

    def generate(
        self,
        request: gr.Request,
        progress: Any = gr.Progress(),  # noqa: B008  Gradio finds it so
        model: str = "",
        *values: Any,
    ) -> str:
        """Both results and what was measured."""
        owner, report = request.session_hash, functools.partial(_show_progress, progress)
        made = self.engine.generate(model, Request(*values), report, owner=owner)
        return result_html(made, None if made.full.ndim == 3 else self._write(made))

    def begin(
        self,
        request: gr.Request,
        progress: Any = gr.Progress(),  # noqa: B008
        model: str = "",
        prompts: str = "",
        *values: Any,
    ) -> str:
        """For a model without a policy: a quick calibration, then both results."""
        owner, report = request.session_hash, functools.partial(_show_progress, progress)
        self.engine.calibrate(model, prompts, Request(*values), report, quick=True, owner=owner)
        return self.generate(request, progress, model, *values)

    def calibrate(
        self,
        request: gr.Request,
        progress: Any = gr.Progress(),  # noqa: B008
        model: str = "",
        prompts: str = "",
        depth: str = "",
        *values: Any,
    ) -> list[Any]:
        """A policy for a model: its frontier, and the file to keep."""
        owner, report = request.session_hash, functools.partial(_show_progress, progress)
        made = self.engine.calibrate(
            model, prompts, Request(*values), report, quick=depth == DEPTHS[0], owner=owner
        )
        path = self.folder / f"{model}.safetensors"
        made.policy.save(path)
        kept = [] if made.file is None else [f"{made.file} is in the working folder."]
        shown = show_notes([f"The policy is used for {model} from now on.", *kept, *made.notes])
        return [shown + frontier_html(made.policy), gr.update(value=str(path), visible=True)]

    def cancel(self, request: gr.Request) -> None:
        """End the job of this browser tab."""
        if self.engine.cancel(request.session_hash):
            gr.Info("Cancelled: the job ends before its next network evaluation.")

    def open(self, path: str | None, model: str, use: bool) -> str:
        """What is in a file that was dropped."""
        if path is None:
            return EMPTY.format("Everything in the file appears here.")
        made = self.engine.open_policy(Path(path), model=model if use else None)
        used = [f"It is used for {model} from now on."] if use else []
        return show_notes([*used, *made.notes]) + policy_html(made.policy)

    def pareto(self, name: str) -> str:
        """The Pareto plot of a results file."""
        if name not in self.results:
            raise ValueError(f"there is no results file {str(name)[:80]!r}")
        return show_figure(pareto(read_results(self.results[name])[1]), f"Pareto plot of {name}")

    def _write(self, made: Any) -> str:
        """Write a video into the folder of the session; the oldest ones are removed."""
        path = self.folder / f"{uuid.uuid4().hex}.mp4"
        write_video(made, path)
        old = sorted(self.folder.glob("*.mp4"), key=lambda file: file.stat().st_mtime)
        for file in old[:-KEPT_VIDEOS]:
            file.unlink(missing_ok=True)
        return f"/gradio_api/file={path}"


def _show_progress(progress: Any, stage: str, done: int, total: int) -> None:
    progress((done, total) if total else 0, desc=stage, unit="done")


def build_page(engine: Engine, results: dict[str, Path], folder: Path) -> gr.Blocks:
    """The page.

    Args:
        engine: runs the jobs.
        results: results files of ``ertacache bench`` by name.
        folder: where files for the browser are written.
    """
    page = _Page(engine, results, folder)
    first = next(iter(engine.models))
    blocks: gr.Blocks
    with gr.Blocks(title="ertacache", analytics_enabled=False, delete_cache=(600, 3600)) as blocks:
        gr.HTML(HEAD)
        model = gr.Dropdown(list(engine.models), value=first, label="Model")
        with gr.Tabs():
            with gr.Tab("Generate"):
                settings, connect = _generate_tab(page, model)
            with gr.Tab("Calibrate"):
                prompts = _calibrate_tab(page, model, settings)
            with gr.Tab("Policy"):
                _policy_tab(page, model)
            with gr.Tab("Benchmark"):
                _benchmark_tab(page, blocks)
        connect(prompts, blocks.load)
    blocks.queue(max_size=MAX_QUEUE)
    return blocks


def _settings(page: _Page, model: str) -> list[Any]:
    """Prompt, seed, steps, height, width, frames and speed-up, with the defaults of a model."""
    asked = page.engine.default_request(model)
    prompt = gr.Textbox(asked.prompt, label="Prompt", lines=2, max_length=page.engine.limits.prompt)
    with gr.Row():
        numbers = [
            gr.Number(
                getattr(asked, name.lower()),
                label=name,
                precision=0,
                min_width=80,
                visible=getattr(asked, name.lower()) is not None,
            )
            for name in ("Seed", "Steps", "Height", "Width", "Frames")
        ]
    return [prompt, *numbers, gr.Slider(*SPEEDUPS, value=2.0, step=0.01, label="Speed-up")]


def _generate_tab(page: _Page, model: Any) -> tuple[list[Any], Callable[..., None]]:
    """The first tab.

    Returns:
        The settings, and what connects them, once there are calibration prompts.
    """
    with gr.Row():
        with gr.Column(scale=5, min_width=300):
            settings = _settings(page, model.value)
            predicted = gr.HTML(elem_classes="erta-prediction", elem_id="prediction")
            with gr.Column(visible=False, elem_id="first") as offer:
                gr.HTML(FIRST)
                first = gr.Button("Calibrate quickly and generate", variant="primary")
            with gr.Row():
                start = gr.Button("Generate", variant="primary", min_width=120)
                stop = gr.Button("Cancel", min_width=120)
        with gr.Column(scale=6, min_width=300):
            result = gr.HTML(NOTHING, elem_id="result", min_height=200)
    shown: dict[str, Any] = {"outputs": result, "show_progress_on": result, **_JOB, **_HIDDEN}

    def connect(prompts: Any, load: Any) -> None:
        foresee: dict[str, Any] = {
            "fn": _readable(page.predict),
            "inputs": [model, *settings],
            "outputs": [predicted, offer, start],
            "show_progress": "hidden",
            **_HIDDEN,
        }
        for each in settings[1:]:
            each.input(**foresee, trigger_mode="always_last")
        filled = [*settings[:-1], prompts]
        load(**foresee)
        chosen = model.input(
            _readable(page.choose), model, filled, show_progress="hidden", **_HIDDEN
        )
        chosen.then(**foresee)
        run = start.click(_readable(page.generate), [model, *settings], **shown)
        made = first.click(_readable(page.begin), [model, prompts, *settings], **shown)
        for job in (run, made):
            job.then(**foresee)
        stop.click(page.cancel, cancels=[run, made], **_HIDDEN)

    return settings, connect


def _calibrate_tab(page: _Page, model: Any, settings: list[Any]) -> Any:
    """The second tab; returns the prompts. Steps and size are those of the first."""
    with gr.Row():
        with gr.Column(scale=5, min_width=300):
            prompts = gr.Textbox(
                page.engine.calibration_prompts(model.value, PROMPTS),
                label="Calibration prompts, one per line",
                info="8 to 32 are good. Steps and size are those of the tab Generate.",
                lines=8,
                max_lines=16,
                elem_id="prompts",
            )
            depth = gr.Radio(DEPTHS, value=DEPTHS[1], label="Calibration")
            with gr.Row():
                start = gr.Button("Calibrate", variant="primary", min_width=120)
                stop = gr.Button("Cancel", min_width=120)
            file = gr.DownloadButton("Download the policy", visible=False)
        with gr.Column(scale=6, min_width=300):
            result = gr.HTML(
                EMPTY.format("The frontier appears here."), elem_id="calibrated", min_height=200
            )
    run = start.click(
        _readable(page.calibrate),
        [model, prompts, depth, *settings],
        [result, file],
        show_progress_on=result,
        **_JOB,
        **_HIDDEN,
    )
    stop.click(page.cancel, cancels=[run], **_HIDDEN)
    return prompts


def _policy_tab(page: _Page, model: Any) -> None:
    """The third tab: drop a file, see what is in it."""
    file = gr.File(
        label="Drop a policy file here",
        file_types=[".safetensors"],
        type="filepath",
        height=140,
        elem_id="policy-file",
    )
    use = gr.Checkbox(label="Use it for the chosen model", value=True)
    content = gr.HTML(page.open(None, "", False), elem_id="policy", min_height=200)
    file.change(
        _readable(page.open),
        [file, model, use],
        content,
        show_progress_on=content,
        **_JOB,
        **_HIDDEN,
    )


def _benchmark_tab(page: _Page, blocks: Any) -> None:
    """The fourth tab: a Pareto plot per results file."""
    if not page.results:
        gr.HTML(
            EMPTY.format(
                "There are no results files in the working folder. <code>ertacache bench</code> "
                "writes them."
            )
        )
        return
    names = list(page.results)
    name = gr.Dropdown(names, value=names[0], label="Results of ertacache bench")
    gr.HTML(
        "<p>Each method on the same held-out prompts and seeds: quality against the cost of the "
        "network. Up and to the left is better.</p>"
    )
    plot = gr.HTML(elem_id="pareto", min_height=200)
    for trigger in (name.change, blocks.load):
        trigger(_readable(page.pareto), name, plot, show_progress="hidden", **_HIDDEN)
