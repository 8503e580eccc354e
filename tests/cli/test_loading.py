"""Prompts and models that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ertacache.cli import loading
from ertacache.cli.loading import MAX_LINE, choose_prompts, read_prompts
from ertacache.formats.policy import Policy
from ertacache.formats.profile import MAX_PROMPTS
from ertacache.models import load_pipeline
from tests.cli.conftest import Refused, Run, Variant


@pytest.mark.parametrize("content", [b"", b" \n\t\n", b"\xff\xfe\x00"])
def test_a_file_without_prompts(content: bytes, tmp_path: Path, refused: Refused) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_bytes(content)
    line = refused("profile", "emoji-flux", "--prompts", prompts, "-o", tmp_path / "p")
    assert str(prompts) in line


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("emoji-fluxx", "not a bundled model (emoji-flux"),
        ("nobody/nothing", "cannot load the pipeline 'nobody/nothing'"),
    ],
)
def test_an_unknown_model(
    model: str, words: str, tmp_path: Path, prompts_file: Path, refused: Refused
) -> None:
    path = tmp_path / "p.safetensors"
    assert words in refused("profile", model, "--prompts", prompts_file, "-o", path)
    assert "give a file with --prompts" in refused("profile", model, "-o", path)
    assert not path.exists()


def test_a_broken_folder_is_refused(
    tmp_path: Path, variant: Variant, prompts_file: Path, refused: Refused
) -> None:
    folder = variant()
    (folder / "transformer" / "config.json").unlink()
    line = refused("profile", folder, "--prompts", prompts_file, "-o", tmp_path / "p")
    assert "cannot load the pipeline" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "{old}"],
        ["solve", "{old}", "--speedup", "2", "-o", "{new}"],
        ["merge", "{old}", "-o", "{new}"],
        ["refit", "{old}", "--speedup", "2"],
        ["generate", "emoji-flux", "a cat", "--policy", "{old}", "-o", "{new}"],
        ["profile", "emoji-flux", "-o", "{old}"],
        ["calibrate", "emoji-flux", "-o", "{old}"],
    ],
)
@pytest.mark.usefixtures("no_model")
def test_a_file_of_an_old_format(
    arguments: list[str], old_file: Path, tmp_path: Path, refused: Refused
) -> None:
    before, new = old_file.read_bytes(), tmp_path / "new.safetensors"
    line = refused(*(each.format(old=old_file, new=new) for each in arguments))
    assert str(old_file) in line
    assert "it has a format of before version 2" in line
    assert old_file.read_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_only_newlines_separate_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    breaks = "\u2028 \u2029 \x0b \x0c \x85 \x1c \r"
    path.write_bytes(f"\ufeff a{breaks}b\t\r\n\r\n\x0c\nc\u2028\n".encode())
    assert read_prompts(path) == [f"a{breaks}b", "c\u2028"]


def test_a_line_of_fifty_megabytes_is_refused(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"a cat\n" + b"x" * 50_000_000 + b"\na dog\n")
    line = refused("profile", "emoji-flux", "--prompts", path, "-o", tmp_path / "p")
    assert "line 2 has 50,000,000 characters, more than the limit of 10,000" in line
    path.write_text("x" * MAX_LINE)
    assert read_prompts(path) == ["x" * MAX_LINE]


def test_a_file_without_an_end_is_refused(
    tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Path("/dev/zero")
    if not endless.exists():
        pytest.skip("no such file here")
    monkeypatch.setattr(loading, "MAX_FILE", 1 << 20)
    line = refused("profile", "emoji-flux", "--prompts", endless, "-o", tmp_path / "p")
    assert "'/dev/zero': it has more than 1 MB" in line


def test_a_hundred_thousand_prompts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    prompts = [f"a cat of number {k}" for k in range(100_000)]
    path.write_text("\n".join(prompts))
    assert read_prompts(path) == prompts


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("command", ["profile", "calibrate"])
def test_100_000_prompts_are_refused_before_any_run(
    command: str, tmp_path: Path, refused: Refused
) -> None:
    assert loading.MAX_PROMPTS == MAX_PROMPTS
    path = tmp_path / "many.txt"
    path.write_text("".join(f"a cat {number}\n" for number in range(100_000)))
    line = refused(command, "emoji-flux", "--prompts", path, "-o", tmp_path / "new")
    assert "has 100,000 prompts, and a profile holds at most 10,000 runs: give --limit" in line
    assert list(tmp_path.iterdir()) == [path]
    assert len(choose_prompts("emoji-flux", path, limit=MAX_PROMPTS)) == MAX_PROMPTS


class Placed:
    """Notes where a pipeline is put."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def to(self, device: str) -> None:
        self.calls.append(("to", device))

    def enable_model_cpu_offload(self, device: str) -> None:
        self.calls.append(("model", device))

    def enable_sequential_cpu_offload(self, device: str) -> None:
        self.calls.append(("sequential", device))


@pytest.mark.parametrize(("offload", "call"), [("none", "to"), ("model", "model")])
def test_a_pipeline_is_moved_or_offloaded(offload: str, call: str) -> None:
    pipe = Placed()
    loading._place(pipe, "cuda:1", offload)
    loading._place(pipe, "cuda:1", "sequential")
    assert pipe.calls == [(call, "cuda:1"), ("sequential", "cuda:1")]


@pytest.mark.usefixtures("no_model")
def test_offloading_from_the_cpu_is_refused(tmp_path: Path, refused: Refused) -> None:
    options = ["--device", "cpu", "--offload", "model", "-o", tmp_path / "cat.png"]
    assert "the device is the cpu: leave it out" in refused(
        "generate", "emoji-flux", "a cat", *options
    )


def test_a_lora_changes_what_is_generated_and_is_in_the_profile(
    tmp_path: Path, run: Run, refused: Refused
) -> None:
    lora, options = tmp_path / "style.safetensors", ["--steps", 4, "--height", 32, "--width", 32]
    save_lora(lora)
    for name, more in (("plain", []), ("styled", ["--lora", lora])):
        place = ["-o", tmp_path / f"{name}.png"]
        done = run("generate", "emoji-flux", "a cat", *options, *more, *place)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "plain.png").read_bytes() != (tmp_path / "styled.png").read_bytes()
    profile = tmp_path / "profile.safetensors"
    command = ["profile", "emoji-flux", "--limit", 2, *options, "-o", profile]
    assert run(*command, "--lora", lora).exit_code == 0
    assert Policy.load(profile).provenance["lora"] == str(lora)
    assert f"it was made with --lora {lora}" in refused(*command)
    assert run(*command, "--lora", lora).exit_code == 0


def save_lora(path: Path) -> None:
    """A LoRA of large random weights for one layer of the bundled network."""
    name = "transformer.transformer_blocks.0.attn.to_q"
    layer = load_pipeline("emoji-flux").transformer.transformer_blocks[0].attn.to_q
    generator = torch.Generator().manual_seed(0)
    shapes = {"A": (2, layer.in_features), "B": (layer.out_features, 2)}
    save_file(
        {
            f"{name}.lora_{side}.weight": torch.randn(shape, generator=generator)
            for side, shape in shapes.items()
        },
        path,
    )
