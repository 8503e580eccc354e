"""One self-contained page from results files: tables, plots, images, playing videos.

No script, and no font or image from elsewhere.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor

from ertacache.bench.results import FULL, BenchRow, read_results
from ertacache.bench.samples import read_samples
from ertacache.report.plots import pareto
from ertacache.report.tables import best_first, cost_table, quality_table

__all__ = ["make_page"]

FRAME_MILLISECONDS = 80
SHOWN_SIDE = 96  # pixels at which a small image is shown

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-size: 13px; display: block;
        overflow-x: auto }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
small { color: #777 } svg { max-width: 100%; height: auto }
.samples img { image-rendering: pixelated; display: block }
.samples td, .samples th { text-align: left }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .5rem }
"""


def make_page(paths: Sequence[Path]) -> str:
    """The page of one or more results files, as HTML."""
    sections = [_section(path, *read_results(path)) for path in paths]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>ertacache: benchmark</title><style>{STYLE}</style></head><body>"
        "<h1>Benchmark</h1>"
        "<p>Every method ran on the same held-out prompts and seeds, one after another on every "
        "batch. Quality is the distance to the full run of the same prompt and seed, as a mean "
        "with its 95&nbsp;% interval over prompts. A method has to be better than "
        "<em>fewer steps</em> to be of use.</p>"
        f"{''.join(sections)}</body></html>\n"
    )


def _section(path: Path, settings: Mapping[str, Any], rows: Sequence[BenchRow]) -> str:
    model = escape(str(settings.get("model", path.stem)))
    parts = [f"<h2>{model}</h2>", pareto(rows)]
    for budget in sorted({row.budget for row in rows if row.method != FULL}):
        chosen = [row for row in rows if row.budget == budget]
        parts += [f"<h3>Target speed-up {budget:g}x</h3>", quality_table(chosen)]
        samples = path.with_suffix(".samples.safetensors")
        if samples.exists():
            shown = [(FULL, 1.0), *((row.method, budget) for row in best_first(chosen))]
            parts.append(_samples(*read_samples(samples), shown))
    parts += ["<h3>Memory and latency</h3>", cost_table(rows), _settings(settings)]
    return "".join(parts)


def _settings(settings: Mapping[str, Any]) -> str:
    lines = [f"{escape(str(name))}: {escape(str(value))}" for name, value in settings.items()]
    text = "\n".join(lines)
    return f"<details><summary>Settings</summary><pre>{text}</pre></details>"


def _samples(
    prompts: Sequence[str],
    found: Mapping[tuple[str, float], Tensor],
    shown: Sequence[tuple[str, float]],
) -> str:
    """One row per method, in the order of the table, one column per prompt."""
    head = "".join(f"<th>{escape(prompt)}</th>" for prompt in prompts)
    lines = []
    for key in shown:
        if key in found:
            cells = "".join(f"<td>{_image(one, key[0])}</td>" for one in found[key])
            lines.append(f"<tr><td>{escape(key[0])}</td>{cells}</tr>")
    table = f'<table class="samples"><tr><th></th>{head}</tr>{"".join(lines)}</table>'
    return f"<details><summary>Samples</summary>{table}</details>"


def _image(levels: Tensor, name: str) -> str:
    """An image, or a playing video, inside the page."""
    from PIL import Image

    frames = levels[None] if levels.ndim == 3 else levels
    images = [Image.fromarray(frame.permute(1, 2, 0).numpy()) for frame in frames]
    data = io.BytesIO()
    images[0].save(
        data,
        format="WEBP",
        lossless=True,
        save_all=True,
        append_images=images[1:],
        duration=FRAME_MILLISECONDS,
        loop=0,
    )
    source = base64.b64encode(data.getvalue()).decode()
    side = max(SHOWN_SIDE, images[0].width)
    return f'<img width="{side}" alt="{escape(name)}" src="data:image/webp;base64,{source}">'
