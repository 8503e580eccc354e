"""Serve the page: behind the guard, with all files of a session in one folder that is removed."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.middleware import Middleware

from ertacache.app.engine import Engine
from ertacache.app.guard import Guard

__all__ = ["serve", "served"]

VISITORS = 64  # whose last result is kept in memory
_CACHE = "GRADIO_TEMP_DIR"
# Nothing is reported to anyone, and nothing is looked up.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"


@contextmanager
def served(
    engine: Engine, *, results: dict[str, Path], host: str, port: int, browser: bool = False
) -> Iterator[Path]:
    """Serve the page until the block ends; files of the session are removed then.

    Args:
        engine: runs the jobs.
        results: results files by name.
        host: address to listen on.
        port: port to listen on.
        browser: open the page in a browser.

    Yields:
        The folder of the session.
    """
    import gradio.routes

    from ertacache.app.page import STYLE, THEME, build_page

    with tempfile.TemporaryDirectory(prefix="ertacache-app-") as name:
        folder, before = Path(name).resolve(), os.environ.get(_CACHE)
        os.environ[_CACHE] = str(folder / "cache")  # Gradio's own files
        # The same, which Gradio read when it was imported.
        gradio.routes.DEFAULT_TEMP_DIR = str(folder / "cache")  # type: ignore[attr-defined]
        page = build_page(engine, results, folder)
        try:
            page.launch(
                server_name=host,
                server_port=port,
                inbrowser=browser,
                share=False,
                show_error=False,
                max_file_size=engine.limits.upload,
                allowed_paths=[str(folder)],
                footer_links=[],
                run_history=False,
                state_session_capacity=VISITORS,
                enable_monitoring=False,
                ssr_mode=False,
                quiet=True,
                prevent_thread_lock=True,
                theme=THEME,
                css=STYLE,
                app_kwargs={"middleware": [Middleware(Guard, folder=folder, host=host)]},
            )
            yield folder
        finally:
            engine.close()
            page.close(verbose=False)
            if before is None:
                os.environ.pop(_CACHE, None)
            else:
                os.environ[_CACHE] = before


def serve(
    engine: Engine, *, results: dict[str, Path], host: str, port: int, browser: bool = True
) -> None:
    """Serve the page until it is interrupted."""
    with served(engine, results=results, host=host, port=port, browser=browser):
        while True:
            time.sleep(3600)
