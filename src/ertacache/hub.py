"""Policies on the Hugging Face hub: one repository per policy, with a generated model card.

A repository holds the policy file, the card and the plot of the card. What comes back is read as
any policy file is: checked to the last byte, nothing unpickled. A token goes to the hub and nowhere
else: no file, message or log holds it. The card has neither prompts nor paths.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import inf, log10
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any

from ertacache import figures
from ertacache.formats.container import MAX_FILE_BYTES
from ertacache.formats.fitted import OWN_ROW, FittedPlan
from ertacache.formats.policy import Policy, PolicyError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

__all__ = ["PREFIX", "check_push", "draw_frontier", "make_card", "open_policy", "pull", "push"]

PREFIX = "hub:"
"""Begins the name of a policy on the hub, as in ``hub:user/repo@revision``."""

POLICY, CARD, PLOT = "policy.safetensors", "README.md", "frontier.png"
LIBRARY = "library_name: ertacache"
_MEASURED = (OWN_ROW, "fewer steps", "plain reuse")  # rows of the plot
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_NOT_A_NAME = "give a repository as user/repo, of letters, digits, dots, dashes and underscores"
_CAPTION = f"""![PSNR to the full run against the speed-up]({PLOT})

The line is the prediction for plans that are solved when a run starts. Points were measured; plans
that were refitted on the network tend to be better than their prediction."""
_LOG = logging.getLogger("ertacache")


def open_policy(source: Policy | str | os.PathLike[str]) -> Policy:
    """A policy as it is given: itself, the path of its file, or ``hub:user/repo@revision``.

    Raises:
        PolicyError: if it cannot be read.
    """
    if isinstance(source, Policy):
        return source
    name = os.fspath(source)
    if not name.startswith(PREFIX):
        return Policy.load(source)
    repo, _, revision = name.removeprefix(PREFIX).partition("@")
    return pull(repo, revision=revision or None)


def pull(repo: str, *, revision: str | None = None, token: str | None = None) -> Policy:
    """Download a policy from the hub, or take it from the hub's cache on this machine.

    Args:
        repo: the repository, ``user/repo``.
        revision: branch, tag or commit; the newest if not given.
        token: for private repositories; by default the one of ``HF_TOKEN`` or ``hf auth login``.

    Raises:
        PolicyError: if it cannot be downloaded, or is not a policy.
    """
    from huggingface_hub import hf_hub_download

    place = f"{PREFIX}{repo}{'' if revision is None else f'@{revision}'}"
    with _readable(f"load {place!r}", token):
        _check_repo(repo)
        wanted: dict[str, Any] = {"revision": revision, "token": token}
        found = hf_hub_download(repo, POLICY, dry_run=True, **wanted)
        size = found.file_size or 0
        if size > MAX_FILE_BYTES:
            raise PolicyError(
                f"its {POLICY} has {size} bytes, more than the limit {MAX_FILE_BYTES}"
            )
        data = Path(hf_hub_download(repo, POLICY, **wanted)).read_bytes()
    return Policy._from_bytes(data, place)


def push(
    policy: Policy,
    repo: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | None = None,
    base_model: str | None = None,
) -> str:
    """Upload a policy with its model card in one commit; the repository is made if there is none.

    Args:
        policy: the policy. Its file holds the calibration prompts and the command line.
        repo: the repository, ``user/repo``.
        private: whether a new repository is private; by default as the account is set up.
        revision: an existing branch; by default the main one.
        token: with write access; by default the one of ``HF_TOKEN`` or ``hf auth login``.
        base_model: hub id of the pipeline, for the card.

    Returns:
        What was written, as ``attach`` takes it: ``hub:user/repo@commit``.

    Raises:
        PolicyError: if the hub refuses it, or the repository has a card of something else.
    """
    from huggingface_hub import CommitOperationAdd

    if base_model is not None:
        with _readable(f"push with the base model {base_model!r}", token):
            _check_repo(base_model)
    api = check_push(repo, token=token, private=private)
    plot = draw_frontier(policy)
    card = make_card(policy, repo, plot=plot is not None, base_model=base_model)
    files = {POLICY: policy._to_bytes(), CARD: card.encode()} | ({PLOT: plot} if plot else {})
    with _readable(f"push to {repo}", token):
        api.create_repo(repo, private=private, exist_ok=True)
        commit = api.create_commit(
            repo,
            [CommitOperationAdd(name, content) for name, content in files.items()],
            commit_message=str(policy).splitlines()[0],
            revision=revision,
        )
    if policy.profile is not None and not private:
        _LOG.info(
            "%s has the policy with its %d calibration prompts and its command line, for all who "
            "may read the repository",
            repo,
            policy.profile.num_runs,
        )
    return f"{PREFIX}{repo}@{commit.oid}"


def check_push(repo: str, *, token: str | None = None, private: bool | None = None) -> HfApi:
    """Raise unless a policy can be pushed; nothing is written. Returns how the hub is reached.

    Checked are the name, the token with the hub, that no card of something else is there, and that
    what is to be private is not public already.

    Raises:
        PolicyError: with what to do.
    """
    from huggingface_hub import HfApi, get_token

    with _readable(f"push to {repo}", token):
        _check_repo(repo)
        if find_spec("matplotlib") is None:
            raise PolicyError('the card has a plot: pip install "ertacache[plots]"')
        if (token or get_token()) is None:
            raise PolicyError("there is no token: set HF_TOKEN, or run hf auth login")
        api = HfApi(token=token, library_name="ertacache")
        account = api.whoami()
        names = [account["name"], *(group["name"] for group in account.get("orgs", ()))]
        owner = repo.partition("/")[0]
        if owner.lower() not in [name.lower() for name in names]:
            raise PolicyError(f"the token is of {', '.join(names)}, and not of {owner}")
        if private and _is_public(api, repo):
            raise PolicyError("it is public: make it private on its page, or give another name")
        if _other_card(api, repo):
            raise PolicyError(
                f"it has a {CARD} that is not of a policy and would be overwritten: give the "
                "policy a repository of its own"
            )
    return api


def _is_public(api: HfApi, repo: str) -> bool:
    """Whether a repository is there for everyone."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return not api.repo_info(repo).private
    except RepositoryNotFoundError:
        return False


def _other_card(api: HfApi, repo: str) -> bool:
    """Whether a repository has a card that was not made here."""
    from huggingface_hub.errors import RemoteEntryNotFoundError, RepositoryNotFoundError

    try:
        path = api.hf_hub_download(repo, CARD)
    except (RemoteEntryNotFoundError, RepositoryNotFoundError):
        return False
    with open(path, encoding="utf-8", errors="replace") as stream:
        return LIBRARY not in stream.read().splitlines()


def _check_repo(repo: str) -> None:
    """Raise unless a repository is named with its owner; the hub's own rules are its matter."""
    if not _NAME.fullmatch(repo):
        raise PolicyError(_NOT_A_NAME)


@contextmanager
def _readable(what: str, token: str | None) -> Iterator[None]:
    """Report whatever goes wrong with the hub in one line that does not hold the token."""
    from huggingface_hub import get_token

    secret = token or get_token()
    if secret and not (secret.isascii() and secret.isprintable() and " " not in secret):
        # The transport would print the header that it cannot send.
        raise PolicyError("the token has characters that no token has: copy it again")
    try:
        yield
    except Exception as error:  # which errors a transport raises depends on its version
        message = f"cannot {what}: {_reason(error)}"
        raise PolicyError(message.replace(secret, "(token)") if secret else message) from None


def _reason(error: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.HFValidationError):
        return _NOT_A_NAME
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return "the hub cannot be reached, and there is no copy of it on this machine"
    if isinstance(error, errors.GatedRepoError):
        return "access is restricted: ask for it on its page"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such repository, or the token may not read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return "there is no such revision"
    if isinstance(error, errors.EntryNotFoundError):
        return f"the repository has no {POLICY}: it is not of a policy"
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def make_card(
    policy: Policy, repo: str, *, plot: bool = True, base_model: str | None = None
) -> str:
    """The model card of a policy, in Markdown: what was measured, how to use it, what it is for."""
    facts, model = policy.fingerprint, _model_name(policy, base_model)
    parts = [
        _front_matter(base_model),
        f"# ertacache policy for {_plain(model or facts.pipeline)}",
        f"With this file ertacache evaluates the network of a `{_word(facts.pipeline)}` on a part "
        "of its sampling steps, and replaces it on the others by a fitted combination of earlier "
        "outputs. The result stays near that of the full run (uncached). One file serves every "
        "speed-up, number of steps and size. Weights and code of the pipeline stay as they are.",
        _measured(policy.plans),
        _CAPTION if plot else "",
        _usage(policy, repo, base_model),
        _facts(policy, model),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _front_matter(base_model: str | None) -> str:
    lines = ["---", LIBRARY, "tags:", *(f"- {tag}" for tag in ("ertacache", "diffusers", "cache"))]
    if base_model is not None:
        lines.append(f"base_model: {base_model}")
    return "\n".join([*lines, "---"])


def _measured(plans: Sequence[FittedPlan]) -> str:
    """The table of what was measured, all plans one below the other."""
    rows = [(plan, row) for plan in plans for row in plan.validation]
    if not rows:
        return "## Measured\n\nNothing was measured on held-out prompts."
    lines = [
        "## Measured",
        "",
        "PSNR of the decoded result to the full run of the same prompt and seed, and how many "
        "times faster it was on the machine that measured it.",
        "",
        "| computed steps | variant | PSNR | faster | measured on |",
        "|--:|---|--:|--:|---|",
    ]
    for plan, row in rows:
        own = row.method == OWN_ROW
        name = f"**this policy** ({plan.method})" if own else _plain(row.method)
        psnr = "identical" if row.psnr == inf else f"{row.psnr:.1f} dB"
        lines.append(
            f"| {row.computed_steps} of {plan.num_steps} | {name} | {psnr} | {row.speedup:.2f}x | "
            f"{row.measured_on} |"
        )
    return "\n".join(lines)


def _usage(policy: Policy, repo: str, base_model: str | None) -> str:
    name = policy.fingerprint.pipeline
    load = f"\npipe = ...  # your {_word(name)}"
    if base_model is not None:
        load = "from diffusers import DiffusionPipeline\n\n"
        load += f'pipe = DiffusionPipeline.from_pretrained("{base_model}")'
    speedup = f"{policy.plans[0].speedup:.3g}" if policy.plans else "2"
    return f"""## Use it

```python
import ertacache
{load}
ertacache.attach(pipe, "{PREFIX}{repo}", speedup={speedup})  # or min_psnr=45
image = pipe("a red panda").images[0]
```

On the command line, where MODEL is the pipeline. The second command measures whether the policy
holds for yours:

```bash
ertacache generate MODEL "a red panda" --policy {PREFIX}{repo} -o out
ertacache check MODEL {PREFIX}{repo} --prompts prompts.txt
```"""


def _facts(policy: Policy, model: str | None) -> str:
    """What the policy is for and what it was made from: neither prompts nor paths."""
    facts, profile = policy.fingerprint, policy.profile
    guidance = "; ".join(
        f"{name} {', '.join(f'{value:g}' for value in values)}"
        for name, values in facts.guidance.items()
    )
    rows = {
        "calibrated with": model,
        "pipeline": facts.pipeline,
        "network": f"{facts.denoiser}, {facts.dtype}",
        "network configuration": f"SHA-256 {facts.denoiser_hash}",
        "prediction": facts.prediction,
        "scheduler": facts.scheduler,
        "guidance": guidance or "none",
        "latent": " x ".join(map(str, facts.latent_shape)) or "a scalar",
        "profile": None
        if profile is None
        else f"{profile.num_runs} full runs of {profile.num_steps} steps",
        "network evaluations": policy.provenance.get("network calls"),
        "versions": ", ".join(f"{name} {text}" for name, text in facts.versions.items()),
    }
    lines = [f"| {name} | {_plain(text)} |" for name, text in rows.items() if text]
    head = ["## What it is for", "", "Another network is refused, other guidance is a warning.", ""]
    return "\n".join([*head, "| | calibrated runs |", "|---|---|", *lines])


def _model_name(policy: Policy, base_model: str | None) -> str | None:
    """The calibrated model; of a folder its name only. None if it is not known."""
    name = base_model or policy.provenance.get("model", "")
    if base_model is None and not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        name = PureWindowsPath(PurePosixPath(name).name).name
    return name or None


def _word(text: str) -> str:
    """A class name of a policy file as it can stand in code."""
    return re.sub(r"[^\w.]", "", text)[:100]


def _plain(text: str) -> str:
    """A string of a policy file as Markdown shows it: on one line, and no markup of its own."""
    line = " ".join("".join(c for c in text if c.isprintable() or c.isspace()).split())
    return re.sub(r"([\\`*_\[\]<>|#&])", r"\\\1", line)[:300]


def draw_frontier(policy: Policy) -> bytes | None:
    """The plot of the card as PNG: PSNR against speed-up; None if the policy knows neither."""
    predicted = _predictions(policy)
    measured = {
        method: [
            (plan.num_steps / row.computed_steps, row.psnr)
            for plan in policy.plans
            for row in plan.validation
            if row.method == method
        ]
        for method in _MEASURED
    }
    if not predicted and not any(measured.values()):
        return None
    return figures.to_png(figures.draw_frontier(predicted, measured))


def _predictions(policy: Policy) -> list[tuple[float, float]]:
    """Speed-up and predicted PSNR along the frontier, where both are known."""
    if policy.profile is None or policy.unit_psnr is None:
        return []
    found = []
    for known in policy.frontier:
        speedup = policy.profile.num_steps / len(known.compute_steps)
        if known.predicted_error > 0:
            found.append((speedup, policy.unit_psnr - 20 * log10(known.predicted_error)))
    return found
