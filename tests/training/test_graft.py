"""A larger network that begins with the weights of a smaller one does at first what it did."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from training.graft import graft, graft_folder


def _network(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(channels, 8), nn.GELU(), nn.Linear(8, channels))


def test_the_old_part_of_the_output_is_as_before():
    small, large = _network(3), _network(5)
    assert graft(large, small.state_dict()) == ["0.weight", "2.weight", "2.bias"]
    x = torch.randn(4, 5)
    torch.testing.assert_close(large(x)[:, :3], small(x[:, :3]))
    assert torch.equal(large(x)[:, 3:], torch.zeros(4, 2))


def test_new_weights_are_reached_by_gradients():
    large = _network(5)
    graft(large, _network(3).state_dict())
    large(torch.randn(4, 5)).square().sum().backward()
    assert large[0].weight.grad is not None
    assert (large[0].weight.grad[:, 3:] != 0).any()


def test_other_names_and_ranks_stay_as_they_were():
    module = _network(3)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    assert graft(module, {"0.weight": torch.ones(8), "9.weight": torch.ones(1)}) == []
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_folders_in_half_precision(tmp_path: Path):
    old = _network(3)
    (tmp_path / "net").mkdir()
    halved = {key: value.half() for key, value in old.state_dict().items()}
    save_file(halved, tmp_path / "net" / "model.safetensors")
    modules = nn.ModuleDict({"net": _network(4)})
    assert graft_folder(modules, tmp_path) == ["net.0.weight", "net.2.weight", "net.2.bias"]
    found = modules["net"].state_dict()["0.bias"]
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, old[0].bias.detach(), rtol=0, atol=1e-3)
