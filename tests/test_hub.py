"""The hub: round trips, revisions, what is refused, the card, and where the token must not be."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ertacache.core.frontier import KnownSchedule
from ertacache.formats.policy import Policy, PolicyError, ValidationRow
from ertacache.hub import check_push, draw_frontier, make_card, open_policy, pull, push
from tests.hubserver import READ_ONLY, TOKEN, Hub
from tests.hubserver import hub as hub  # a fixture

GOLDEN = Path(__file__).parent / "formats" / "golden" / "policy-v2.safetensors"
REPO = "ada/flux-policy"


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A policy with a profile, a frontier, measured rows, and a private folder as its model."""
    found = Policy.load(GOLDEN)
    plan = found.default
    computed, steps = len(plan.compute_steps), plan.num_steps
    rows = (
        ValidationRow("policy", computed, psnr=46.54, speedup=1.9, prompts=24),
        ValidationRow("plain reuse", computed, psnr=31.0, speedup=2.0, prompts=24),
        ValidationRow("fewer steps", computed, psnr=30.0, speedup=2.0, prompts=24),
    )
    assert found.profile is not None
    frontier = tuple(
        KnownSchedule(tuple(range(size)), 0.1 / size) for size in range(2, found.profile.num_steps)
    )
    assert steps == found.profile.num_steps
    return replace(
        found,
        plans=(replace(plan, validation=rows),),
        frontier=frontier,
        unit_psnr=12.0,
        provenance={
            "command": "ertacache calibrate /home/ada/flux --prompts /home/ada/secret.txt",
            "model": "/home/ada/flux",
            "network calls": "profile 60 = 60",
        },
    )


def test_a_round_trip(hub: Hub, policy: Policy) -> None:
    place = policy.push_to_hub(REPO)
    repo = hub.repos[REPO]
    assert place == f"hub:{REPO}@{repo.refs['main']}"
    assert not repo.private
    files = repo.commits[repo.refs["main"]]
    assert set(files) == {".gitattributes", "policy.safetensors", "README.md", "frontier.png"}
    assert files["policy.safetensors"] == policy._to_bytes()
    assert Policy.from_pretrained(REPO)._to_bytes() == policy._to_bytes()
    assert open_policy(place)._to_bytes() == policy._to_bytes()
    # Policy and plot went through LFS, the card with the commit.
    assert len(hub.objects) == 2


def test_a_second_read_downloads_nothing(hub: Hub, policy: Policy) -> None:
    place = push(policy, REPO)
    pull(REPO)
    hub.requests.clear()
    pull(REPO)
    assert {line.split()[0] for line in hub.requests} == {"HEAD"}
    hub.requests.clear()
    open_policy(place)  # a commit never changes
    assert hub.requests == []
    hub.failing = 503
    assert pull(REPO)._to_bytes() == policy._to_bytes()  # from the cache


def test_revisions(hub: Hub, policy: Policy) -> None:
    first = push(policy, REPO)
    repo = hub.repos[REPO]
    repo.refs["v1"] = repo.refs["draft"] = repo.refs["main"]
    other = replace(policy, unit_psnr=20.0)
    second = push(other, REPO)
    assert first != second
    assert pull(REPO).unit_psnr == 20.0
    for revision in ("v1", first.split("@")[1]):
        assert pull(REPO, revision=revision).unit_psnr == 12.0
        assert open_policy(f"hub:{REPO}@{revision}").unit_psnr == 12.0
    push(replace(policy, unit_psnr=30.0), REPO, revision="draft")
    assert [pull(REPO, revision=name).unit_psnr for name in ("main", "draft")] == [20.0, 30.0]
    with pytest.raises(PolicyError, match=r"'hub:ada/flux-policy@v9': there is no such revision$"):
        open_policy(f"hub:{REPO}@v9")
    with pytest.raises(PolicyError, match=r"cannot push to ada/flux-policy: there is no such rev"):
        push(policy, REPO, revision="v9")


def test_the_same_policy_again_is_no_new_commit(hub: Hub, policy: Policy) -> None:
    first = push(policy, REPO)
    assert push(policy, REPO) == first
    assert len(hub.repos[REPO].commits) == 2  # that of the new repository, and the policy's


def test_private_repositories(hub: Hub, policy: Policy, tmp_path: Path) -> None:
    push(policy, REPO, private=True)
    assert hub.repos[REPO].private
    assert pull(REPO)._to_bytes() == policy._to_bytes()
    shutil.rmtree(tmp_path / "cache")
    for token in (READ_ONLY, "hf_unknown"):
        with pytest.raises(PolicyError, match="no such repository, or the token may not read it"):
            pull(REPO, token=token)


def test_what_is_public_does_not_become_private_in_silence(hub: Hub, policy: Policy) -> None:
    push(policy, REPO)
    with pytest.raises(PolicyError, match="it is public: make it private on its page, or give ano"):
        push(replace(policy, unit_psnr=20.0), REPO, private=True)
    assert pull(REPO).unit_psnr == 12.0


def test_an_organisation_of_the_account(hub: Hub, policy: Policy) -> None:
    assert push(policy, "lovelace/policy").startswith("hub:lovelace/policy@")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"model.safetensors": b""}, "the repository has no policy.safetensors"),
        ({"policy.safetensors": b"\x80\x04\x95 a pickle"}, "cannot load 'hub:ada/other': "),
        ({"policy.safetensors": b""}, "cannot load 'hub:ada/other': "),
        ({"policy.safetensors": GOLDEN.read_bytes()[:-9]}, "cannot load 'hub:ada/other': "),
        (
            {"policy.safetensors": (GOLDEN.parent / "policy-v1.safetensors").read_bytes()},
            "calibrate again",
        ),
    ],
)
def test_what_is_not_a_policy(files: dict[str, bytes], words: str, hub: Hub) -> None:
    hub.add("ada/other", files)
    with pytest.raises(PolicyError, match=words):
        pull("ada/other")


def test_a_file_beyond_the_limit_is_not_downloaded(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, {"policy.safetensors": GOLDEN.read_bytes()})
    monkeypatch.setattr("ertacache.hub.MAX_FILE_BYTES", 100)
    with pytest.raises(
        PolicyError, match=r"its policy.safetensors has \d+ bytes, more than the limit 100"
    ):
        pull(REPO)
    assert not any(line.startswith("GET") for line in hub.requests)


def test_an_interrupted_download_is_continued(hub: Hub, policy: Policy) -> None:
    push(policy, REPO)
    hub.cuts = 3
    assert pull(REPO)._to_bytes() == policy._to_bytes()
    assert hub.cuts == 0


def test_a_download_that_never_ends_well_leaves_no_file(
    hub: Hub, policy: Policy, tmp_path: Path
) -> None:
    push(policy, REPO)
    hub.cuts = 10_000
    with pytest.raises(PolicyError, match="cannot load 'hub:ada/flux-policy': "):
        pull(REPO)
    assert not list(tmp_path.rglob("policy.safetensors"))
    hub.cuts = 0
    assert pull(REPO)._to_bytes() == policy._to_bytes()


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    hub.failing = 500
    with pytest.raises(PolicyError, match="cannot load 'hub:ada/flux-policy': "):
        pull(REPO)
    gone = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", gone)
    with pytest.raises(PolicyError, match="the hub cannot be reached, and there is no copy"):
        pull(REPO)


@pytest.mark.parametrize("name", ["flux", "a/b/c", "/flux", "ada/", "../flux", "ada/fl ux", ""])
def test_names_that_no_repository_has(name: str, hub: Hub, policy: Policy) -> None:
    for use in (pull, lambda repo: push(policy, repo), check_push):
        with pytest.raises(PolicyError, match="give a repository as user/repo"):
            use(name)
    with pytest.raises(PolicyError, match="give a repository as user/repo"):
        push(policy, REPO, base_model=name)
    assert hub.requests == []


def test_names_that_only_the_hub_refuses(hub: Hub, policy: Policy) -> None:
    for use in (pull, check_push):
        with pytest.raises(PolicyError, match="give a repository as user/repo"):
            use("ada/flux--1")


def test_what_is_checked_before_a_push(
    hub: Hub, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PolicyError, match="the token is of ada, lovelace, and not of bob"):
        check_push("bob/policy")
    hub.add("ada/model", {"README.md": b"# My model\n"})
    with pytest.raises(PolicyError, match=r"a README.md that is not of a policy and would be over"):
        push(policy, "ada/model")
    assert len(hub.repos["ada/model"].commits) == 1
    with pytest.raises(PolicyError, match="Invalid user token"):
        check_push(REPO, token="hf_unknown")
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(PolicyError, match="there is no token: set HF_TOKEN, or run hf auth login"):
        check_push(REPO)
    assert list(hub.repos) == ["ada/model"]
    monkeypatch.setattr("ertacache.hub.find_spec", lambda name: None)
    with pytest.raises(PolicyError, match=r'pip install "ertacache\[plots\]"'):
        check_push(REPO, token=TOKEN)


def _refused(use: Callable[[], Any]) -> str:
    with pytest.raises(PolicyError) as caught:
        use()
    # A traceback shows no other error, which might show more.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def test_the_token_is_nowhere(
    hub: Hub,
    policy: Policy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in files, messages and logs, whatever goes wrong."""
    caplog.set_level(logging.DEBUG)
    logging.getLogger("huggingface_hub").setLevel(logging.DEBUG)
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    monkeypatch.chdir(tmp_path)
    said = [push(policy, REPO, token=TOKEN), repr(pull(REPO, token=TOKEN))]
    said.append(_refused(lambda: pull("ada/absent", token=TOKEN)))
    said.append(_refused(lambda: push(policy, "bob/policy", token=TOKEN)))
    said.append(_refused(lambda: pull(TOKEN, token=TOKEN)))
    for broken in (f"{TOKEN}\n", f"{TOKEN} x", f"{TOKEN}é"):
        said.append(_refused(lambda given=broken: push(policy, REPO, token=given)))
        said.append(_refused(lambda given=broken: pull("ada/absent", token=given)))
    for status in (401, 403, 429, 500):
        hub.failing = status
        said.append(_refused(lambda: push(policy, REPO, token=TOKEN)))
        said.append(_refused(lambda: pull("ada/absent", token=TOKEN)))
    logging.getLogger("huggingface_hub").setLevel(logging.WARNING)
    assert caplog.records
    output = capfd.readouterr()
    everything = [*said, caplog.text, output.out, output.err]
    everything += [path.read_bytes().decode("latin-1") for path in _files(tmp_path)]
    everything += [data.decode("latin-1") for data in hub.objects.values()]
    everything += [
        data.decode("latin-1")
        for repo in hub.repos.values()
        for files in repo.commits.values()
        for data in files.values()
    ]
    assert len(_files(tmp_path)) >= 1
    for text in everything:
        assert TOKEN not in text
        assert TOKEN[3:20] not in text


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.slow
def test_a_process_of_its_own_with_its_environment(
    hub: Hub, policy: Policy, tmp_path: Path
) -> None:
    """As users do it: HF_ENDPOINT and HF_TOKEN are set, nothing is replaced."""
    push(policy, REPO)
    code = (
        "import ertacache; p = ertacache.Policy.from_pretrained('ada/flux-policy'); "
        "print(p.unit_psnr, p.push_to_hub('ada/copy'))"
    )
    own = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | own,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("12.0 hub:ada/copy@")
    assert "ada/copy" in hub.repos
    assert TOKEN not in done.stdout + done.stderr


def test_the_card(policy: Policy) -> None:
    card = make_card(policy, REPO)
    plan = policy.default
    share = f"{len(plan.compute_steps)} of {plan.num_steps}"
    assert card.startswith("---\nlibrary_name: ertacache\ntags:\n")
    row = f"| {share} | **this policy** (trajectory) | 46.5 dB | 1.90x | 24 held-out prompts |"
    assert row in card
    assert f"| {share} | fewer steps | 30.0 dB | 2.00x | 24 held-out prompts |" in card
    assert f'ertacache.attach(pipe, "hub:{REPO}", speedup=' in card
    assert "![PSNR to the full run against the speed-up](frontier.png)" in card
    assert policy.fingerprint.denoiser_hash in card
    assert policy.fingerprint.pipeline in card
    # Neither prompts nor paths nor the command line.
    assert policy.profile is not None
    assert f"{policy.profile.num_runs} full runs of {plan.num_steps} steps" in card
    assert not any(run.prompt in card for run in policy.profile.runs)
    assert "/home" not in card
    assert "secret" not in card
    assert "| calibrated with | flux |" in card
    code = re.findall(r"```python\n(.*?)```", card, re.S)
    compile(code[0], "card", "exec")


def test_the_card_of_a_hub_model(policy: Policy) -> None:
    card = make_card(policy, REPO, base_model="owner/model.1-dev")
    assert "\nbase_model: owner/model.1-dev\n---\n" in card
    assert 'DiffusionPipeline.from_pretrained("owner/model.1-dev")' in card
    assert "| calibrated with | owner/model.1-dev |" in card


def test_strings_of_a_file_are_no_markup(policy: Policy) -> None:
    """A policy of a stranger may hold any string."""
    bad = "x | y\n\n# [a](b) <script>`"
    facts = replace(policy.fingerprint, pipeline=bad, scheduler=bad)
    rows = (replace(policy.default.validation[0], method=bad),)
    plan = replace(policy.default, validation=rows)
    card = make_card(
        replace(policy, fingerprint=facts, plans=(plan,), provenance={"model": bad}), REPO
    )
    assert "\n# [a]" not in card
    assert not re.search(r"(?<!\\)\]\(b\)", card)
    assert not re.search(r"(?<!\\)<script", card)


@pytest.mark.parametrize("name", ["C:\\Users\\ada\\flux", "./flux", "/a/flux", "~/x/flux"])
def test_the_folder_of_a_model_stays_private(name: str, policy: Policy) -> None:
    assert "| calibrated with | flux |" in make_card(
        replace(policy, provenance={"model": name}), REPO
    )


def test_the_plot(policy: Policy) -> None:
    data = draw_frontier(policy)
    assert data is not None
    with Image.open(BytesIO(data)) as image:
        assert image.format == "PNG"
        assert image.size == (1050, 600)
        assert not image.info.keys() & {"Software", "Author", "Creation Time"}
    assert draw_frontier(policy) == data


def test_a_profile_alone(hub: Hub, policy: Policy) -> None:
    """Nothing measured, nothing predicted in decibels: no plot, and the card says so."""
    bare = replace(policy, plans=(), fits=(), frontier=(), unit_psnr=None)
    assert draw_frontier(bare) is None
    push(bare, REPO)
    repo = hub.repos[REPO]
    files = repo.commits[repo.refs["main"]]
    assert "frontier.png" not in files
    assert b"Nothing was measured on held-out prompts." in files["README.md"]
    assert b"frontier.png" not in files["README.md"]
