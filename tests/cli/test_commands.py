"""The list of commands, their help, and what importing them loads."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import pytest
import typer.main

import ertacache.cli
from ertacache.cli import program
from ertacache.formats.policy import Policy
from ertacache.models import zoo
from tests.cli.conftest import Run, python
from tests.hubserver import MEMBERS, Hub
from tests.hubserver import hub as hub  # a fixture

HEAVY = {"torch", "diffusers", "transformers", "matplotlib"}
GROUP = typer.main.get_command(program)
COMMANDS = (
    "demo",
    "profile",
    "merge",
    "solve",
    "calibrate",
    "refit",
    "check",
    "generate",
    "inspect",
    "bench",
    "report",
    "metrics",
    "app",
)


def examples(text: str) -> list[str]:
    return [line[line.index("ertacache ") :] for line in text.splitlines() if is_example(line)]


def is_example(line: str) -> bool:
    return re.match(r"\s+(Example: )?ertacache [a-z]", line) is not None


def test_the_commands_are_these(run: Run) -> None:
    listed = re.findall(r"^  ([a-z]+) {2,}\w", run("--help").stdout.split("Commands:")[1], re.M)
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example_and_every_example_parses(name: str, run: Run) -> None:
    result = run(name, "--help")
    assert result.exit_code == 0
    found = examples(result.stdout)
    assert found
    for line in found:
        program, command, *arguments = shlex.split(line)
        assert (program, command) == ("ertacache", name)
        context = GROUP.commands[name].make_context(name, arguments)
        assert context.params.keys() & {"output", "file", "policy", "result", "folder"}


@pytest.mark.parametrize(
    "name",
    ["profile", "merge", "solve", "calibrate", "refit", "check", "generate", "inspect", "bench"],
)
def test_every_example_runs(
    name: str,
    policy_file: Path,
    profile_file: Path,
    hub: Hub,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To its end, or until it loads its model: that far, all options and files were right."""

    def load(model: str, dtype: object) -> None:
        raise ValueError("as far as this")

    monkeypatch.setattr(zoo, "load_pipeline", load)
    monkeypatch.setattr("ertacache.cli.check.find_spec", lambda name: name)  # all extras are there
    monkeypatch.setitem(MEMBERS, "ada", ["ada", "user"])
    hub.add("user/repo", {"policy.safetensors": policy_file.read_bytes()})
    monkeypatch.chdir(tmp_path)
    shutil.copy(policy_file, "policy.safetensors")
    shutil.copy(profile_file, "profile.safetensors")
    shutil.copy(profile_file, "part-1.safetensors")
    policy = Policy.load(profile_file)
    assert policy.profile is not None
    runs = tuple(replace(run, seed=run.seed + 100) for run in policy.profile.runs)
    replace(policy, profile=replace(policy.profile, runs=runs)).save("part-2.safetensors")
    for prompts in ("prompts.txt", "heldout.txt", "mine.txt", "others.txt"):
        Path(prompts).write_text(f"a cat of {prompts}\n")
    if name == "calibrate":  # which would not overwrite the profiled runs in it
        Path("policy.safetensors").unlink()
    for line in examples(run(name, "--help").stdout):
        result = run(*shlex.split(line)[1:])
        if name in ("merge", "solve", "inspect"):
            assert result.exit_code == 0, result.output
        else:
            assert result.exit_code == 2
            assert result.stderr.endswith(": as far as this\n")


def test_without_a_command_the_help_is_shown(run: Run) -> None:
    assert run().stdout == run("--help").stdout
    assert examples(run().stdout)


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"ertacache {ertacache.__version__}\n"


def test_help_loads_nothing_heavy() -> None:
    show = "program(['calibrate', '--help'], standalone_mode=False)"
    code = f"import sys; from ertacache.cli import program; {show}; print(*sys.modules)"
    loaded = set(python("-c", code).stdout.split())
    assert "typer" in loaded
    assert not {*HEAVY, "numpy", "PIL", "rich"} & loaded


def test_bad_options_load_nothing_heavy(tmp_path: Path) -> None:
    lines = (
        "--absent",
        "bench emoji-flux -o b.json --methods magic",
        "bench emoji-flux -o b.json --budgets nan",
        "bench emoji-flux -o b.json --heldout absent.txt",
        "check emoji-flux p.safetensors --speedup nan",
        "check emoji-flux p.safetensors --json check.txt",
        "check ./absent p.safetensors",
        "generate emoji-flux cat -o a.png --seeds x",
        "generate emoji-flux cat -o a.png --fps 0",
        "generate emoji-flux cat -o a.png --compare",
        "generate emoji-flux cat -o a.png --arg true_cfg_scale=NaN",
        "profile emoji-flux -o p.safetensors --prompts absent.txt",
        "solve p.safetensors -o q.safetensors --speedup nan",
    )
    runs = f"""
        import sys
        from ertacache.cli import program
        for line in {lines}:
            assert program(line.split(), standalone_mode=False) == 2, line
        print(*sys.modules)
    """
    done = python("-c", dedent(runs))
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(lines)
    assert not HEAVY & set(done.stdout.split())


def test_inspect_loads_no_pipeline_library(policy_file: Path) -> None:
    show = f"program(['inspect', {str(policy_file)!r}], standalone_mode=False)"
    code = f"import sys; from ertacache.cli import program; {show}; print(*sys.modules)"
    done = python("-c", code)
    assert done.stdout.startswith("policy ")
    assert done.stderr == "loading torch ...\n"
    assert HEAVY & set(done.stdout.splitlines()[-1].split()) == {"torch"}


def test_the_first_line_of_every_command_comes_before_torch_is_imported(
    policy_file: Path, prompts_file: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    lines = {
        "demo": f"-o {tmp_path}",
        "profile": f"emoji-flux -o {tmp_path}/new",
        "merge": f"{policy_file} -o {tmp_path}/new",
        "solve": f"{policy_file} --speedup 2 -o {tmp_path}/new",
        "calibrate": f"emoji-flux -o {tmp_path}/new",
        "refit": f"{policy_file} -o {tmp_path}/new",
        "check": f"emoji-flux {policy_file}",
        "generate": f"emoji-flux cat -o {tmp_path}/new",
        "inspect": policy_file,
        "bench": f"emoji-flux -o {tmp_path}/new.json",
        "report": f"absent.json -o {tmp_path}/new.html",
        "metrics": f"{prompts_file} {prompts_file}",
        "app": f"--folder {tmp_path} --no-browser --port {port}",
    }
    assert set(lines) == set(COMMANDS)
    code = """
        import sys
        from ertacache.cli import program
        class Stop:
            def find_spec(self, name, path=None, target=None):
                if name in ("torch", "diffusers"):
                    raise ValueError(f"imported {name}")
        sys.meta_path.insert(0, Stop())
        for line in sys.argv[1:]:
            assert program(line.split(), standalone_mode=False) == 2, line
    """
    done = python("-c", dedent(code), *(f"{name} {line}" for name, line in lines.items()))
    assert done.returncode == 0, done.stderr
    found = re.findall(r"loading (\w+) \.\.\.\nerror: imported (\w+)\n", done.stderr)
    assert len(found) == len(lines), done.stderr
    assert all(announced == imported for announced, imported in found)


def test_the_process_shows_the_help() -> None:
    assert python("-m", "ertacache.cli", "--help").returncode == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_function_of_the_module_of_its_name(name: str) -> None:
    module = import_module(f"ertacache.cli.{name}")
    assert getattr(ertacache.cli, name) is module
    assert callable(getattr(module, name))
    assert module.EXAMPLES


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("name", "before", "end"),
    [
        ("SIGTERM", "SIG_DFL", "interrupted"),
        ("SIGHUP", "SIG_DFL", "interrupted"),
        ("SIGHUP", "SIG_IGN", "went on"),
    ],
)
def test_a_time_limit_or_a_closed_terminal_is_an_interrupt(
    name: str, before: str, end: str
) -> None:
    """So that files are cleaned up and what is left is reported; under nohup a run goes on."""
    code = f"""
        import os, signal
        signal.signal(signal.{name}, signal.{before})
        import ertacache.cli as cli

        def program():
            try:
                os.kill(os.getpid(), signal.{name})
                print("went on")
            except KeyboardInterrupt:
                print("interrupted")

        cli.program = program
        cli.main()
    """
    assert python("-c", dedent(code)).stdout == f"{end}\n"


@pytest.mark.skipif(os.name != "posix", reason="a shell of POSIX")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_standard_streams(closed: str, policy_file: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.safetensors"
    command = [sys.executable, "-m", "ertacache.cli", "solve", policy_file, "--speedup", 2]
    line = shlex.join(map(str, [*command, "-o", new]))
    done = subprocess.run(["sh", "-c", f"{line} {closed}"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(Policy.load(new).plans) == 1


def test_the_help_fits_one_screen_with_an_example_of_every_command(run: Run) -> None:
    lines = run("--help", env={"COLUMNS": "80"}).stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert not any(line.endswith("...") for line in lines[1:])  # nothing is cut off
    assert [line.split()[1] for line in lines if is_example(line)] == list(COMMANDS)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ertacache cal", ["calibrate"]),
        ("ertacache generate emoji-f", ["emoji-flux"]),
        ("ertacache generate --off", ["--offload"]),
        ("ertacache generate --offload s", ["sequential"]),
    ],
)
def test_shell_completion(words: str, expected: list[str]) -> None:
    env = {"_ERTACACHE_COMPLETE": "complete_bash", "COMP_WORDS": words}
    env["COMP_CWORD"] = str(len(words.split()) - 1)
    done = subprocess.run(
        [sys.executable, "-m", "ertacache"],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == expected
    assert done.stderr == ""
