"""FLOPs and bytes of networks small enough to count by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ertacache.bench.cost import count_flops, live_bytes, watch_bytes


def test_flops_of_a_linear_network_and_of_nothing_else() -> None:
    denoiser, other = nn.Linear(8, 16, bias=False), nn.Bilinear(4, 4, 4)
    pipe: Any = SimpleNamespace(transformer=denoiser, scheduler=object())

    def run() -> None:
        for _ in range(3):
            denoiser(torch.ones(5, 8))
        other(torch.ones(1, 4), torch.ones(1, 4))

    assert count_flops(pipe, run) == 3 * 2 * 5 * 8 * 16


def test_flops_of_attention_are_counted_on_a_cpu() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    denoiser = Attention()
    pipe: Any = SimpleNamespace(transformer=denoiser, scheduler=object())
    tokens, width, heads = 7, 8, 3
    scores_and_mix = 2 * (2 * tokens * tokens * width)
    flops = count_flops(pipe, lambda: denoiser(torch.ones(1, heads, tokens, width)))
    assert flops == heads * scores_and_mix


def test_views_share_their_bytes() -> None:
    before = live_bytes()
    kept = torch.zeros(100)
    views = [kept[k:] for k in range(5)]
    assert live_bytes() - before == 400
    del kept
    assert live_bytes() - before == 400
    del views
    assert live_bytes() == before


def test_tensors_without_bytes_do_not_count() -> None:
    before = live_bytes()
    with FakeTensorMode():
        fake = torch.zeros(100)
    meta = torch.zeros(100, device="meta")
    assert fake.shape == meta.shape
    assert live_bytes() == before


def test_bytes_are_reported_after_a_share_of_the_steps() -> None:
    cache, seen = [], list[int]()
    pipe = SimpleNamespace(scheduler=SimpleNamespace(timesteps=[4, 3, 2, 1]))
    watch = watch_bytes(0.4, seen.append)  # of four steps the second
    before = live_bytes()
    for step in range(4):
        cache.append(torch.zeros(1000))
        assert watch(pipe, step, None, {"latents": None}) == {"latents": None}
    (during,) = seen
    assert during - before == 8000


def test_counting_flops_holds_no_tensors() -> None:
    denoiser = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    pipe: Any = SimpleNamespace(transformer=denoiser, scheduler=object())
    seen: list[int] = []

    def run() -> None:
        with torch.no_grad():
            for _ in range(3):
                denoiser(torch.ones(5, 8))
                seen.append(live_bytes())

    run()
    count_flops(pipe, run)
    assert len(set(seen)) == 1
