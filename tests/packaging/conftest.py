"""The wheel of this checkout, and the Python versions of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.host import REPOSITORY

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""The Python versions in the classifiers."""


def uv(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run uv; return its output, or fail with its errors."""
    program = shutil.which(
        "uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    assert program is not None, "uv is needed to build and install: pip install uv"
    done = subprocess.run(
        [program, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "--quiet", "--wheel", "--out-dir", folder, REPOSITORY)
    (path,) = folder.glob("*.whl")
    return path


def find_python(version: str) -> Path | None:
    """Return an interpreter of this version: the running one, or from PATH or pyenv; or None."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        sys.executable,
        shutil.which(f"python{version}"),
        *sorted(versions.glob(f"{version}.*/bin/python")),
    ]
    code = "import sys; print('{}.{}'.format(*sys.version_info), sys._base_executable)"
    for candidate in filter(None, candidates):
        command = [str(candidate), "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found_version, _, base = done.stdout.strip().partition(" ")
        if done.returncode == 0 and found_version == version:
            return Path(base)
    return None


def files_of(folder: Path) -> set[str]:
    """Return everything below a folder, as relative paths."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}
