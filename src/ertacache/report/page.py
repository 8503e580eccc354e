"""One self-contained page from results files: tables, plots, images, playing videos.

Its only script is ``page.js``, its only style ``page.css``: a policy in the head lets the browser
run and load nothing else. Without the script the page can be read, but not sorted or compared.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from ertacache.bench.results import (
    FULL,
    SAME_MEAN,
    SAME_TENTH,
    BenchRow,
    read_results,
)
from ertacache.bench.samples import read_samples
from ertacache.figures import PALETTE
from ertacache.report.films import compared_pairs, pairs_html, samples_html
from ertacache.report.hover import interactive_pareto
from ertacache.report.plots import highlights
from ertacache.report.tables import (
    best_first,
    quality_table,
    reasons,
    same_table,
    scrollable,
    tell_apart,
)

__all__ = ["make_page"]

_FILES = Path(__file__).parent
_INTRODUCTION = (
    "Every method ran on the same held-out prompts and seeds, one after another on every batch. "
    "Quality is the distance to the full run of the same prompt and seed, as a mean with its "
    "95&nbsp;% interval over prompts. A method has to be better than <em>fewer steps</em> to be "
    "of use."
)


def make_page(
    sources: Sequence[Path], *, progress: Callable[[int, int], None] | None = None
) -> str:
    """The page of results files and of folders of compared results, as HTML.

    Args:
        sources: files of ``ertacache bench``, with their samples if they are beside them, and
            folders of ``ertacache generate --compare``.
        progress: takes the number of finished parts and of all.

    Raises:
        ValueError: a file is not what it should be, or a folder has no pair.
    """
    sections = [
        (_Folder if path.is_dir() else _Benchmark)(path, f"part-{place}")
        for place, path in enumerate(sources)
    ]
    measured = [section for section in sections if isinstance(section, _Benchmark)]
    apart = tell_apart([(section.path, section.rows) for section in measured])
    for benchmark, rows in zip(measured, apart, strict=True):
        benchmark.take(rows)
    total, done, body = sum(section.parts for section in sections), 0, []
    for section in sections:
        for part in section.html():
            body.append(part)
            done += 1
            if progress is not None:
                progress(done, total)
    return _document(_summary(measured) + _contents(sections) + "".join(body))


def _document(body: str) -> str:
    script, style = ((_FILES / name).read_text("utf-8") for name in ("page.js", "page.css"))
    style = _variables() + style
    digest = base64.b64encode(sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'"
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>ertacache: report</title><style>{style}</style></head>"
        f"<body><main>{body}</main><script>{script}</script></body></html>\n"
    )


def _variables() -> str:
    """The palette as CSS variables; paper is white."""
    light, dark = (
        "".join(f"--{name}:{colors[place]};" for name, colors in PALETTE.items())
        for place in (0, 1)
    )
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _summary(measured: Sequence[_Benchmark]) -> str:
    """The head of the page, and what counts most: how fast a method can be."""
    if not measured:
        return "<h1>Compared with the full run</h1>"
    found = same_table([row for section in measured for row in section.rows])
    if found:
        found = (
            "<h2>Largest speed-up that looks the same</h2><p>Counted in the network&#x27;s FLOPs. "
            f"Looks the same: a mean PSNR of {SAME_MEAN:g}&nbsp;dB or more, and {SAME_TENTH:g}"
            "&nbsp;dB or more for nine of ten prompts (p10). Interpolated between budgets.</p>"
            f"{found}"
        )
    return f"<h1>Benchmark</h1><p>{_INTRODUCTION}</p>{found}"


def _contents(sections: Sequence[_Benchmark | _Folder]) -> str:
    if len(sections) == 1:
        return ""
    items = "".join(
        f'<li><a href="#{each.name}">{escape(each.title)}</a></li>' for each in sections
    )
    return f'<nav aria-label="Contents"><ul>{items}</ul></nav>'


class _Benchmark:
    """The section of a results file."""

    def __init__(self, path: Path, name: str) -> None:
        settings, rows = read_results(path)
        self.path, self.name, self.rows, self._settings = path, name, rows, settings
        self.title = str(settings.get("model", path.stem))
        self._samples = path.with_suffix(".samples.safetensors")
        self._budgets = sorted({row.budget for row in rows if row.method != FULL})
        self.parts = 1 + len(self._budgets)

    def take(self, rows: list[BenchRow]) -> None:
        """Take rows in place of its own, and the name of their model as its title."""
        self.rows, self.title = rows, rows[0].model if rows else self.title

    def html(self) -> Iterator[str]:
        """The section, budget by budget."""
        samples = read_samples(self._samples) if self._samples.exists() else None
        shown = highlights(self.rows)
        plot = interactive_pareto(self.rows, name=self.title)
        yield (
            f'<h2 id="{self.name}">{escape(self.title)}</h2><p>{_facts(self.rows)}</p>'
            f"<figure>{scrollable(plot, name=f'Plot of {self.title}')}</figure>"
            f"{reasons(self.rows)}{_settings(self._settings)}"
        )
        for budget in self._budgets:
            chosen = [row for row in self.rows if row.budget == budget]
            title = f"{self.title} at {budget:g}x"
            part = f"<h3>{escape(title)}</h3>{quality_table(chosen, name=title)}"
            if samples is not None:
                ranked = [row.method for row in best_first(chosen) if row.method in shown]
                keys = [(FULL, 1.0), *((method, budget) for method in ranked)]
                place = f"{self.name}-{budget:g}"
                part += samples_html(f"Samples of {title}", *samples, keys, name=place)
            yield part


class _Folder:
    """The section of a folder of compared results."""

    def __init__(self, path: Path, name: str) -> None:
        self.name, self.title = name, str(path)
        self._pairs = compared_pairs(path)
        self.parts = len(self._pairs)

    def html(self) -> Iterator[str]:
        """The section, pair by pair."""
        pairs = pairs_html(self._pairs, name=self.name)
        head = f'<section class="compare"><h2 id="{self.name}">{escape(self.title)}</h2>'
        for place, pair in enumerate(pairs, start=1):
            yield (head if place == 1 else "") + pair + ("</section>" * (place == self.parts))


def _facts(rows: Sequence[BenchRow]) -> str:
    full = next((row for row in rows if row.method == FULL), None)
    text = f"{rows[0].steps} steps" if rows else "No rows"
    if full is not None:
        text += f", {full.prompts} held-out prompts"
        if full.seconds is not None:
            text += f"; the full run takes {full.seconds:.2f}&nbsp;s per call (median)"
        if full.fid is not None:
            text += f", its FID is {full.fid:.2f}"
    return text + "."


def _settings(settings: Mapping[str, Any]) -> str:
    lines = [f"{escape(str(name))}: {escape(str(value))}" for name, value in settings.items()]
    text = "\n".join(lines)
    return f"<details><summary>Settings</summary><pre>{text}</pre></details>"
