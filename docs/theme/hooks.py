"""What the site has beyond the pages in ``docs/``.

Some pages are files that stand elsewhere in the repository. The page on the commands is made of the
commands themselves. Formulas become MathML, which a browser shows without a script. mkdocs calls
the functions whose names begin with ``on_``.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import griffe
import typer
from latex2mathml.converter import convert
from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
# Pages of the site that are other files of the repository.
ELSEWHERE = {
    "comfyui.md": "comfyui/README.md",
    "examples.md": "examples/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
COMMANDS = "src/ertacache/cli"  # what a link to the page of the commands names
IMAGES = ("comfyui/images", "examples/images")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(#[^)]*)?\)")
_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.S)


class DocstringExamples(griffe.Extension):
    """Examples of docstrings as code: the reader of docstrings knows the plural only."""

    def on_instance(self, *, obj: griffe.Object | griffe.Alias, **_: Any) -> None:
        """Rename the section of one object."""
        if not obj.is_alias and obj.docstring:
            obj.docstring.value = re.sub(
                r"^Example:$", "Examples:", obj.docstring.value, flags=re.M
            )


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages and images that are not in ``docs/``."""
    for name, place in ELSEWHERE.items():
        text = site_links((ROOT / place).read_text(), posixpath.dirname(place))
        files.append(File.generated(config, name, content=text))
    for image in (path for folder in IMAGES for path in sorted((ROOT / folder).glob("*"))):
        name = image.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(image)))
    files.append(File.generated(config, "commands.md", content=command_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links of ``docs/`` to other files of the repository lead to their pages."""
    return re.sub(r"\[[^\]]*\]\(\.\./[^)]*\)", lambda link: site_links(link[0], "docs"), markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a page by MathML."""
    return _FORMULA.sub(lambda found: mathml(found[2], block=found[1] == "div"), content)


def on_post_page(output: str, **_: Any) -> str:
    """Name what the theme leaves without a name for screen readers."""
    named = output.replace('role="dialog">', 'role="dialog" aria-label="Search">')
    for box, name in (("__drawer", "Navigation"), ("__search", "Search")):
        named = named.replace(f'id="{box}"', f'id="{box}" aria-label="{name}"')
    return named


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for pages that are not made of Markdown."""
    return on_post_page(output_content)


def mathml(formula: str, *, block: bool) -> str:
    """A LaTeX formula as MathML; one that is not understood is an error, and no page."""
    text = html.unescape(formula).replace(r"\arg\min", r"\operatorname{arg\,min}")
    made: str = convert(text.strip(), display="block" if block else "inline")
    if "\\" in made:
        raise ValueError(f"no MathML for the formula {formula!r}")
    # A wide formula scrolls, and a keyboard must reach what scrolls.
    return f'<div class="formula" tabindex="0">{made}</div>' if block else made


def site_links(text: str, folder: str) -> str:
    """The links of a file of the repository, as the site has them; without a page, their text."""
    pages = {place: name for name, place in ELSEWHERE.items()} | {COMMANDS: "commands.md"}

    def replace(found: re.Match[str]) -> str:
        title, target, anchor = found[1], found[2], found[3] or ""
        if not target or "://" in target:
            return found[0]
        place = posixpath.normpath(posixpath.join(folder, target))
        if place.startswith(("docs/", *IMAGES)):
            return f"[{title}]({place.removeprefix('docs/')}{anchor})"
        if place in pages:
            return f"[{title}]({pages[place]}{anchor})"
        return "[Home](index.md)" if place == "README.md" else f"`{title.strip('`')}`"

    return _LINK.sub(replace, text)


def command_page() -> str:
    """Every command with its arguments, options and examples."""
    from ertacache.cli import program

    group: Any = typer.main.get_command(program)
    parts = [
        "# Commands",
        "This page is made of the commands themselves; `ertacache COMMAND --help` prints the same. "
        "Bad input ends with exit code 2 and one line that names the remedy; exit code 3 means "
        "that a policy is not recommended.",
    ]
    for name, command in group.commands.items():
        parts += command_section(name, command)
    return "\n\n".join(parts) + "\n"


def command_section(name: str, command: Any) -> list[str]:
    """One command: what it does, what it takes, how it is called."""
    context = click.Context(command, info_name=f"ertacache {name}")
    title, *rest = (part.replace("\n", " ") for part in (command.help or "").split("\n\n"))
    rows = [record for param in command.params if (record := help_record(param, context))]
    table = ["| argument or option | meaning |", "|---|---|", *rows]
    examples, _, _ = (command.epilog or "").partition("\n\n")
    lines = [line.strip() for line in examples.splitlines() if line.strip().startswith("ertacache")]
    shown = ["```bash\n" + "\n".join(lines) + "\n```"] if lines else []
    return [f"## {name}", f"**{title}**", *rest, *shown, "\n".join(table)]


def help_record(param: Any, context: Any) -> str | None:
    """An argument or option as a row of the table."""
    record = param.get_help_record(context)
    if record is None:
        return None
    names, meaning = (cell.replace("|", r"\|") for cell in record)
    return f"| `{names}` | {meaning} |"
