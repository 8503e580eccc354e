"""The bundled models as users load them: by name, offline, on a CPU."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ertacache
from ertacache.models import MODELS, UnknownModelError, load_pipeline, load_prompts

NAMES = sorted(MODELS)
FEW_STEPS = 3


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a bundled model must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture(scope="module", params=NAMES)
def loaded(request):
    return MODELS[request.param], load_pipeline(request.param)


def run(model, pipe, *, seed=0, **changes):
    prompt = load_prompts(model.name, "heldout")[0]
    arguments = model.call_arguments | {"num_inference_steps": FEW_STEPS, "output_type": "pt"}
    generator = torch.Generator().manual_seed(seed)
    return pipe(prompt, generator=generator, **(arguments | changes))[0]


@pytest.fixture(scope="module")
def output(loaded):
    return run(*loaded)


def test_row_names_the_class_and_the_steps_of_the_pipeline(loaded):
    model, pipe = loaded
    assert type(pipe).__name__ == model.pipeline
    assert {p.dtype for p in pipe.transformer.parameters()} == {torch.float32}
    assert model.call_arguments["num_inference_steps"] == model.num_inference_steps


def test_same_seed_same_output_and_another_seed_another(loaded, output):
    assert torch.isfinite(output).all()
    assert torch.equal(output, run(*loaded))
    assert not torch.equal(output, run(*loaded, seed=1))


def test_output_has_the_size_of_the_row(loaded, output):
    model, _ = loaded
    assert tuple(output.shape[-2:]) == model.size


def test_prompt_decides_the_background(loaded):
    """After a third of the usual steps the corners already have the named colour."""
    model, pipe = loaded
    arguments = model.call_arguments | {"num_inference_steps": 10, "output_type": "pt"}
    end = "at the center" if model.num_frames is None else "spinning"
    prompts = [f"a small star on a {colour} background {end}" for colour in ("red", "blue")]
    generators = [torch.Generator().manual_seed(0) for _ in prompts]
    corners = pipe(prompts, generator=generators, **arguments)[0][..., :3, :4, :4].mean((-1, -2))
    red, blue = corners.view(2, -1, 3).mean(1)  # of a video, the mean of all frames
    assert red.argmax() == 0
    assert blue.argmax() == 2


@pytest.fixture(scope="module")
def sums() -> dict[str, str]:
    """The sum of one output per model, computed in another process."""
    code = f"""
import torch
from ertacache.models import MODELS, load_pipeline, load_prompts
for m in MODELS.values():
    a = m.call_arguments | dict(num_inference_steps={FEW_STEPS}, output_type='pt')
    g = torch.Generator().manual_seed(0)
    x = load_pipeline(m.name)(load_prompts(m.name, 'heldout')[0], generator=g, **a)[0]
    print(m.name, x.double().sum().item().hex())
"""
    env = os.environ | {"PYTHONHASHSEED": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return dict(line.split() for line in done.stdout.splitlines())


def test_another_process_generates_the_same(loaded, output, sums):
    model, _ = loaded
    assert sums[model.name] == output.double().sum().item().hex()


def test_bfloat16_is_near_float32(loaded, output):
    model, _ = loaded
    half = run(model, load_pipeline(model.name, torch.bfloat16)).float()
    assert torch.isfinite(half).all()
    assert (half - output).abs().mean() < 0.02


def test_diffusers_loads_the_folder_by_itself(loaded, output):
    """Except for our own pipeline, whose class must be given."""
    import diffusers

    model, pipe = loaded
    kind = diffusers.DiffusionPipeline if hasattr(diffusers, model.pipeline) else type(pipe)
    plain = kind.from_pretrained(model.folder)
    plain.set_progress_bar_config(disable=True)
    assert torch.equal(run(model, plain), output)


@pytest.mark.parametrize("name", NAMES)
def test_folder_is_small_and_holds_no_pickle(name):
    files = [path for path in MODELS[name].folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 15_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".txt"}


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_distinct_and_disjoint(name):
    calibration, heldout = load_prompts(name, "calibration"), load_prompts(name, "heldout")
    assert len(set(calibration)) == 64
    assert len(set(heldout)) == 128
    assert not set(calibration) & set(heldout)


def test_errors_list_the_bundled_models(tmp_path):
    for name in ("emoji-nothing", str(tmp_path), "a/b/c"):
        with pytest.raises(UnknownModelError, match="emoji-flux"):
            load_pipeline(name)
    with pytest.raises(UnknownModelError, match="emoji-flux"):
        load_prompts("emoji-nothing", "heldout")
    with pytest.raises(ValueError, match="calibration"):
        load_prompts("emoji-flux", "train")


def test_a_folder_loads_like_its_name(tmp_path):
    folder = tmp_path / "copy"
    folder.symlink_to(MODELS["emoji-flux"].folder, target_is_directory=True)
    assert type(load_pipeline(Path(folder))).__name__ == "FluxPipeline"


def test_runs_from_a_read_only_installation(tmp_path):
    """Loading and running write nothing next to the package; an audit hook also stops root."""
    package = tmp_path / "site" / "ertacache"
    shutil.copytree(Path(ertacache.__file__).parent, package)
    for path in [package, *package.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    code = f"""
import os, sys
def forbid(event, arguments):
    writes = event in ("os.mkdir", "os.rename", "os.remove", "os.utime", "os.chmod", "os.truncate")
    if event == "open":
        writes = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if writes and str(arguments[0]).startswith({str(tmp_path)!r}):
        raise PermissionError(f"{{event}} {{arguments[0]}}")
sys.addaudithook(forbid)
import ertacache
from ertacache.models import MODELS, load_pipeline, load_prompts
m = MODELS["emoji-flux"]
p = load_pipeline(m.name)
p(load_prompts(m.name, "heldout")[0], **(m.call_arguments | dict(num_inference_steps=2)))
print(ertacache.__file__)
try:
    open(os.path.join(os.path.dirname(ertacache.__file__), "x"), "w")
except PermissionError:
    print("writes are detected")
"""
    env = {"PYTHONPATH": str(package.parent), "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    env |= {"PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        str(package / "__init__.py"),
        "writes are detected",
    ]


def test_importing_the_zoo_loads_no_torch():
    code = "import sys, ertacache.models; print('torch' in sys.modules, 'diffusers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
