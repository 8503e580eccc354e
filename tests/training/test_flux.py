"""The parts of `emoji-flux`, untrained, and what its training needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.metrics.needs import needs_lpips
from training.autoencoders import AUTOENCODERS
from training.data import caption, other_captions, render, scenes
from training.denoisers import DENOISERS, DenoiserTask
from training.evaluate import decoder_psnr, nearest_lpips
from training.flux import FluxParts
from training.loop import Schedule, load_ema, train
from training.muon import Muon, orthogonalise
from training.patches import SPACES, PatchBasis
from training.precision import FastArithmetic
from training.subjects import SUBJECTS

CHANNELS = SPACES["image"].channels
PROMPTS = [
    "a small star on a red background at the left",
    "a large cat on a blue background at the top",
]


@pytest.fixture(autouse=True)
def _no_font(monkeypatch: pytest.MonkeyPatch) -> None:
    """Glyphs of noise, so that no font has to be there."""
    glyphs = torch.rand(len(SUBJECTS), 4, 72, 72, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr("training.data._glyphs", lambda: glyphs)


@pytest.fixture(scope="module")
def parts() -> FluxParts:
    torch.manual_seed(0)
    built = DENOISERS["emoji-flux"].build()
    built.modules.eval()
    return built


@pytest.fixture(scope="module")
def pipe(parts: FluxParts):
    vae = AUTOENCODERS["flux"].build().eval()
    vae.register_to_config(scaling_factor=1.0, shift_factor=0.0)
    pipe = parts.pipeline(vae)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_first_call_of_the_pipeline_is_predict(parts: FluxParts, pipe):
    calls = []

    def keep(_module, _args, given, output):
        calls.append((given, output[0]))

    noise = torch.randn(2, CHANNELS, 16, 16, generator=torch.Generator().manual_seed(0))
    packed = pipe._pack_latents(noise, 2, CHANNELS, 16, 16)
    hook = pipe.transformer.register_forward_hook(keep, with_kwargs=True)
    pipe(
        PROMPTS,
        latents=packed,
        height=64,
        width=64,
        num_inference_steps=2,
        max_sequence_length=16,
        output_type="latent",
    )
    hook.remove()
    given, output = calls[0]
    with torch.no_grad():
        predicted = parts.predict(noise, given["timestep"], parts.tokenize(PROMPTS))
    wanted = pipe._pack_latents(predicted, 2, CHANNELS, 16, 16)
    torch.testing.assert_close(wanted, output, rtol=0, atol=1e-5)


def test_weights_fit_into_fifteen_megabytes(parts: FluxParts):
    networks = (parts.modules, AUTOENCODERS["flux"].build())
    assert 2 * sum(p.numel() for net in networks for p in net.parameters()) < 15e6


def test_half_products_round_linear_layers_and_nothing_else():
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)
    with FastArithmetic(half=True):
        found, kept = layer(x), x * 1.001
    wanted = layer(x)
    assert found.dtype == torch.float32
    assert 0 < (found - wanted).abs().max() < 0.05
    assert torch.equal(kept, x * 1.001)
    found.sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize("half", [False, True])
def test_gelu_without_tanh_is_the_same(half: bool):
    x = torch.linspace(-6, 6, 101, dtype=torch.float64, requires_grad=True)
    wanted = nn.functional.gelu(x, approximate="tanh")
    with FastArithmetic(half=half):
        found = nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    slopes = [torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted)]
    torch.testing.assert_close(*slopes, rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(3, 8, 24), (2, 24, 8)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape: tuple[int, ...]):
    found = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert (found - 1).abs().max() < 0.5


def test_muon_steps_as_that_of_torch(monkeypatch):
    """Up to its bfloat16."""
    monkeypatch.setattr("training.muon.multiplies_bfloat16", lambda: True)
    torch.manual_seed(3)
    ours = [nn.Parameter(torch.randn(8, 24)) for _ in range(2)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = (
        Muon(ours, lr=1e-2),
        torch.optim.Muon(theirs, lr=1e-2, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)


class _Task:
    """Two small layers that learn a line, the inner one in a block."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        layers = {"first": nn.Linear(4, 8), "blocks": nn.Sequential(nn.Linear(8, 8))}
        self.modules = nn.ModuleDict(layers | {"last": nn.Linear(8, 1)})
        self.stop: int | None = None

    def loss(self, step: int) -> torch.Tensor:
        if step == self.stop:
            raise KeyboardInterrupt
        x = torch.randn(16, 4)
        y = self.modules["last"](self.modules["blocks"](self.modules["first"](x)))
        return (y[:, 0] - x.sum(1)).pow(2).mean()

    def preview(self, modules: nn.ModuleDict, path: Path) -> dict[str, float]:
        return {}


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path, monkeypatch):
    """Both optimizers come back, also when more steps are wanted than at first."""
    ticks = iter(range(0, 10**6, 130))
    monkeypatch.setattr("training.loop.time.monotonic", lambda: next(ticks))
    long = Schedule(40, 16, 1e-2, warmup=5, decay=10, muon=True)
    train(_Task(), long, tmp_path / "whole")
    killed = _Task()
    killed.stop = 23
    with pytest.raises(KeyboardInterrupt):
        train(killed, Schedule(35, 16, 1e-2, warmup=5, decay=10, muon=True), tmp_path / "two")
    train(_Task(), long, tmp_path / "two")
    whole, two = _Task().modules, _Task().modules
    assert load_ema(whole, tmp_path / "whole") == load_ema(two, tmp_path / "two") == 40
    for wanted, found in zip(whole.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-7)


def test_muon_takes_the_matrices_of_blocks(parts: FluxParts):
    from training.loop import _in_blocks, _optimizers

    chosen = _in_blocks(parts.modules)
    assert all(matrix.ndim == 2 for matrix in chosen)
    names = {id(p): name for name, p in parts.modules.named_parameters()}
    outside = ("x_embedder", "proj_out.", "embeddings", "shared")
    taken = [names[id(matrix)] for matrix in chosen]
    assert not any(
        name.startswith(f"transformer.{end}") or "embedding" in name
        for name in taken
        for end in outside
    )
    groups = _optimizers(parts.modules, muon=True)
    held = [p for optimizer in groups for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(parts.modules.parameters()))


def test_task_learns_in_bfloat16(parts: FluxParts, monkeypatch):
    """One batch on a bank of noise: near the float32 loss, not equal to it."""
    count = len(scenes("train"))
    monkeypatch.setattr("training.denoisers.bank", lambda *_: torch.randn(1, count, CHANNELS, 1, 1))
    monkeypatch.setattr(
        "training.denoisers.patch_basis",
        lambda *_: PatchBasis(*(torch.zeros(n) for n in ((48,), (CHANNELS, 48), (48, CHANNELS)))),
    )
    task = DenoiserTask(parts, Path(), batch=4, half=True)
    task.bank = task.bank.expand(-1, -1, -1, 16, 16)
    found = {}
    for half in (True, False):
        task.half = half
        torch.manual_seed(0)
        found[half] = task.loss(0).item()
    assert found[True] != found[False]
    assert found[True] == pytest.approx(found[False], rel=1e-2)


def test_captions_vary(parts: FluxParts, monkeypatch):
    """About half of them, each by one of the other captions of the same scene."""
    shown = scenes("train")
    monkeypatch.setattr("training.denoisers.bank", lambda *_: torch.zeros(1, len(shown), 1, 1, 1))
    monkeypatch.setattr("training.denoisers.patch_basis", lambda *_: None)
    task = DenoiserTask(parts, Path(), batch=4, vary=True)
    torch.manual_seed(0)
    row = torch.randint(len(shown), (200,))
    drawn = task._captions(row)
    same = 0
    for place, scene in enumerate(row.tolist()):
        known = parts.tokenize([caption(shown[scene]), *other_captions(shown[scene])])
        fits = [
            all(torch.equal(i[k], d[place]) for i, d in zip(known, drawn, strict=True))
            for k in range(7)
        ]
        assert any(fits)
        same += fits[0]
    assert 70 < same < 140


def test_jitter_of_one_is_the_usual_one_and_zero_is_none():
    batch = scenes("train")[:2]
    usual, same = (render(batch, 16, seed=1, **more) for more in ({}, {"jitter": 1.0}))
    assert torch.equal(usual, same)
    still = [render(batch, 16, seed=seed, jitter=0.0) for seed in (1, 2)]
    assert torch.equal(*still)
    assert not torch.equal(still[0], usual)
    assert SPACES["video"].jitter == 1.0


@needs_lpips
def test_a_rendering_is_its_own_nearest(pipe):
    shown = scenes("test")[:2]
    drawn = render(shown, 64, seed=-100)
    assert nearest_lpips(drawn, shown, renderings=2).abs().max() < 1e-6
    assert (nearest_lpips(drawn, shown[::-1], renderings=2) > 0.01).all()
    assert decoder_psnr(pipe, drawn) < 20  # untrained
