"""Loading of the weights that Open-Sora published.

The keys of the weights are those of our classes; only the names in ``config.json`` are translated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["load_original", "loaded", "transformer_config", "vae_config"]

Network = TypeVar("Network", bound=nn.Module)


def transformer_config(published: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a published ``config.json`` of STDiT3 into our argument names.

    Example:
        >>> transformer_config({"depth": 28, "hidden_size": 1152, "num_heads": 16})
        {'num_layers': 28, 'num_attention_heads': 16, 'attention_head_dim': 72}
    """
    names = {
        "depth": "num_layers",
        "num_heads": "num_attention_heads",
        "in_channels": "in_channels",
        "patch_size": "patch_size",
        "mlp_ratio": "mlp_ratio",
        "caption_channels": "caption_channels",
        "model_max_length": "max_sequence_length",
        "qk_norm": "qk_norm",
        "input_sq_size": "base_resolution",
    }
    config = {ours: published[theirs] for theirs, ours in names.items() if theirs in published}
    if "hidden_size" in published and "num_heads" in published:
        config["attention_head_dim"] = published["hidden_size"] // published["num_heads"]
    if "in_channels" in published and "pred_sigma" in published:
        config["out_channels"] = published["in_channels"] * (2 if published["pred_sigma"] else 1)
    return config


def vae_config(published: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a published ``config.json`` of the autoencoder into our argument names.

    Example:
        >>> vae_config({"micro_frame_size": 17, "cal_loss": False})
        {'micro_frame_size': 17}
    """
    names = {
        "micro_frame_size": "micro_frame_size",
        "shift": "latents_mean",
        "scale": "latents_std",
    }
    config = {ours: published[theirs] for theirs, ours in names.items() if theirs in published}
    spatial = published.get("vae_2d") or {}
    if spatial.get("micro_batch_size") is not None:
        config["micro_batch_size"] = spatial["micro_batch_size"]
    return config


def load_original(
    kind: Callable[..., Network],
    source: str | os.PathLike[str],
    *,
    read_config: Callable[[Mapping[str, Any]], dict[str, Any]],
    changes: Mapping[str, Any],
    dtype: torch.dtype,
) -> Network:
    """Build a network and load published weights; the keys must match exactly.

    Args:
        kind: the class.
        source: a ``.safetensors`` file, a folder or a hub id.
        read_config: translates the published configuration into arguments of ``kind``.
        changes: arguments that override it.
        dtype: precision of the weights.

    Raises:
        FileNotFoundError: if there are no weights.
        ValueError: if keys or shapes differ from those of the class.
    """
    files, config_file = _locate(source)
    published = json.loads(config_file.read_text(encoding="utf-8")) if config_file else {}
    with torch.device("meta"):  # the fresh weights are replaced, so they need no memory
        network = kind(**(read_config(published) | dict(changes)))
    state: dict[str, Tensor] = {}
    for file in files:
        state |= {key: value.to(dtype) for key, value in load_file(file).items()}
    _check(network, state, source)
    network.load_state_dict(state, assign=True)
    note: Any = getattr(network, "register_to_config", None)
    if note is not None:
        note(_name_or_path=os.fspath(source))  # as diffusers does; some methods look it up
    return network.eval()


def loaded(kind: Any, source: Any, *, dtype: torch.dtype) -> Any:
    """Return ``source`` if it is an instance of ``kind``, else load it from there."""
    return source if isinstance(source, kind) else kind.from_original(source, dtype=dtype)


def _locate(source: str | os.PathLike[str]) -> tuple[list[Path], Path | None]:
    """The weight files, and the configuration next to them, if there is one."""
    path = Path(source)
    if path.is_file():
        files, folder = [path], path.parent
    elif path.is_dir():
        files, folder = sorted(path.glob("*.safetensors")), path
    else:
        files, folder = _download(os.fspath(source))
    if not files:
        raise FileNotFoundError(f"{source} contains no .safetensors file")
    config = folder / "config.json"
    return files, config if config.is_file() else None


def _download(hub_id: str) -> tuple[list[Path], Path]:
    from transformers.utils.hub import cached_file

    try:
        files = [cached_file(hub_id, name) for name in ("model.safetensors", "config.json")]
    except OSError as error:
        raise FileNotFoundError(
            f"{hub_id} is neither a file, nor a folder, nor a hub id with a model.safetensors"
        ) from error
    weights, config = (Path(str(file)) for file in files)
    return [weights], config.parent


def _check(network: nn.Module, state: Mapping[str, Tensor], source: object) -> None:
    wanted = {key: tuple(value.shape) for key, value in network.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in state.items()}
    if wanted == found:
        return
    wrong = {
        "missing": sorted(wanted.keys() - found.keys()),
        "unknown": sorted(found.keys() - wanted.keys()),
        "of another shape": sorted(
            k for k in wanted.keys() & found.keys() if wanted[k] != found[k]
        ),
    }
    words = [f"{len(keys)} {how} (such as {keys[0]})" for how, keys in wrong.items() if keys]
    raise ValueError(
        f"the weights in {source} are not those of {type(network).__name__}: {', '.join(words)}"
    )
