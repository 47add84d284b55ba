"""What people install: the wheel, an editable checkout, a tool environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.host import PTH, REPOSITORY, Environment, make_environment


def uv(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run uv, or fail with what it said."""
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    uv("build", "--quiet", "--wheel", "--out-dir", folder, REPOSITORY)
    (path,) = folder.glob("*.whl")
    return path


def assert_activates(environment: Environment) -> None:
    """Start the server with and without the flag. The .pth itself is tried in test_startup.py."""
    for form in (("mlx_lm.server",), ("python", "-m", "mlx_lm.server")):
        done = environment.run(*form, "--plugin", "kvpersist", "--help")
        assert done.returncode == 0, done.stderr
        assert "--kvpersist-dir" in done.stdout, form
    assert "kvpersist" not in environment.run("mlx_lm.server", "--help").stdout


def test_the_wheel_puts_the_pth_beside_the_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert archive.read(PTH.name) == PTH.read_bytes()
    assert "mlx_lm_kvpersist/_startup.py" in names


def test_c10_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    (dist_info,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {"mlx_lm_kvpersist", PTH.name, dist_info}
    assert "mlx_lm_kvpersist/py.typed" in names
    assert not any("support" in name or "synthetic" in name for name in names)


def test_c10_the_checks_stay_in_the_source_distribution(tmp_path: Path) -> None:
    uv("build", "--quiet", "--sdist", "--out-dir", tmp_path, REPOSITORY)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"models_check/__main__.py", "patches_check/__main__.py"}


def test_the_wheel_activates_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    """Stock mlx-lm is borrowed from this environment; the package comes from the wheel alone."""
    environment = make_environment(tmp_path / "venv")
    uv("pip", "install", "--quiet", "--no-deps", "--python", environment.python, wheel)
    assert (environment.site_packages / PTH.name).is_file()
    where = environment.run("python", "-c", "import mlx_lm_kvpersist as p; print(p.__file__)")
    assert where.stdout.startswith(str(environment.site_packages))
    assert_activates(environment)


def test_uninstalling_takes_the_pth_with_it(wheel: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "venv")
    uv("pip", "install", "--quiet", "--no-deps", "--python", environment.python, wheel)
    uv("pip", "uninstall", "--quiet", "--python", environment.python, "mlx-lm-kvpersist")
    assert not (environment.site_packages / PTH.name).exists()


def test_an_editable_install_activates(tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "venv")
    uv("pip", "install", "--quiet", "--no-deps", "--python", environment.python, "-e", REPOSITORY)
    assert_activates(environment)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_everything_from_the_index_activates(wheel: Path, tmp_path: Path) -> None:
    """Nothing borrowed: the wheel with its dependencies, as a user's first install."""
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
def test_a_tool_environment_activates(wheel: Path, tmp_path: Path) -> None:
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
