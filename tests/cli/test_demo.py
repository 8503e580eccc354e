"""``demo``: the table, the images and the policies."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from ertacache.formats.policy import Policy
from tests.cli.conftest import Run


def test_the_demo_in_small(run: Run, tmp_path: Path) -> None:
    result = run("demo", "--prompts", 2, "--heldout", 2, "--steps", 6, "-o", tmp_path / "out")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    computed = {tuple(words[:2]): words[2] for words in lines if len(words) > 4}
    assert computed[("ertacache", "2x")] == "3"
    assert computed[("ertacache", "3x")] == "2"
    assert computed[("fewer", "steps")] in ("3", "2")
    image = Image.open(tmp_path / "out" / "comparison.png")
    assert image.height > 5 * 128  # full, 2x, difference, 3x, difference
    for speedup, steps in ((2, 3), (3, 2)):
        policy = Policy.load(tmp_path / "out" / f"emoji-flux-{speedup}x.safetensors")
        assert len(policy.compute_steps) == steps
