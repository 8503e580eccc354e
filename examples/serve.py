"""A small server: every request chooses its speed-up, and every worker has a pipeline of its own.

pip install "ertacache[serve]"
ERTACACHE_POLICY=policy.safetensors uvicorn examples.serve:app

curl "localhost:8000/image?prompt=a+cat&quality=fast" -o cat.png
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from queue import Queue
from typing import Any, Literal

import torch
from fastapi import FastAPI, Response

import ertacache
from ertacache.models import MODELS, load_pipeline

MODEL, WORKERS = "emoji-flux", 2
SPEEDUPS = {"best": 2.0, "fast": 3.0}
pipelines: Queue[Any] = Queue()  # those that no request uses now


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the pipelines when the server starts; the policy is a file or hub:user/repo."""
    for _ in range(WORKERS):
        pipe = load_pipeline(MODEL)
        ertacache.attach(pipe, os.environ["ERTACACHE_POLICY"], speedup=SPEEDUPS["best"])
        pipelines.put(pipe)
    yield
    for _ in range(WORKERS):
        ertacache.detach(pipelines.get())


app = FastAPI(lifespan=lifespan)


@app.get("/image")
def image(prompt: str, quality: Literal["best", "fast"] = "best", seed: int = 0) -> Response:
    """An image as PNG. FastAPI runs plain functions in threads: requests run side by side."""
    noise = torch.Generator().manual_seed(seed)
    pipe = pipelines.get()  # waits until one is free
    try:
        with ertacache.using(pipe, speedup=SPEEDUPS[quality]) as handle:
            made = pipe(prompt, generator=noise, **MODELS[MODEL].call_arguments).images[0]
            computed = handle.stats.last.computed_steps
    finally:
        pipelines.put(pipe)
    data = BytesIO()
    made.save(data, format="PNG")
    headers = {"X-Computed-Steps": str(computed)}
    return Response(data.getvalue(), media_type="image/png", headers=headers)
