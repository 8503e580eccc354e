"""The page of the app, with Gradio: what is entered goes to the engine, what it returns is shown.

Jobs share one queue and run one at a time. A failure is one line in the browser; what was not
expected is logged in the terminal with its traceback, and never sent.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gradio as gr

from ertacache.app import views
from ertacache.app.engine import Cancelled, Engine, Opened
from ertacache.app.requests import Request, describe_failure
from ertacache.bench.results import read_results
from ertacache.report.plots import draw_pareto

__all__ = ["build_page", "serve"]

_LOG = logging.getLogger("ertacache")
_JOB: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "job"}
MAX_QUEUE = 64  # jobs that wait
SPEEDUPS = (1.0, 8.0)  # ends of the slider
PROMPTS = 8  # of a bundled model that are filled in


def _readable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The handler with its failures as one line."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Cancelled as cause:
            gr.Info(str(cause), title="Cancelled")
            return gr.skip()
        except (ValueError, OSError, MemoryError) as cause:
            raise _shown(cause) from None
        except Exception as cause:
            _LOG.exception("a job of the app failed")
            raise _shown(cause) from None

    return run


def _shown(cause: BaseException) -> gr.Error:
    text = describe_failure(cause, tempfile.gettempdir(), Path.cwd(), Path.home())
    return gr.Error(text, duration=None, print_exception=False)


class _Page:
    """The handlers of one page; each takes the values of its inputs."""

    def __init__(self, engine: Engine, results: dict[str, Path], folder: Path) -> None:
        self.engine, self.results, self.folder = engine, results, folder

    def choose(self, model: str) -> list[Any]:
        """The settings of a model, and prompts to calibrate it with."""
        asked = self.engine.default_request(model)
        values = [asked.prompt, asked.seed, asked.steps, asked.height, asked.width]
        frames = gr.update(value=asked.frames, visible=asked.frames is not None)
        return [*values, frames, self.engine.calibration_prompts(model, PROMPTS)]

    def predict(self, model: str, *values: Any) -> str:
        """What the slider says."""
        return views.describe_prediction(self.engine.predict(model, Request(*values)))

    def generate(self, model: str, *values: Any, progress: Any = gr.Progress()) -> list[Any]:  # noqa: B008  Gradio finds it so
        """Both results and what was measured."""
        report = functools.partial(_show_progress, progress)
        made = self.engine.generate(model, Request(*values), report)
        strip = views.draw_strip(made.compute_steps, made.num_steps)
        rows = views.describe_outcome(made)
        if made.full.ndim == 4:
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".webp", delete=False) as file:
                path = views.write_video(made, Path(file.name))
            video = gr.update(value=str(path), visible=True)
            hidden = gr.update(value=None, visible=False)
            return [hidden, hidden, video, rows, strip]
        full, fast, apart = views.shown_images(made)
        hidden = gr.update(value=None, visible=False)
        slider, map_ = (gr.update(value=v, visible=True) for v in ((full, fast), apart))
        return [slider, map_, hidden, rows, strip]

    def calibrate(
        self,
        model: str,
        prompts: str,
        steps: float,
        height: float,
        width: float,
        frames: float | None,
        progress: Any = gr.Progress(),  # noqa: B008  Gradio finds it so
    ) -> list[Any]:
        """A policy for a model: its frontier, and the file to keep."""
        asked = Request("calibration", 0, steps, height, width, frames)  # type: ignore[arg-type]
        report = functools.partial(_show_progress, progress)
        made = self.engine.calibrate(model, prompts, asked, report=report)
        path = self.folder / f"{model}.safetensors"
        made.policy.save(path)
        return [*self._policy(made), str(path)]

    def open(self, path: str | None, model: str, use: bool) -> list[Any]:
        """What is in a file that was dropped."""
        if path is None:
            return [None, None, [], ""]
        made = self.engine.open_policy(Path(path), model=model if use else None)
        return [views.policy_facts(made.policy), *self._policy(made)]

    def pareto(self, name: str) -> Any:
        """The Pareto plot of a results file."""
        if name not in self.results:
            raise ValueError(f"there is no results file {str(name)[:80]!r}")
        figure = draw_pareto(read_results(self.results[name])[1])
        figure.set_layout_engine("constrained")  # the legend is beside the axes
        return figure

    def _policy(self, made: Opened) -> list[Any]:
        return [
            views.draw_frontier(made.policy),
            views.frontier_table(made.policy),
            views.notes_html(made.notes),
        ]


def _show_progress(progress: Any, stage: str, done: int, total: int) -> None:
    progress((done, total) if total else 0, desc=stage)


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
        gr.Markdown("# ertacache\nFewer network evaluations, nearly the same output.")
        model = gr.Dropdown(list(engine.models), value=first, label="Model")
        with gr.Tab("Generate"):
            settings = _generate_tab(page, model)
        with gr.Tab("Calibrate"):
            prompts = _calibrate_tab(page, model, settings)
        with gr.Tab("Policy"):
            _policy_tab(page, model)
        with gr.Tab("Benchmark"):
            _benchmark_tab(page)
        filled = [*settings, prompts]
        for trigger in (model.change, blocks.load):
            trigger(_readable(page.choose), model, filled, api_visibility="private")
    blocks.queue(max_size=MAX_QUEUE)
    return blocks


def _generate_tab(page: _Page, model: Any) -> list[Any]:
    """The first tab; returns prompt, seed, steps, height, width and frames."""
    prompt = gr.Textbox(label="Prompt", lines=2, max_length=page.engine.limits.prompt)
    with gr.Row():
        names = ("Seed", "Steps", "Height", "Width", "Frames")
        numbers = [gr.Number(label=name, precision=0, min_width=90) for name in names]
    low, high = SPEEDUPS
    speedup = gr.Slider(low, high, value=2.0, step=0.05, label="Speed-up")
    predicted = gr.Textbox(label="Prediction", interactive=False)
    with gr.Row():
        start = gr.Button("Generate", variant="primary")
        stop = gr.Button("Cancel")
    compared = gr.ImageSlider(label="Full run | accelerated", interactive=False, type="pil")
    video = gr.Image(label="Full run, accelerated, difference", visible=False, type="filepath")
    strip = gr.HTML(label="Compute schedule")
    with gr.Row():
        apart = gr.Image(label="Difference, 8 times", interactive=False)
        measured = gr.Dataframe(
            headers=["", "measured"], label="Comparison", interactive=False, wrap=True
        )
    inputs = [model, prompt, *numbers, speedup]
    hidden: dict[str, Any] = {"api_visibility": "private"}
    for trigger in (speedup.change, *(each.change for each in numbers)):
        trigger(
            _readable(page.predict),
            inputs,
            predicted,
            show_progress="hidden",
            trigger_mode="always_last",
            **hidden,
        )
    outputs = [compared, apart, video, measured, strip]
    start.click(
        _readable(page.generate), inputs, outputs, show_progress_on=compared, **_JOB, **hidden
    )
    stop.click(page.engine.cancel, queue=False, **hidden)
    return [prompt, *numbers]


def _calibrate_tab(page: _Page, model: Any, settings: list[Any]) -> Any:
    """The second tab; returns the prompts. Steps and size are those of the first."""
    gr.Markdown("Steps and size are those of the first tab. A quarter of the prompts is held out.")
    prompts = gr.Textbox(label="Calibration prompts, one per line", lines=8)
    with gr.Row():
        start = gr.Button("Calibrate", variant="primary")
        stop = gr.Button("Cancel")
    figure = gr.Plot(label="Frontier")
    table = gr.Dataframe(headers=views.FRONTIER_COLUMNS, label="Frontier", interactive=False)
    notes, file = gr.HTML(), gr.File(label="Policy file", interactive=False)
    _prompt, _seed, *sizes = settings
    hidden: dict[str, Any] = {"api_visibility": "private"}
    start.click(
        _readable(page.calibrate),
        [model, prompts, *sizes],
        [figure, table, notes, file],
        show_progress_on=figure,
        **_JOB,
        **hidden,
    )
    stop.click(page.engine.cancel, queue=False, **hidden)
    return prompts


def _policy_tab(page: _Page, model: Any) -> None:
    """The third tab: drop a file, see what is in it."""
    file = gr.File(label="Policy file", file_types=[".safetensors"], type="filepath")
    use = gr.Checkbox(label="Use it for the chosen model", value=True)
    facts = gr.Dataframe(headers=["", "value"], label="Content", interactive=False, wrap=True)
    figure = gr.Plot(label="Frontier")
    table = gr.Dataframe(headers=views.FRONTIER_COLUMNS, label="Frontier", interactive=False)
    notes = gr.HTML()
    outputs = [facts, figure, table, notes]
    file.change(
        _readable(page.open),
        [file, model, use],
        outputs,
        show_progress_on=facts,
        **_JOB,
        api_visibility="private",
    )


def _benchmark_tab(page: _Page) -> None:
    """The fourth tab: a Pareto plot per results file."""
    if not page.results:
        gr.Markdown("There are no results files of `ertacache bench` in the working folder.")
        return
    names = list(page.results)
    name = gr.Dropdown(names, value=None, label="Results of ertacache bench")
    plot = gr.Plot(label="Pareto plot")
    name.change(_readable(page.pareto), name, plot, api_visibility="private")


def serve(
    engine: Engine, *, results: dict[str, Path], host: str, port: int, browser: bool = True
) -> None:
    """Serve the page until it is interrupted; files of the session are removed then.

    Args:
        engine: runs the jobs.
        results: results files by name.
        host: address to listen on.
        port: port to listen on.
        browser: open the page in a browser.
    """
    with tempfile.TemporaryDirectory(prefix="ertacache-app-") as folder:
        build_page(engine, results, Path(folder)).launch(
            server_name=host,
            server_port=port,
            inbrowser=browser,
            share=False,
            show_error=False,
            max_file_size=engine.limits.upload,
            allowed_paths=[folder],
            footer_links=[],
            enable_monitoring=False,
            ssr_mode=False,
            quiet=True,
        )
