"""Installations of users: the wheel, an editable checkout, a tool environment."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.packaging.conftest import PYTHONS, files_of, uv
from tests.support.host import (
    PTH,
    REPOSITORY,
    Environment,
    make_environment,
    place_of_transformers,
)


def quick_environment(folder: Path) -> Environment:
    """Make an environment with stock mlx-lm for programs that load no model."""
    return replace(make_environment(folder / "venv"), path=place_of_transformers(folder))


def assert_activates(environment: Environment) -> None:
    """Start the server with and without --plugin. test_startup.py tests the .pth file itself."""
    for form in (("mlx_lm.server",), ("python", "-m", "mlx_lm.server")):
        done = environment.run(*form, "--plugin", "kvpersist", "--help")
        assert done.returncode == 0, done.stderr
        assert "--kvpersist-dir" in done.stdout, form
    assert "kvpersist" not in environment.run("mlx_lm.server", "--help").stdout


def test_the_wheel_has_the_pth_file_next_to_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read(PTH.name) == PTH.read_bytes()
    assert "mlx_lm_kvpersist/_startup.py" in names


def test_the_wheel_contains_only_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    (dist_info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"mlx_lm_kvpersist", PTH.name, dist_info}
    assert "mlx_lm_kvpersist/py.typed" in names
    assert not any("support" in name or "synthetic" in name for name in names)


def test_the_source_distribution_contains_all_tracked_files(tmp_path: Path) -> None:
    uv("build", "--quiet", "--sdist", "--out-dir", tmp_path, REPOSITORY)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"models_check/__main__.py", "patches_check/__main__.py", "LICENSE"}
    if (REPOSITORY / ".git").exists():  # otherwise this is an unpacked source distribution
        listed = subprocess.check_output(["git", "ls-files"], text=True, cwd=REPOSITORY)
        assert set(listed.split("\n")) - {""} - names == set()


def test_the_metadata_has_python_versions_and_project_urls(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    # twine 6.1, in the action that publishes, refuses 2.5.
    assert metadata["Metadata-Version"] == "2.4"
    classifiers = metadata.get_all("Classifier", [])
    minors = [
        classifier.rpartition(" ")[2] for classifier in classifiers if "Python :: 3." in classifier
    ]
    assert minors == list(PYTHONS)
    assert metadata["Requires-Python"] == f">={PYTHONS[0]}"
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert urls.keys() >= {"Homepage", "Documentation", "Issues", "Changelog"}
    assert all(url.startswith("https://") for url in urls.values())


def test_the_wheel_activates_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Stock mlx-lm comes from this environment, the package only from the wheel."""
    environment = quick_environment(tmp_path)
    uv("pip", "install", "--quiet", "--no-deps", "--python", environment.python, wheel)
    assert (environment.site_packages / PTH.name).is_file()
    where = environment.run("python", "-c", "import mlx_lm_kvpersist as p; print(p.__file__)")
    assert where.stdout.startswith(str(environment.site_packages))
    assert_activates(environment)


@pytest.mark.parametrize("tool", ["uv", "pip"])
def test_uninstalling_removes_installed_and_compiled_files(
    wheel: Path, tmp_path: Path, tool: str
) -> None:
    """Installed files and compiled files are removed.

    No installer removes files that Python compiled with -O or -OO, for any package.
    """
    environment = make_environment(tmp_path / "venv")
    before = files_of(environment.folder)
    if tool == "uv":
        target = ("--quiet", "--python", str(environment.python))
        install, uninstall = ["uv", "pip", "install", *target], ["uv", "pip", "uninstall", *target]
    else:
        pip = [sys.executable, "-m", "pip", "--python", str(environment.python)]
        install, uninstall = [*pip, "install", "-q"], [*pip, "uninstall", "-q", "-y"]
    run_tool(*install, "--no-deps", wheel)
    command = ("python", "-m", "mlx_lm_kvpersist", "--version")
    compiles = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": ""}
    assert environment.run(*command, env=compiles).returncode == 0
    added = files_of(environment.folder) - before
    assert any("kvpersist/cli/__pycache__/" in name for name in added), "nothing was compiled"
    run_tool(*uninstall, "mlx-lm-kvpersist")
    assert files_of(environment.folder) - before <= {".lock"}, "uv's own"


def run_tool(*command: str | Path) -> None:
    """Run an installer, or fail with its output."""
    program, *arguments = command
    if program == "uv":
        uv(*arguments)
        return
    env = {**os.environ, "PYTHONPYCACHEPREFIX": ""}  # otherwise pip leaves compiled files
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_an_editable_install_activates(tmp_path: Path) -> None:
    environment = quick_environment(tmp_path)
    uv("pip", "install", "--quiet", "--no-deps", "--python", environment.python, "-e", REPOSITORY)
    assert_activates(environment)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_install_with_dependencies_from_the_index_activates(wheel: Path, tmp_path: Path) -> None:
    """The dependencies come from the index, as in a user's first installation."""
    folder = tmp_path / "venv"
    uv("venv", "--quiet", "--python", sys.executable, folder)
    environment = Environment(folder)
    extra = "" if sys.platform == "darwin" else "[cpu]"
    uv("pip", "install", "--quiet", "--python", environment.python, f"{wheel}{extra}")
    assert_activates(environment)
    done = environment.run("mlx-lm-kvpersist", "doctor")
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_uv_tool_environment_activates(wheel: Path, tmp_path: Path) -> None:
    """`uv tool install mlx-lm --with mlx-lm-kvpersist`."""
    tools = {
        "UV_TOOL_DIR": str(tmp_path / "tools"),
        "UV_TOOL_BIN_DIR": str(tmp_path / "bin"),
    }
    extra = "" if sys.platform == "darwin" else "[cpu]"
    uv("tool", "install", "--quiet", "--python", sys.executable, "mlx-lm", "--with",
       f"{wheel}{extra}", env=tools)  # fmt: skip
    done = subprocess.run(
        [tmp_path / "bin" / "mlx_lm.server", "--plugin", "kvpersist", "--help"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "--kvpersist-dir" in done.stdout
