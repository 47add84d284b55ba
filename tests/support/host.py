"""An environment with stock mlx-lm, our .pth and the test plugins; and a patched server."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pluggy
import pytest

import mlx_lm_kvpersist
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.patching.patches import PATCH_SET, PATCHES

from .server_process import ServerProcess
from .zygote import VARIABLES, Zygote

REPOSITORY = Path(mlx_lm_kvpersist.__file__).parent.parent
PTH = REPOSITORY / "mlx_lm_kvpersist.pth"
ENTRY_POINTS = """\
[mlx_lm.server.plugins]
echo = tests.host.plugins:Echo
editing = tests.host.plugins:Editing
failing = tests.host.plugins:Failing
kvpersist = mlx_lm_kvpersist.plugin:KVPersistPlugin
misspelt = tests.host.plugins:Misspelt
wrong = tests.host.plugins:WrongArguments
"""
TRANSFORMERS = """
class AutoTokenizer:
    register = staticmethod(lambda *args, **options: None)
class PreTrainedTokenizerBase: ...
PreTrainedTokenizer = PreTrainedTokenizerFast = PreTrainedTokenizerBase
"""
"""Names that mlx-lm imports from transformers, whose import takes two thirds of a start."""
SCRIPT = """\
#!{python}
import sys
from {module} import main
if __name__ == "__main__":
    sys.exit(main())
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment that borrows this environment's packages.

    path: where its Python looks for packages first.
    """

    folder: Path
    path: str = ""

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    @property
    def python(self) -> Path:
        return self.bin / "python"

    @property
    def site_packages(self) -> Path:
        major, minor = sys.version_info[:2]
        return self.folder / "lib" / f"python{major}.{minor}" / "site-packages"

    def run(
        self, *command: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program; a bare name is a program in `bin`."""
        program, *arguments = map(str, command)
        path = {"PYTHONPATH": self.path} if self.path else {}
        return subprocess.run(
            [self.bin / program, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**self._variables(), **path, **(env or {})},
            cwd=self.folder,
        )

    def run_forked(
        self, *command: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Do the same as `run` in a fork, which starts in a tenth of the time.

        The fork executes the text of our .pth if the environment has the file. Only `run` shows
        that Python does so.
        """
        program, *arguments = map(str, command)
        script = () if program == "python" else (str(self.bin / program),)
        with TemporaryDirectory(dir=self.folder) as folder:
            output, errors = (Path(folder) / name for name in ("stdout", "stderr"))
            (zygote, *_) = ServerProcess.zygotes[str(self.python)]
            forked = zygote.fork(
                [str(self.python), *script, *arguments],
                output,
                {**self._variables(), **VARIABLES, **(env or {})},
                errors_path=errors,
                cwd=self.folder,
                pth=(self.site_packages / PTH.name).exists(),
            )
            if forked is None:
                return self.run(*command, env=env)
            try:
                status = forked.wait(120)
            except subprocess.TimeoutExpired:
                forked.kill()
                raise
            said = (path.read_text(encoding="utf-8") for path in (output, errors))
            return subprocess.CompletedProcess(list(command), status, *said)

    def _variables(self) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
            "HF_HUB_OFFLINE": "1",
        }

    def add_script(self, name: str, module: str) -> None:
        path = self.bin / name
        path.write_text(SCRIPT.format(python=self.python, module=module), encoding="utf-8")
        path.chmod(0o755)


def borrowed_packages() -> list[str]:
    names = ("mlx-lm", "mlx", "pluggy", "rich")
    return list(dict.fromkeys(str(metadata.distribution(name).locate_file("")) for name in names))


def make_environment(folder: Path) -> Environment:
    """Make a virtual environment with stock mlx-lm, without this package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    environment = Environment(folder)
    # A .pth file can add a folder; the .pth files in that folder are not executed.
    lines = "\n".join(borrowed_packages())
    (environment.site_packages / "_borrowed.pth").write_text(lines + "\n", encoding="utf-8")
    environment.add_script("mlx_lm.server", "mlx_lm.server")
    environment.add_script("mlx_lm", "mlx_lm.cli")
    return environment


@pytest.fixture(scope="session")
def stock_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return make_environment(tmp_path_factory.mktemp("stock") / "venv")


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """An environment with our .pth, this checkout, and the test plugins."""
    made = make_environment(tmp_path_factory.mktemp("activated") / "venv")
    (made.site_packages / "_checkout.pth").write_text(f"{REPOSITORY}\n", encoding="utf-8")
    (made.site_packages / PTH.name).write_text(PTH.read_text(), encoding="utf-8")
    dist_info = made.site_packages / "host_test_plugins-1.0.dist-info"
    dist_info.mkdir()
    (dist_info / "METADATA").write_text("Name: host-test-plugins\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")
    zygote = Zygote(str(made.python))
    ServerProcess.zygotes[str(made.python)] = (zygote,)
    yield made
    del ServerProcess.zygotes[str(made.python)]
    zygote.close()


def place_of_transformers(folder: Path) -> str:
    """Write modules for programs that load no model; return their folder as a PYTHONPATH."""
    (package := folder / "transformers").mkdir()
    for name in ("__init__", "tokenization_utils_base"):
        (package / f"{name}.py").write_text(TRANSFORMERS, encoding="utf-8")
    return str(folder)


@pytest.fixture
def server() -> Iterator[ModuleType]:
    """The stock server's module, which no test may leave patched."""
    module = importlib.import_module("mlx_lm.server")
    yield module
    assert not PATCH_SET.is_applied


@pytest.fixture
def patched_server(server: ModuleType) -> Iterator[ModuleType]:
    """The server's module with every patch in place, and no plugin."""
    PATCH_SET.apply(PATCHES)
    yield server
    PATCH_SET.undo()


@contextmanager
def plugged(*plugins: Any) -> Iterator[pluggy.PluginManager]:
    """Let the patches ask these plugins, in this order."""
    made = manager.PluginManager()
    for plugin in reversed(plugins):
        made.register(plugin)
    with manager.using(made):
        yield made
