from __future__ import annotations

from pathlib import Path

from PIL import Image

from ertacache.formats.policy import Policy
from tests.cli.conftest import Run


def test_the_demo_in_small(run: Run, tmp_path: Path) -> None:
    result = run("demo", "--prompts", 2, "--heldout", 2, "-o", tmp_path / "out")
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines()]
    computed = {tuple(words[:2]): words[2] for words in lines if len(words) > 4}
    assert computed[("ertacache", "2x")] == "15"
    assert computed[("ertacache", "3x")] == "10"
    assert computed[("fewer", "steps")] in ("15", "10")
    picture = Image.open(tmp_path / "out" / "comparison.png")
    assert picture.height > 5 * 128  # full, 2x, difference, 3x, difference
    for speedup, steps in ((2, 15), (3, 10)):
        policy = Policy.load(tmp_path / "out" / f"emoji-flux-{speedup}x.safetensors")
        assert len(policy.compute_steps) == steps
